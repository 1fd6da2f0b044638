"""The tensors of a checkpoint, by the names that its family uses."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from batchinfer.models.families.family import ClassifierNames, Modules, NamePrefixes, Part, Rows
from batchinfer.models.families.registry import FAMILIES
from batchinfer.models.spec.parameters import (
    BIAS,
    CLASSIFIER_DENSE,
    CLASSIFIER_NORM,
    CLASSIFIER_OUT,
    DISTANCES,
    EMBEDDING,
    EMBEDDING_NORM,
    FINAL_NORM,
    HEAD,
    POSITIONS,
    TOKEN_TYPES,
    Shape,
    layer_parameters,
    table_parameters,
)
from batchinfer.models.spec.spec import ModelSpec

WEIGHT = ".weight"
MAX_MTP_LAYERS = 64  # published checkpoints have one


@dataclass(frozen=True, slots=True)
class StoredParameter:
    """The location of a parameter in a checkpoint: a tensor, a part of a tensor, or several tensors.

    Args:
        tensor: The name of the tensor. With `rows`, the name of the first one.
        part: The part of the tensor that is the parameter. None: all of it.
        rows: If not empty, each row of the parameter is a tensor of its own, with these names.
    """

    tensor: str
    part: Part | None = None
    rows: tuple[str, ...] = ()

    @property
    def index(self) -> int | None:
        """Return the index of the parameter's matrix, if the tensor stores several matrices; None if it does not."""
        return None if self.part is None else self.part.index

    def shape(self, parameter: Shape) -> Shape:
        """Return the smallest shape that the stored tensor can have.

        Args:
            parameter: The shape of the parameter, which may be only a part of the tensor.
        """
        if self.part is None:
            return parameter
        rows, width = parameter[0], self.part.stop - self.part.start
        stored = self.part.stop if self.part.every is None else rows // width * self.part.every
        whole = (stored, *parameter[1:])
        matrix = whole[::-1] if self.part.transposed else whole
        return matrix if self.part.index is None else (self.part.index + 1, *matrix)


def prefixes_of(family: str, names: Collection[str], among: Iterable[NamePrefixes] = ()) -> NamePrefixes:
    """Return the prefixes that the names of a checkpoint's tensors have, which depend on the class that was saved.

    Args:
        family: The model_type of the family.
        names: The names of the tensors.
        among: Prefixes to try first.

    Returns:
        The first of `among` that occurs in the names. Otherwise, the family's usual prefix. Without it, only the base
        model was saved, and the prefixes are empty.
    """
    known = (*among, NamePrefixes(FAMILIES[family].names.base))
    found = (each for each in known if any(name.startswith(each.base) for name in names))
    return next(found, NamePrefixes())


def ignores(family: str, name: str) -> bool:
    """Return True if a tensor is not read, as it can be computed, or belongs to a head on top of an encoder.

    Args:
        family: The model_type of the family.
        name: The name of the tensor in the checkpoint.
    """
    names = FAMILIES[family].names
    return name.endswith(names.ignored) or name.removeprefix(names.base).startswith(names.unread)


def stored_classifier(spec: ModelSpec, names: Collection[str], prefixes: NamePrefixes) -> ModelSpec:
    """Return the spec of a model, without its classification head if the checkpoint does not store the head.

    Some base models were saved with the configuration of a class that has a head.

    Args:
        spec: The model that config.json describes.
        names: The names of the checkpoint's tensors.
        prefixes: The prefixes of these names.
    """
    if spec.classifier is None or table_names(spec, prefixes)[CLASSIFIER_OUT].tensor in names:
        return spec
    return spec.without_classifier()


def mtp_prefixes(spec: ModelSpec, raw: Mapping[str, Any], prefixes: NamePrefixes) -> tuple[str, ...]:
    """Return the prefix of the names of each MTP layer's tensors.

    A checkpoint stores MTP layers after the model's layers.

    Args:
        spec: The model.
        raw: The decoder's configuration, which has the number of MTP layers.
        prefixes: The prefixes of the checkpoint's tensors.
    """
    family, first = FAMILIES[spec.family], len(spec.layers)
    count = raw.get(family.mtp_layers_key) if family.mtp_layers_key else 0
    numbers = range(first, first + min(count, MAX_MTP_LAYERS)) if isinstance(count, int) else ()
    return tuple(f"{prefixes.base}{family.names.layers}.{number}." for number in numbers)


