"""A checkpoint folder, checked before anything is loaded. No torch."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from batchinfer.core.wording import size
from batchinfer.models.checkpoint.config import decoder_config, is_supported, load_config, multimodal_of
from batchinfer.models.checkpoint.tensor_names import (
    StoredParameter,
    expected_shapes,
    ignores,
    layer_names,
    mtp_prefixes,
    prefixes_of,
    stored_classifier,
    table_names,
)
from batchinfer.models.checkpoint.zero_points import misread_before
from batchinfer.models.families.family import NamePrefixes
from batchinfer.models.families.multimodal import Multimodal
from batchinfer.models.files.config_fields import checkpoint_error, read_config_json
from batchinfer.models.files.fingerprint import Progress
from batchinfer.models.files.folder import CheckpointFolder
from batchinfer.models.files.weight_files import (
    FLOAT_DTYPES,
    StoredTensor,
    WeightFiles,
    listed,
    read_weight_files,
)
from batchinfer.models.formats.encoded_tensor import EncodedTensor, EncodedTensors
from batchinfer.models.formats.registry import find_encoded_tensors, stored_format
from batchinfer.models.spec.model_cost import model_cost
from batchinfer.models.spec.parameters import EMBEDDING, HEAD, Shape
from batchinfer.models.spec.spec import LayerSpec, ModelSpec
from batchinfer_kernels.arithmetic import (
    STORED,
    Device,
    Dtype,
    KvCacheDtype,
    Quantization,
    WeightCodes,
    WeightForm,
)
from batchinfer_kernels.cost import ModelCost

_IN_16_BITS = " in 16 bits"
OWN = "batchinfer"  # `modelling` of models of the supported families


@dataclass(frozen=True, slots=True)
class Checkpoint(WeightFiles):
    """A checkpoint folder of a supported family that passed every check. Its tensors fit its configuration.

    Args:
        spec: The model that the checkpoint contains.
        prefixes: The prefixes of the names of its tensors.
        encoded: The weights that are stored in a quantised or sparse format, by name of the weight.
        shapes: The shapes of all weights after dequantisation, by name.
        notices: Messages for the user before the run.
        modelling: The name of the program whose code computes the model.
    """

    spec: ModelSpec
    prefixes: NamePrefixes
    encoded: Mapping[str, EncodedTensor]
    shapes: Mapping[str, Shape]
    notices: tuple[str, ...] = ()

    modelling: ClassVar[str] = OWN

    def fingerprint(self, cache: MutableMapping[str, str], progress: Progress = lambda _: None) -> str:
        """Return a hash (in hex) of the weights and the configuration, which enters work keys.

        If earlier versions of batchinfer read wrong zero points, the hash differs from theirs, so their answers are not
        reused.

        Args:
            cache: Hashes of files from earlier calls; new ones are added.
            progress: Called with the number of bytes hashed since the last call.
        """
        found = WeightFiles.fingerprint(self, cache, progress)
        if not self.check_zero_points(cache):
            return found
        return hashlib.sha256(f"{found} with the zero points that are stored".encode()).hexdigest()

    def check_zero_points(self, cache: MutableMapping[str, str]) -> bool:
        """Return True if earlier versions of batchinfer read wrong zero points from this (GPTQ) checkpoint.

        Args:
            cache: Results of earlier calls, by files and format. A new result is added.

        Raises:
            JobFileError: The checkpoint states that it is symmetric, but its zero points are not.
        """
        return misread_before(self.path, self.encoded, self.tensors, cache)

    @property
    def plain(self) -> bool:
        """Return True if all weights are stored as floats, neither quantised nor sparse."""
        return all(each.plain for each in self.encoded.values())

    @property
    def stored_quantization(self) -> Quantization:
        """Return the value of model.quantization with which a run uses stored weights without dequantising them.

        "none" if there is no such value, or more than one. 8-bit formats take precedence over 4-bit formats.
        """
        codes = {form.codes for form in self.keep_quantized(frozenset(STORED)).spec.forms}
        codes = codes & {"fp8", "int8"} or codes - {"sparse"} or codes
        return STORED[codes.pop()] if len(codes) == 1 else "none"

    def for_quantization(self, quantization: Quantization) -> Checkpoint:
        """Return a copy that keeps stored weights quantised where their format fits model.quantization.

        Args:
            quantization: The job's value of model.quantization.
        """
        kept = {codes for codes, held in STORED.items() if held == quantization}
        kept |= {"int4"} if quantization == "int4" else set()
        return self.keep_quantized(frozenset(kept)) if kept else self

    def keep_quantized(self, among: frozenset[WeightCodes] = frozenset({"fp8", "int8"})) -> Checkpoint:
        """Return a copy whose spec keeps stored weights quantised in memory, if operators can compute with them.

        Args:
            among: The types of quantised values to keep. Weights of other types are dequantised on loading.
        """
        layers = tuple(
            replace(layer, forms=tuple(self._forms(index, layer, among)))
            for index, layer in enumerate(self.spec.layers)
        )
        spec = replace(self.spec, layers=layers)
        kept = tuple(_kept_notices(spec))
        others = (notice for notice in self.notices if not (kept and _IN_16_BITS in notice))
        return replace(self, spec=spec, notices=(*kept, *others))

    def _forms(
        self, index: int, layer: LayerSpec, among: frozenset[WeightCodes]
    ) -> Iterator[tuple[str, WeightForm]]:
        """Yield the name of each matrix product of a layer whose weight can stay as stored, and the form of the weight.

        Args:
            index: The number of the layer.
            layer: The layer.
            among: The types of quantised values to keep.
        """
        names = layer_names(self.spec, index, self.prefixes)
        for linear in layer.linears:
            if linear.exact or linear.heads:
                continue
            parts = (names[part] for part, _ in linear.parts)
            found = {self._form(part, bool(linear.experts)) for part in parts}
            form = found.pop()
            supported = form is None or form.coded or not linear.experts  # no grouped product skips zeros
            if form is not None and not found and form.codes in among and supported:
                yield linear.name, form

    def _form(self, stored: StoredParameter, whole: bool) -> WeightForm | None:
        """Return the form in which a stored parameter can stay in memory; None if it must be dequantised.

        Args:
            stored: Where the parameter is stored.
            whole: If True, a parameter that is only a part of a tensor must be dequantised.
        """
        encoded, part = self.encoded.get(stored.tensor), stored.part
        if encoded is None or stored.rows:
            return None
        if encoded.transposed:  # quantised values are stored output by output in each matrix
            return encoded.form if part is not None and part.transposed and part.index is not None else None
        if part is not None and (whole or part.index is not None or part.transposed):
            return None
        return encoded.form

    @property
    def dtype(self) -> Dtype:
        """Return the dtype that config.json states, or else the float dtype with the most stored bytes."""
        return self.spec.dtype or self.stored_dtype

    @property
    def parameters(self) -> int:
        """Return the number of parameters of the model, however they are stored: quantised or as floats."""
        return sum(map(math.prod, self.shapes.values()))

    def refusals(self, quantized: bool, deterministic: bool, coded_cache: bool) -> list[tuple[str, str]]:
        """Return (key, reason) for each key of the job file whose value this model does not support on any device.

        Args:
            quantized: Not used.
            deterministic: Not used.
            coded_cache: True if the job quantises the KV cache.
        """
        if not (coded_cache and self.spec.attention.cache.latent):
            return []
        why = f"{self.spec.family} caches latents, which are small already and are not quantised"
        return [("model.kv_cache_dtype", f"{why}; leave it out")]

    def cost(
        self,
        itemsize: int,
        quantization: Quantization = "none",
        kv_cache: KvCacheDtype = "auto",
        device: Device = "cpu",
        deterministic: bool = False,
    ) -> ModelCost:
        """Return the FLOPs and memory traffic of the model's steps.

        Args:
            itemsize: Bytes of an activation, and of weights and cached values that are not quantised.
            quantization: The job's value of model.quantization.
            kv_cache: The job's dtype of the KV cache.
            device: The device whose operators run.
            deterministic: True if the job is deterministic.
        """
        spec = self.spec.quantized(quantization).with_cache_dtype(kv_cache)
        return model_cost(spec, itemsize, device, deterministic)


def inspect_checkpoint(path: Path) -> Checkpoint:
    """Check a Hugging Face checkpoint folder of a supported family without loading it.

    Code of the checkpoint, which an auto_map in config.json names, is never run: batchinfer computes the model.

    Raises:
        SecurityRefusal: Weights are pickled, the model is not supported and has an auto_map, the tokenizer exists only
            as Python code, a path leaves the folder, or a safetensors header is malformed.
        JobFileError: Something is missing or not supported, or weights do not fit the configuration.
    """
    folder = config_folder(path)
    raw = read_config_json(folder.path)
    if not is_supported(raw):
        folder.refuse_model_code()
    folder.refuse_tokenizer_code()
    files = read_weight_files(folder)
    spec = load_config(folder.path)
    whole = multimodal_of(raw)
    prefixes = prefixes_of(spec.family, files.tensors, whole.prefixes if whole else ())
    spec = stored_classifier(spec, files.tensors, prefixes)
    stated, placed = decoder_config(raw), expected_shapes(spec, prefixes)
    unused = mtp_prefixes(spec, stated, prefixes)
    tensors = {
        name: tensor
        for name, tensor in files.tensors.items()
        if name in placed
        or not (ignores(spec.family, name) or name.startswith(unused) or (whole and whole.part_of(name)))
    }
    encoded = find_encoded_tensors(stored_format(stated, []), tensors)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in encoded.unused}
    hint = f"config.json describes another model than the weights, or another family than {spec.family}"
    shapes = check_tensors(folder.path, spec, tensors, encoded, prefixes, hint)
    notices = (
        *([_text_only(whole, files.tensors)] if whole else ()),
        *dequantisation_notices(
            {each.format: each.form for each in encoded.found.values() if each.quantized}, shapes
        ),
        *_sparse_notices(encoded.found.values(), shapes),
        *encoded.notices,
        *folder.unused_code,
    )
    return Checkpoint(folder.path, files.files, tensors, spec, prefixes, encoded.found, shapes, notices)


def dequantisation_notices(
    forms: Mapping[str, WeightForm | None], shapes: Mapping[str, Shape]
) -> Iterator[str]:
    """Yield a notice for the user about each storage format whose weights are dequantised on loading.

    Args:
        forms: By name of the storage format, the form in which its weights could stay in memory with another value of
            model.quantization. None: there is no such form.
        shapes: The shapes of all weights after dequantisation, for their size in memory.
    """
    for name, form in sorted(forms.items(), key=lambda found: found[0]):
        text = f"weights stored as {name} are dequantised when they are loaded: {_all_take(shapes)}"
        kept = form is not None and form.codes == "int4"
        yield f"{text}; model.quantization: stored leaves them in 4 bits" if kept else text


def _sparse_notices(encoded: Iterable[EncodedTensor], shapes: Mapping[str, Shape]) -> Iterator[str]:
    for name in sorted({each.format for each in encoded if not (each.quantized or each.plain)}):
        yield f"{name} are filled up with zeros when they are loaded: {_all_take(shapes)}"


def _all_take(shapes: Mapping[str, Shape]) -> str:
    return f"all weights take {size(2 * sum(map(math.prod, shapes.values())))}{_IN_16_BITS}"


def _kept_notices(spec: ModelSpec) -> Iterator[str]:
    weights = [(linear.values, linear.stored) for linear in spec.linears()]
    kept, all_values = sum(values for values, coded in weights if coded), sum(values for values, _ in weights)
    codes = " and ".join(sorted({form.codes if form.coded else "2:4 sparse" for form in spec.forms}))
    if kept:
        share = f"{kept / all_values:.1%} of the weights of linear layers"
        yield f"{share} stay in {codes} as they are stored; the rest is computed in the job's dtype"


def _text_only(whole: Multimodal, tensors: Iterable[str]) -> str:
    parts = Counter(part for name in tensors if (part := whole.part_of(name)))
    left_out = ", ".join(f"{count} of {part}" for part, count in parts.items())
    return f"{whole.architecture}: text only; tensors that are not loaded: {left_out or 'none'}"


def config_folder(path: Path) -> CheckpointFolder:
    """Open a checkpoint folder, and check that it has a config.json.

    Raises:
        JobFileError: The folder has no config.json.
        SecurityRefusal: A path leaves the folder.
    """
    folder = CheckpointFolder(path)
    if folder.file("config.json") is None:
        raise checkpoint_error(path, f"{path} has no config.json; a Hugging Face checkpoint folder is needed")
    return folder


def check_tensors(
    path: Path,
    spec: ModelSpec,
    tensors: Mapping[str, StoredTensor],
    encoded: EncodedTensors,
    prefixes: NamePrefixes,
    hint: str,
) -> dict[str, Shape]:
    """Check that stored tensors fit a model, and return the shapes of all weights after dequantisation, by name.

    Args:
        path: The checkpoint, for messages.
        spec: The model.
        tensors: The stored tensors by name.
        encoded: The quantised or sparse weights among them.
        prefixes: The prefixes of the names of stored tensors.
        hint: Advice at the end of the error message.

    Raises:
        JobFileError: Tensors are missing, unexpected, of a wrong shape, or not float.
    """
    expected, found = expected_shapes(spec, prefixes), dict(encoded.decoded_shapes(tensors))
    stored = encoded.stored
    messages = [
        *encoded.mistake_lines,
        *_mistakes("missing tensors", _missing(spec, expected, found, prefixes)),
        *_mistakes("unexpected tensors", [name for name in found if name not in expected]),
        *_mistakes("tensors of a wrong shape", [
            f"{name} {list(shape)} instead of {list(expected[name])}"
            for name, shape in found.items()
            if name in expected and shape != expected[name]
        ]),
        *_mistakes("tensors that are not float", [
            f"{name} ({tensor.info.dtype})" for name, tensor in tensors.items()
            if tensor.info.dtype not in FLOAT_DTYPES and name not in stored
        ]),
    ]  # fmt: skip
    if messages:
        raise checkpoint_error(path, *messages, hint=hint)
    return found


def _missing(
    spec: ModelSpec, expected: Mapping[str, Shape], found: Collection[str], prefixes: NamePrefixes
) -> list[str]:
    """Return the expected tensors that a checkpoint lacks.

    If head and embedding are tied, a checkpoint may lack either.

    Args:
        spec: The model.
        expected: The expected shapes by name.
        found: The names of the tensors in the checkpoint.
        prefixes: The prefixes of the names.
    """
    missing = [name for name in expected if name not in found]
    if not spec.causal:
        return missing
    names = table_names(spec, prefixes)
    tables = {names[HEAD].tensor, names[EMBEDDING].tensor}
    if spec.tied and not tables <= set(missing):
        return [name for name in missing if name not in tables]
    return missing


def _mistakes(what: str, names: list[str]) -> list[str]:
    return [f"{what}: {listed(names)}"] if names else []
