"""A checkpoint folder that transformers' code can run, checked before its weights are loaded. No torch.

The process that reads jobs stays free of torch: by default, a child process describes the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from batchinfer.machine.ask_child import ChildDied, ask_child
from batchinfer.models.checkpoint.checkpoint import config_folder
from batchinfer.models.families.registry import FAMILIES
from batchinfer.models.files.config_fields import checkpoint_error, load_if_there, read_config_json, shown
from batchinfer.models.files.weight_files import FLOAT_DTYPES, WeightFiles, listed, read_weight_files
from batchinfer.models.foreign.spec import CannotRun, ForeignSpec, foreign_cost
from batchinfer_kernels.arithmetic import Device, Dtype, KvCacheDtype, Quantization
from batchinfer_kernels.cost import ModelCost

PROBE = "batchinfer.models.foreign.probe:serve"
# Importing torch and transformers takes about 5 s, and describing a model of a hundred layers less than 10 s
WITHIN_S = 300.0
# (config.json, generation_config.json) → spec of the model; raises CannotRun
Describe = Callable[[Mapping[str, Any], Mapping[str, Any]], ForeignSpec]
# Dtypes of buffers in old checkpoints, which transformers ignores
WHOLE_DTYPES = ("BOOL", "U8", "I8", "I16", "I32", "I64")


def describe_in_child(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ForeignSpec:
    """Return the sizes and attention of a model that transformers computes, found in a child process.

    Args:
        raw: The contents of config.json.
        generation: The contents of generation_config.json.

    Raises:
        CannotRun: Transformers cannot run the model here, or two child processes died.
        Unavailable: The child process took too long.
        OutOfMemory: The child process was killed, most likely because memory ran out.
    """
    what = "the process that looks at the model"
    try:
        found = ask_child(what, PROBE, raw, generation, within_s=WITHIN_S)
    except ChildDied as died:
        raise CannotRun("two processes that looked at it ended", str(died)) from died
    if isinstance(found, tuple):
        raise CannotRun(*found)
    described: ForeignSpec = found
    return described


@dataclass(frozen=True, slots=True)
class ForeignCheckpoint(WeightFiles):
    """A checkpoint folder of a decoder that batchinfer does not implement, but that transformers can run.

    Attributes:
        spec: The sizes and attention of the model.
        raw: The contents of config.json.
        unused_code: Notices that Python code in the folder is not run.
        stored_quantization: "none", since only float weights are supported.
    """

    spec: ForeignSpec
    raw: dict[str, Any] = field(repr=False)
    unused_code: tuple[str, ...] = ()

    stored_quantization: ClassVar[Quantization] = "none"

    @property
    def dtype(self) -> Dtype:
        """Return the dtype that config.json states, or else the float dtype with the most stored bytes."""
        return self.spec.dtype or self.stored_dtype

    @property
    def modelling(self) -> str:
        """Return "transformers" and its version, the program that computes the model.

        The text enters the work keys of the model's answers.
        """
        return f"transformers {self.spec.version}"

    @property
    def notices(self) -> tuple[str, ...]:
        """Return notices for the user: that the model is slower, and that code in its folder is not run."""
        slower = (
            f"batchinfer has no code of its own for {self.spec.family}: transformers {self.spec.version} computes it, "
            "which is slower (docs/models.md)"
        )
        return (slower, *self.unused_code)

    def for_quantization(self, quantization: Quantization) -> ForeignCheckpoint:
        """Return the checkpoint unchanged, as it has no quantised values that could be kept.

        Args:
            quantization: Not used.
        """
        return self

    def refusals(self, quantized: bool, deterministic: bool, coded_cache: bool) -> list[tuple[str, str]]:
        """Return (key, reason) for each key of the job file whose value transformers' code does not support.

        Args:
            quantized: True if the job quantises weights.
            deterministic: True if the job requires answers that do not depend on other rows.
            coded_cache: True if the job quantises the KV cache.
        """
        why = f"{self.spec.family} is computed by transformers' code, in which"
        asked = (
            (quantized, "model.quantization", f"{why} no layer is quantised; leave it out"),
            (
                deterministic,
                "engine.deterministic",
                f"{why} a row's numbers may depend on others; leave it out",
            ),
            (coded_cache, "model.kv_cache_dtype", f"{why} the cache is not quantised; leave it out"),
        )
        return [(key, text) for wanted, key, text in asked if wanted]

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
            itemsize: Bytes of a weight, an activation or a cached value.
            quantization: Not used.
            kv_cache: Not used.
            device: Not used.
            deterministic: Not used.
        """
        return foreign_cost(self.spec, itemsize)


def inspect_foreign(path: Path, describe: Describe) -> ForeignCheckpoint:
    """Check the folder of a model that batchinfer does not implement, and return it for use with transformers' code.

    Code of the checkpoint, which an auto_map in config.json names, is never run.

    Args:
        path: The checkpoint folder.
        describe: Returns the model's spec from the contents of config.json and generation_config.json.

    Raises:
        SecurityRefusal: The model or its tokenizer needs code from the folder.
        JobFileError: The model cannot run. The message has the reason.
    """
    folder = config_folder(path)
    raw = read_config_json(folder.path)
    if raw.get("quantization_config"):
        quantized = CannotRun(
            "it is a quantized checkpoint (quantization_config)", "only float weights are supported"
        )
        raise _refused(folder.path, raw, quantized)
    try:
        spec = describe(raw, load_if_there(folder.path / "generation_config.json"))
    except CannotRun as error:
        folder.refuse_model_code()  # transformers may not know the model because the folder has its code
        raise _refused(folder.path, raw, error) from error
    folder.refuse_tokenizer_code()
    files = read_weight_files(folder)
    _check_dtypes(files)
    return ForeignCheckpoint(folder.path, files.files, files.tensors, spec, raw, folder.unused_code)


def _refused(path: Path, raw: Mapping[str, Any], error: CannotRun) -> Exception:
    own = ", ".join(FAMILIES)
    return checkpoint_error(
        path / "config.json",
        f"config.json: model_type {shown(raw.get('model_type'))} is not supported: {error}",
        hint=f"batchinfer has code for {own}; of the others, docs/models.md lists what transformers can run here",
    )


def _check_dtypes(files: WeightFiles) -> None:
    wrong = [
        f"{name} ({tensor.info.dtype})"
        for name, tensor in files.tensors.items()
        if tensor.info.dtype not in (*FLOAT_DTYPES, *WHOLE_DTYPES)
    ]
    if wrong:
        raise checkpoint_error(files.path, f"tensors that are not float: {listed(wrong)}")