def table_names(spec: ModelSpec, prefixes: NamePrefixes) -> dict[str, StoredParameter]:
    """Return where a checkpoint stores each parameter outside of layers, by name of the parameter.

    Args:
        spec: The model. A tied head is included.
        prefixes: The prefixes of the checkpoint's tensors.
    """
    names = FAMILIES[spec.family].names
    modules = {
        EMBEDDING: prefixes.base + names.embedding,
        POSITIONS: prefixes.base + names.positions,
        FINAL_NORM: prefixes.base + names.final_norm,
        HEAD: prefixes.head + names.head,
        EMBEDDING_NORM: prefixes.base + names.embedding_norm,
        TOKEN_TYPES: prefixes.base + names.token_types,
        DISTANCES: prefixes.base + names.distances,
        **_classifier_modules(names.classifier, prefixes),
    }
    return dict(_locate([*table_parameters(spec), *([HEAD] if spec.causal else [])], modules))


def _classifier_modules(names: ClassifierNames | None, prefixes: NamePrefixes) -> dict[str, str]:
    if names is None:
        return {}
    dense = prefixes.base if names.dense_in_base else prefixes.head
    parts = {CLASSIFIER_NORM: prefixes.head + names.norm, CLASSIFIER_OUT: prefixes.head + names.out}
    return {CLASSIFIER_DENSE: dense + names.dense, **parts}


def layer_names(spec: ModelSpec, index: int, prefixes: NamePrefixes) -> dict[str, StoredParameter]:
    """Return where a checkpoint stores each parameter of a layer, by name of the parameter.

    Args:
        spec: The model.
        index: The number of the layer.
        prefixes: The prefixes of the checkpoint's tensors.
    """
    layer, family = spec.layers[index], FAMILIES[spec.family]
    start = f"{prefixes.base}{family.names.layers}.{index}."
    return dict(_locate(layer_parameters(layer), family.modules(layer), start))


def _locate(
    parameters: Iterable[str], modules: Modules, start: str = ""
) -> Iterator[tuple[str, StoredParameter]]:
    for name in parameters:
        module, biased = modules[name.removesuffix(BIAS)], name.endswith(BIAS)
        if isinstance(module, str):
            yield name, StoredParameter(start + module + (BIAS if biased else WEIGHT))
        elif isinstance(module, Rows):
            rows = tuple(start + row + WEIGHT for row in module.modules)
            yield name, StoredParameter(rows[0], rows=rows)
        else:
            suffix = module.bias if biased else module.weight
            yield name, StoredParameter(start + module.module + suffix, module)


def expected_shapes(spec: ModelSpec, prefixes: NamePrefixes) -> dict[str, Shape]:
    """Return the shape of each tensor that a checkpoint of a model is expected to have, by name of the tensor.

    Args:
        spec: The model. A tied head is included.
        prefixes: The prefixes of the checkpoint's tensors.
    """
    tables = table_parameters(spec)
    shapes: dict[str, Shape] = {}
    head = {HEAD: tables[EMBEDDING]} if spec.causal else {}
    _add(shapes, table_names(spec, prefixes), {**head, **tables})
    for index in range(len(spec.layers)):
        shapes |= layer_shapes(spec, index, prefixes)
    return shapes


def layer_shapes(spec: ModelSpec, index: int, prefixes: NamePrefixes) -> dict[str, Shape]:
    """Return the shape of each tensor in which a checkpoint stores a layer, by name of the tensor.

    Args:
        spec: The model.
        index: The number of the layer.
        prefixes: The prefixes of the checkpoint's tensors.
    """
    shapes: dict[str, Shape] = {}
    _add(shapes, layer_names(spec, index, prefixes), layer_parameters(spec.layers[index]))
    return shapes


def _add(
    shapes: dict[str, Shape], names: Mapping[str, StoredParameter], parameters: Mapping[str, Shape]
) -> None:
    for parameter, stored in names.items():
        if stored.rows:
            shapes |= dict.fromkeys(stored.rows, parameters[parameter][1:])
            continue
        shape = stored.shape(parameters[parameter])
        known = shapes.get(stored.tensor, shape)
        shapes[stored.tensor] = tuple(map(max, known, shape))
