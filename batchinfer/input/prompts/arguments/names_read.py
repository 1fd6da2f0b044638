"""Finds the names that a template reads without having certainly set them before.

Jinja's `find_undeclared_variables` also reports names that both branches of an `if` set before they are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from jinja2 import nodes
from jinja2.visitor import NodeVisitor

_OF_MACROS = frozenset({"caller", "kwargs", "varargs"})


def names_read(tree: nodes.Template) -> set[str]:
    """Return the names that a parsed Jinja template needs from outside: it may read them before it sets them.

    Functions that the environment provides are included.
    """
    reads = _Reads()
    reads.visit(tree)
    reads.finish()
    return reads.found - {"self"}


class _Reads(NodeVisitor):
    # Visits a template in the order of execution. Macros are visited at the end, since they run later than they are
    # defined, and can read names that are set in between.
    def __init__(self) -> None:
        self.found: set[str] = set()
        self._set: set[str] = set()
        self._later: list[nodes.Macro] = []

    def finish(self) -> None:
        """Visit the bodies of the macros that the template defines. They may define further macros."""
        while self._later:
            macro = self._later.pop()
            names = [argument.name for argument in macro.args]
            with self._inside({*names, *_OF_MACROS}):
                self._all(macro.body)

    def visit_Name(self, node: nodes.Name) -> None:
        if node.ctx == "load" and node.name not in self._set:
            self.found.add(node.name)

    def visit_NSRef(self, node: nodes.NSRef) -> None:
        if node.name not in self._set:
            self.found.add(node.name)

    def visit_Assign(self, node: nodes.Assign) -> None:
        self.visit(node.node)
        self._assign(node.target)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> None:
        with self._inside():
            self._all([*([node.filter] if node.filter is not None else []), *node.body])
        self._assign(node.target)

    def visit_If(self, node: nodes.If) -> None:
        self.visit(node.test)
        after = [self._after(node.body)]
        for other in node.elif_:
            self.visit(other.test)
            after.append(self._after(other.body))
        after.append(self._after(node.else_))
        self._set = set.intersection(*after)

    def visit_For(self, node: nodes.For) -> None:
        self.visit(node.iter)
        with self._inside({*_stored(node.target), "loop"}):
            self._all([*([node.test] if node.test is not None else []), *node.body])
        with self._inside():
            self._all(node.else_)

    def visit_Macro(self, node: nodes.Macro) -> None:
        self._all(node.defaults)
        self._set.add(node.name)
        self._later.append(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> None:
        self._all([node.call, *node.defaults])
        with self._inside(argument.name for argument in node.args):
            self._all(node.body)

    def visit_With(self, node: nodes.With) -> None:
        self._all(node.values)
        with self._inside(name for target in node.targets for name in _stored(target)):
            self._all(node.body)

    def visit_FilterBlock(self, node: nodes.FilterBlock) -> None:
        with self._inside():
            self.generic_visit(node)

    def visit_Block(self, node: nodes.Block) -> None:
        with self._inside():
            self.generic_visit(node)

    def _all(self, several: Iterable[nodes.Node]) -> None:
        for node in several:
            self.visit(node)

    def _after(self, branch: Sequence[nodes.Node]) -> set[str]:
        before = set(self._set)
        self._all(branch)
        found, self._set = self._set, before
        return found

    def _assign(self, target: nodes.Node) -> None:
        self._all(target.find_all(nodes.NSRef))
        if isinstance(target, nodes.NSRef):
            self.visit(target)
        self._set.update(_stored(target))

    @contextmanager
    def _inside(self, names: Iterable[str] = ()) -> Iterator[None]:
        before = self._set
        self._set = before | set(names)
        yield
        self._set = before


def _stored(target: nodes.Node) -> set[str]:
    own = {target.name} if isinstance(target, nodes.Name) else set()
    return own | {name.name for name in target.find_all(nodes.Name)}
