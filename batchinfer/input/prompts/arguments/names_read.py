"""The names that a template reads from outside: those it uses where it has not surely set them itself.

Jinja's own `find_undeclared_variables` also lists names that are set in both branches of an `if` before they are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from jinja2 import nodes
from jinja2.visitor import NodeVisitor

_OF_MACROS = frozenset({"caller", "kwargs", "varargs"})


def names_read(tree: nodes.Template) -> set[str]:
    """The names that a template reads, the environment's functions among them."""
    reads = _Reads()
    reads.visit(tree)
    reads.finish()
    return reads.found - {"self"}


class _Reads(NodeVisitor):
    """Walks through a template in the order in which it runs. `_set` are the names that are surely set by then.

    Macros are looked into at the end: they are run later than they are written, and see what was set meanwhile.
    """

    def __init__(self) -> None:
        self.found: set[str] = set()
        self._set: set[str] = set()
        self._later: list[nodes.Macro] = []

    def finish(self) -> None:
        """Look into the macros, in which others may stand."""
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
        """The names that are set behind a branch."""
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
        """A scope of its own: what is set in it is not set behind it."""
        before = self._set
        self._set = before | set(names)
        yield
        self._set = before


def _stored(target: nodes.Node) -> set[str]:
    own = {target.name} if isinstance(target, nodes.Name) else set()
    return own | {name.name for name in target.find_all(nodes.Name)}
