"""A checkpoint folder that transformers' code can run, checked before its weights are loaded. No torch.

The process that reads jobs stays free of torch: by default, a child process describes the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from batchinfer.machine.ask_child import Died, ask_child
from batchinfer.models.checkpoint.checkpoint import config_folder
from batchinfer.models.families.registry import FAMILIES
from batchinfer.models.files.config_fields import checkpoint_error, load_if_there, read_config_json, shown
from batchinfer.models.files.weight_files import FLOAT_DTYPES, WeightFiles, listed, read_weight_files
from batchinfer.models.foreign.spec import CannotRun, ForeignSpec, foreign_cost
from batchinfer_kernels.arithmetic import Device, Dtype, KvCacheDtype, Quantization
from batchinfer_kernels.cost import ModelCost

PROBE = "batchinfer.models.foreign.probe:serve"
# Importing torch and transformers takes some 5 s, describing a model of a hundred layers less than 10
WITHIN_S = 300.0
# (config.json, generation_config.json) → what they describe; raises CannotRun
Describe = Callable[[Mapping[str, Any], Mapping[str, Any]], ForeignSpec]
# Of buffers that old checkpoints hold, which transformers ignores
WHOLE_DTYPES = ("BOOL", "U8", "I8", "I16", "I32", "I64")


def describe_in_child(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ForeignSpec:
    """Describe a model as `probe.describe` does, in another process. Raises CannotRun, and what `ask_child`
    raises."""
    what = "the process that looks at the model"
    try:
        found = ask_child(what, PROBE, raw, generation, within_s=WITHIN_S)
    except Died as died:
        raise CannotRun("two processes that looked at it ended", str(died)) from died
    if isinstance(found, tuple):
        raise CannotRun(*found)
    described: ForeignSpec = found
    return described


@dataclass(frozen=True, slots=True)
class ForeignCheckpoint(WeightFiles):
    """A folder of a decoder that is no family of ours, and that transformers can run."""

    spec: ForeignSpec
    raw: dict[str, Any] = field(repr=False)  # config.json
    unused_code: tuple[str, ...] = ()  # what a user should know of code in the folder

    stored_quantization: ClassVar[Quantization] = "none"  # only float weights are read

    @property
    def dtype(self) -> Dtype:
        """Return the dtype that config.json states, or else that of most of the stored bytes."""
        return self.spec.dtype or self.stored_dtype

    @property
    def modelling(self) -> str:
        """Return whose code computes the model, and its version, for the key of its answers."""
        return f"transformers {self.spec.version}"

    @property
    def notices(self) -> tuple[str, ...]:
        """Return what a user should know before it runs."""
        slower = (
            f"batchinfer has no code of its own for {self.spec.family}: transformers {self.spec.version} computes it, "
            "which is slower (docs/models.md)"
        )
        return (slower, *self.unused_code)

    def for_quantization(self, quantization: Quantization) -> ForeignCheckpoint:
        """Return the checkpoint itself: it stores no quantised values."""
        return self

    def refusals(self, quantized: bool, deterministic: bool, coded_cache: bool) -> list[tuple[str, str]]:
        """Return what is asked for and cannot be had of this model: key of the job file, and why."""
        why = f"{self.spec.family} is computed by transformers' code, in which"
        asked = (
            (quantized, "model.quantization", f"{why} no layer is quantised; leave it out"),
            (
                deterministic,
                "engine.deterministic",
                f"{why} a row's numbers may depend on others; leave it out",
            ),
            (coded_cache, "model.kv_cache_dtype", f"{why} the cache keeps values, no codes; leave it out"),
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
        """Return what its steps cost; activations, weights and the cache have one size."""
        return foreign_cost(self.spec, itemsize)


def inspect_foreign(path: Path, describe: Describe) -> ForeignCheckpoint:
    """Check the folder of a model that is none of our families.

    Raises SecurityRefusal as `inspect_checkpoint` does: an auto_map in config.json is ignored where transformers' own
    class runs the model. Raises JobFileError for what cannot be run, with the reason.
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
        folder.refuse_model_code()  # which may well be why transformers does not know it
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
