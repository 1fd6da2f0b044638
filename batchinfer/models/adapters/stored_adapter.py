"""An adapter's folder, checked against its model before anything is loaded. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from batchinfer.core.errors import JobFileError, Mistake
from batchinfer.core.hub import ADAPTER as CONFIG
from batchinfer.core.hub import ADAPTER_WEIGHTS as WEIGHTS
from batchinfer.core.hub import PICKLE_SUFFIXES
from batchinfer.models.adapters.adapter_config import LoraConfig, read_adapter_config
from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.checkpoint.tensor_names import WEIGHT, StoredParameter, layer_names
from batchinfer.models.families.family import Part
from batchinfer.models.families.registry import FAMILIES
from batchinfer.models.files.fingerprint import Progress, file_sha256
from batchinfer.models.files.folder import CheckpointFolder
from batchinfer.models.files.safetensors_header import read_header
from batchinfer.models.files.weight_files import FLOAT_DTYPES, StoredTensor, listed
from batchinfer.models.spec.spec import LinearSpec

_WRAPPED = "base_model.model."  # prefix of the names of PEFT's tensors
_A, _B, _MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
# Possible prefixes of a decoder's modules, in multimodal models and in other versions of transformers
_BASES = ("model.language_model.", "language_model.model.", "model.", "")
# The error for a DoRA with tensor parallelism
DORA_NOT_SHARDED = "a DoRA is merged into whole rows of weights; only layers can be sharded among ranks"
DIGEST = 32  # hexadecimal digits of a fingerprint


@dataclass(frozen=True, slots=True)
class PartOutputs:
    """The outputs of a matrix product that one module of the checkpoint computes, such as q_proj in qkv.

    Args:
        first: The first output of the range in the product.
        count: The number of outputs in the range.
        part: The location of these outputs in the module. None: the module has no other outputs.
    """

    first: int
    count: int
    part: Part | None


@dataclass(frozen=True, slots=True)
class ChangedModule:
    """A module whose outputs an adapter changes: for inputs x, it adds scale B A x.

    Args:
        a: The file and header entry of A, (rank, inputs).
        b: The file and header entry of B, (outputs, rank).
        a_name: The name of the tensor A.
        b_name: The name of the tensor B.
        scale: The factor of B A.
        outputs: The outputs of the module in a matrix product of batchinfer's layers.
        magnitude_name: The name of the tensor with a DoRA's length of each row. None: the adapter is no DoRA.
    """

    a: StoredTensor
    b: StoredTensor
    a_name: str
    b_name: str
    scale: float
    outputs: tuple[PartOutputs, ...]
    magnitude_name: str | None = None

    @property
    def rank(self) -> int:
        """Return the rank of A and B, which is the number of rows of A."""
        return self.a.info.shape[0]


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """An adapter in PEFT's format whose folder was checked to fit the model.

    Args:
        path: The folder.
        config: The adapter's configuration, which determines the scale of B A.
        weights: The safetensors file with A and B of all modules.
        changed: The modules that the adapter changes, by (number of the layer, name of the matrix product).
    """

    path: Path
    config: LoraConfig
    weights: Path
    changed: Mapping[tuple[int, str], tuple[ChangedModule, ...]]

    @property
    def values(self) -> int:
        """Return the number of values in the LoRA matrices A and B of all modules together."""
        modules = (module for modules in self.changed.values() for module in modules)
        return sum(module.rank * (module.a.info.shape[1] + module.b.info.shape[0]) for module in modules)

    def of_layers(self, layers: tuple[int, int] | None) -> StoredAdapter:
        """Return a copy of the adapter that changes only a range of layers, which are renumbered from 0.

        Args:
            layers: First layer, and end (exclusive). None: all layers.
        """
        if layers is None:
            return self
        first, end = layers
        own = {(at - first, name): each for (at, name), each in self.changed.items() if first <= at < end}
        return replace(self, changed=own)

    def fingerprint(self, cache: MutableMapping[str, str], progress: Progress = lambda _: None) -> str:
        """Return a hash (in hex) of all that determines the adapter's effect: its weights and its configuration.

        Args:
            cache: Hashes of files, by `file_identity`. New hashes are added.
            progress: Called with the number of bytes that were hashed since the last call.
        """
        config = self.config
        scaled = (config.alpha, config.rank_stabilised, sorted((config.alphas or {}).items()))
        text = json.dumps({"lora": scaled, "weights": file_sha256(self.weights, cache, progress)})
        return hashlib.sha256(text.encode()).hexdigest()[:DIGEST]


@dataclass(slots=True)
class _Module:
    layer: int
    linear: LinearSpec
    outputs: list[PartOutputs] = field(default_factory=list)
    refused: str = ""


def inspect_adapter(name: str, path: Path, checkpoint: Checkpoint) -> StoredAdapter:
    """Check the folder of an adapter, and return its settings and the modules that it changes. Weights are not read.

    Args:
        name: The adapter's name in the job file, for error messages.
        path: The folder.
        checkpoint: The model that the adapter changes.

    Raises:
        JobFileError: Something is missing, not supported, or does not fit the model.
        SecurityRefusal: A path leaves the folder, or a file is malformed.
    """
    folder = _folder(name, path)
    config, mistakes = read_adapter_config(path / CONFIG)
    if mistakes:
        raise _wrong(name, path, mistakes)
    weights = folder.file(WEIGHTS)
    if weights is None:
        raise _wrong(name, path, [_no_weights(folder)])
    tensors = {tensor: StoredTensor(weights, info) for tensor, info in read_header(weights).items()}
    changed, mistakes = _match_modules(tensors, config, checkpoint)
    if mistakes:
        raise _wrong(name, path, mistakes)
    return StoredAdapter(folder.path, config, weights, changed)


def check_adapter_config(path: Path) -> None:
    """Check the adapter_config.json in an adapter's folder, without a model to compare it with.

    Raises:
        JobFileError: The folder or file is missing, or the configuration is invalid or not supported.
        SecurityRefusal: A path leaves the folder.
    """
    _, mistakes = read_adapter_config(_folder(path.name, path).path / CONFIG)
    if mistakes:
        raise _wrong(path.name, path, mistakes)


def _folder(name: str, path: Path) -> CheckpointFolder:
    if not path.is_dir():
        raise _wrong(
            name, path, [f"{path} is {'a file' if path.exists() else 'missing'}; a folder is needed"]
        )
    folder = CheckpointFolder(path)
    if folder.file(CONFIG) is None:
        raise _wrong(name, path, [f"{path} has no {CONFIG}; a folder that PEFT saved is needed"])
    return folder


def _wrong(name: str, path: Path, messages: Iterable[str]) -> JobFileError:
    return JobFileError(str(path), [Mistake(f"model.adapters.{name}", message) for message in messages])


def _no_weights(folder: CheckpointFolder) -> str:
    pickles = folder.names(*PICKLE_SUFFIXES)
    if pickles:
        return f"its weights are pickle ({listed(pickles)}), which can run code; save them as {WEIGHTS}"
    return f"{folder.path} has no {WEIGHTS}"


def _match_modules(
    tensors: Mapping[str, StoredTensor], config: LoraConfig, checkpoint: Checkpoint
) -> tuple[dict[tuple[int, str], tuple[ChangedModule, ...]], list[str]]:
    modules, mistakes = _modules(checkpoint), list[str]()
    found: dict[tuple[int, str], list[ChangedModule]] = {}
    factors = {name.removesuffix(_A) for name in tensors if name.endswith(_A)}
    read = (_A, _B, _MAGNITUDE) if config.dora else (_A, _B)
    strange = [name for name in tensors if not name.endswith(read)]
    strange += [name for name in tensors if name.endswith(_B) and name.removesuffix(_B) not in factors]
    if strange:
        mistakes.append(_unknown_tensors(strange))
    if not factors:
        mistakes.append(f"{WEIGHTS} holds no factors named *{_A} and *{_B}")
    for stem in sorted(factors):
        module = _module_of(stem.removeprefix(_WRAPPED), modules, checkpoint)
        if module is None:
            mistakes.append(f"{stem}{_A}: the model has no such module in its layers")
        elif module.refused:
            mistakes.append(f"{stem}{_A}: {module.refused}")
        elif stem + _B not in tensors:
            mistakes.append(f"{stem}{_B} is missing")
        elif wrong := _factor_mistake(stem, tensors, module) or (
            _magnitude_mistake(stem, tensors, module) if config.dora else None
        ):
            mistakes.append(wrong)
        else:
            rank = tensors[stem + _A].info.shape[0]
            scale = config.scale(stem.removeprefix(_WRAPPED), rank)
            parts = tensors[stem + _A], tensors[stem + _B], stem + _A, stem + _B
            magnitude = stem + _MAGNITUDE if config.dora else None
            one = ChangedModule(*parts, scale, tuple(module.outputs), magnitude)
            found.setdefault((module.layer, module.linear.name), []).append(one)
    return {product: tuple(modules) for product, modules in found.items()}, mistakes


def _unknown_tensors(names: list[str]) -> str:
    tables = [name for name in names if "embed" in name or "lm_head" in name]
    if tables:
        why = "embeddings and heads are shared by all rows of a batch, and adapters of them are not computed"
        return f"{listed(tables)}: {why}; merge the adapter into the model (PEFT: merge_and_unload)"
    return f"{listed(names)}: tensors other than the factors of LoRA are not read"


def _modules(checkpoint: Checkpoint) -> dict[str, _Module]:
    found: dict[str, _Module] = {}
    for index, layer in enumerate(checkpoint.spec.layers):
        names = layer_names(checkpoint.spec, index, checkpoint.prefixes)
        for linear in layer.linears:
            first = 0
            for part, count in linear.parts:
                stored = names[part]
                module = _module_name(stored).removeprefix(checkpoint.prefixes.base)
                own = found.setdefault(module, _Module(index, linear, refused=_refusal(linear, stored)))
                if own.linear.name != linear.name:
                    own.refused = "its outputs belong to several products; merge the adapter into the model"
                own.outputs.append(PartOutputs(first, count, stored.part))
                first += count
    return found


def _module_name(stored: StoredParameter) -> str:
    return stored.tensor.removesuffix(WEIGHT if stored.part is None else stored.part.weight)


def _refusal(linear: LinearSpec, stored: StoredParameter) -> str:
    if linear.experts:
        return (
            "adapters of experts are not computed; merge the adapter into the model (PEFT: merge_and_unload)"
        )
    if linear.heads:
        return "adapters of kv_b_proj (latent attention) are not computed; merge the adapter into the model"
    if linear.exact or stored.rows:
        return "adapters of routers are not computed; merge the adapter into the model"
    return ""


def _module_of(name: str, modules: Mapping[str, _Module], checkpoint: Checkpoint) -> _Module | None:
    prefixes = (checkpoint.prefixes.base, FAMILIES[checkpoint.spec.family].names.base, *_BASES)
    rests = (name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix))
    return next((modules[rest] for rest in rests if rest in modules), None)


def _magnitude_mistake(stem: str, tensors: Mapping[str, StoredTensor], module: _Module) -> str | None:
    found, outputs = tensors.get(stem + _MAGNITUDE), max(map(_min_outputs, module.outputs))
    if module.linear.stored:
        return f"{stem}: DoRA cannot be merged into weights that stay quantised; set model.quantization: none"
    if found is None or found.info.shape != (outputs,) or found.info.dtype not in FLOAT_DTYPES:
        return f"{stem}{_MAGNITUDE} is {'missing' if found is None else list(found.info.shape)}; wanted [{outputs}]"
    return None


def _factor_mistake(stem: str, tensors: Mapping[str, StoredTensor], module: _Module) -> str | None:
    a, b = tensors[stem + _A].info, tensors[stem + _B].info
    for name, info in ((stem + _A, a), (stem + _B, b)):
        if info.dtype not in FLOAT_DTYPES:
            return f"{name} is {info.dtype}; wanted {', '.join(FLOAT_DTYPES)}"
    inputs, outputs = module.linear.inputs, max(map(_min_outputs, module.outputs))
    wanted = (a.shape[0] if a.shape else 0, inputs), (outputs, a.shape[0] if a.shape else 0)
    if (a.shape, b.shape) != wanted or not wanted[0][0]:
        return f"{stem}: A is {list(a.shape)} and B {list(b.shape)}; wanted [r, {inputs}] and [{outputs}, r]"
    return None


def _min_outputs(outputs: PartOutputs) -> int:
    part = outputs.part
    if part is None:
        return outputs.count
    return part.stop if part.every is None else outputs.count // (part.stop - part.start) * part.every


def changed_modules(
    adapters: Iterable[StoredAdapter], layer: int, linear: str
) -> Iterator[tuple[ChangedModule, ...]]:
    """Yield, for each adapter, the modules that it changes in one matrix product of a layer; () if it changes none.

    A matrix product may join several modules of the checkpoint, as qkv joins q_proj, k_proj and v_proj.

    Args:
        adapters: The adapters.
        layer: The number of the layer.
        linear: The name of the matrix product.
    """
    for adapter in adapters:
        yield adapter.changed.get((layer, linear), ())
