"""Chooses the operators for a model, by the device and the dtypes that it is computed in."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from subprocess import CalledProcessError

import torch

from batchinfer.core.errors import Unavailable
from batchinfer.machine.datasheet import datasheet
from batchinfer.models.ops.cpu_ops import CpuOps
from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.torch_ops import TorchOps
from batchinfer_kernels.arithmetic import KvCacheDtype, WeightForm
from batchinfer_kernels.cost import Peaks
from batchinfer_kernels.cpu.compiled import CompiledOperators
from batchinfer_kernels.cpu.compilers import NoCompiler
from batchinfer_kernels.quantized_matmul import PIECE
from batchinfer_kernels.tiles import Grant, tile_grant

_log = logging.getLogger(__name__)

# Triton's kernels need bfloat16 in tensor cores and asynchronous copies
LEAST_CAPABILITY = 80
# Remedies for missing matrix tiles
_OTHER_KIND = "run it on a CPU of the kind that it was planned on"
_NEWER = "install gcc 11 or clang 12, or a newer one"
# Triton compiles its interface to the driver at its first use
NEEDS_OF_TRITON = "check that there are a driver, a C compiler (gcc or clang) and Python's headers"


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The settings of an engine that determine its operators.

    Attributes:
        dtype: The dtype of activations.
        device: The device that computes the model.
        deterministic: True if results must not depend on the batch.
        tiles: True if the job was planned for a CPU with matrix tiles (AMX). A deterministic job in bfloat16 must then
            use them.
        kv_cache: The job's value of model.kv_cache_dtype. The spec of the model states the actual dtype per layer.
    """

    dtype: torch.dtype
    device: torch.device
    deterministic: bool = False
    tiles: bool = False
    kv_cache: KvCacheDtype = "auto"


@dataclass(frozen=True, slots=True)
class MissingOperators:
    """The reason why compiled or Triton operators cannot be used, for an error message or a warning.

    Attributes:
        reason: The reason.
        remedy: Advice for the user.
    """

    reason: str
    remedy: str


def choose_ops(
    device: torch.device,
    dtype: torch.dtype,
    group: int,
    head_dim: int,
    *,
    forms: frozenset[WeightForm] = frozenset(),
    deterministic: bool = False,
    kv_heads: int = 1,
    tiles: bool = False,
    latent: bool = False,
    codes: bool = False,
    causal: bool = True,
) -> Ops:
    """Return the fastest operators for a model: compiled ones on a CPU, Triton's on a GPU, or torch's.

    Torch's operators are used if the others do not support the machine, the dtype or the sizes. This is logged.

    Args:
        device: The device that computes the model.
        dtype: The dtype of activations.
        group: The number of query heads per KV head.
        head_dim: The size of a cached head, or of a latent.
        forms: The forms of the model's quantised weights.
        deterministic: If True, results must not depend on the batch.
        kv_heads: The number of KV heads, which decides how a GPU splits its work.
        tiles: If True, a deterministic job in bfloat16 on a CPU must use matrix tiles (AMX). If False, it must not.
            Other jobs use tiles if the operating system permits it.
        latent: If True, the KV cache stores latents.
        codes: If True, the KV cache stores int8 values.
        causal: False for an encoder.

    Raises:
        Unavailable: Only torch's operators can be used, but weights or the cache are quantised, or the job is
            deterministic.
    """
    wanted = [f"model.quantization: {name}" for name in sorted(set(map(_asked, forms)))]
    wanted += ["engine.deterministic: true"] if deterministic else []
    wanted += ["model.kv_cache_dtype: int8"] if codes else []
    if device.type == "cpu":
        needed, promised = "compiled CPU operators", deterministic and dtype == torch.bfloat16
        in_tiles = tiles if promised else None
        found = _compiled(dtype, group, head_dim, forms, latent, in_tiles, codes, causal)
    else:
        needed = "Triton operators"
        found = _triton(dtype, group, head_dim, forms, deterministic, kv_heads, latent, causal)
    if isinstance(found, Ops):
        return found
    if wanted:
        asked = f"{' and '.join(wanted)} {'needs' if len(wanted) == 1 else 'need'}"
        # As auto has it: nothing could be taken out
        automatic = any(form.stored for form in forms) and not deterministic
        other = "take model.quantization: none" if automatic else "take it out"
        raise Unavailable(f"{asked} the {needed}: {found.reason}; {found.remedy}, or {other}")
    _log.warning("%s; torch's operators are used, which are several times slower", found.reason)
    return TorchOps(causal)


def _asked(form: WeightForm) -> str:
    return "stored" if form.stored else form.codes


def _compiled(
    dtype: torch.dtype,
    group: int,
    head_dim: int,
    forms: frozenset[WeightForm],
    latent: bool,
    tiles: bool | None,
    codes: bool,
    causal: bool,
) -> Ops | MissingOperators:
    if any(not form.coded for form in forms):
        return MissingOperators("a CPU multiplies zeros, too", "use engine.device: cuda")
    if any(form.codes == "fp8" for form in forms):
        return MissingOperators(
            "a CPU cannot multiply in fp8", "use engine.device: cuda, or model.quantization: int8"
        )
    if not CpuOps.can_run(dtype, group, head_dim, latent):
        return _not_covered(dtype, group, head_dim)
    grant = tile_grant()
    if tiles and not grant.given:
        return MissingOperators(
            f"this deterministic job was planned for matrix tiles (AMX); {grant.refusal or 'this CPU has none'}",
            _OTHER_KIND,
        )
    try:
        compiled = CompiledOperators(tiles="none" if tiles is False else None, codes=codes)
    except NoCompiler as error:
        return MissingOperators(str(error), "install one (apt install gcc)")
    if tiles and not compiled.has_tiles:
        return MissingOperators(
            "this deterministic job was planned for matrix tiles (AMX), which the C compiler is too old for",
            _NEWER,
        )
    _warn_of_tiles(grant, compiled.has_tiles or tiles is False)
    return CpuOps(compiled, group, latent, dtype, causal)


def _warn_of_tiles(grant: Grant, as_chosen: bool) -> None:
    if grant.refusal:
        _log.warning("%s; matrix products use vector instructions instead, which are slower", grant.refusal)
    elif grant.given and not as_chosen:
        _log.warning(
            "the C compiler is too old for this CPU's matrix tiles (AMX), which would be faster; %s", _NEWER
        )


def _not_covered(dtype: torch.dtype, group: int, head_dim: int) -> MissingOperators:
    sizes = f"{dtype} with {group} query heads of {head_dim} a KV head"
    return MissingOperators(f"they do not cover {sizes}", "take another model.dtype or model")


def _triton(
    dtype: torch.dtype,
    group: int,
    head_dim: int,
    forms: frozenset[WeightForm],
    deterministic: bool,
    kv_heads: int,
    latent: bool,
    causal: bool,
) -> Ops | MissingOperators:
    # Importing triton looks for a driver, so it is imported only here
    if importlib.util.find_spec("triton") is None:
        return MissingOperators("triton is not installed", "install it (pip install triton)")
    from batchinfer.models.ops.triton_ops import TritonOps
    from batchinfer_kernels.gpu.attention_plan import AttentionShape

    if not TritonOps.can_run(dtype, group, head_dim, latent):
        return _not_covered(dtype, group, head_dim)
    lacking = _unfit_gpu(forms, dtype)
    if lacking is not None:
        return lacking
    shape = AttentionShape(dtype, group * kv_heads, kv_heads, head_dim, deterministic, causal, latent)
    return TritonOps(shape, _stated_peaks(dtype))


def _stated_peaks(dtype: torch.dtype) -> Peaks:
    # Measured peaks differ between runs
    from batchinfer.models.ops.triton_ops import USUAL_PEAKS

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    stated, kind = datasheet(name), str(dtype).removeprefix("torch.")
    if stated is None or kind not in stated.peak_flops or stated.bandwidth is None:
        return USUAL_PEAKS
    return Peaks(stated.peak_flops[kind], stated.bandwidth)


def _unfit_gpu(forms: frozenset[WeightForm], dtype: torch.dtype) -> MissingOperators | None:
    from batchinfer.models.ops.gpu_sparse import why_not_sparse
    from batchinfer_kernels.gpu import target
    from batchinfer_kernels.gpu.fp8_matmul import why_not_fp8

    try:
        found = target.architecture()
    except (RuntimeError, OSError, CalledProcessError) as error:
        return MissingOperators(f"Triton cannot use this GPU: {error}", NEEDS_OF_TRITON)
    if found.isdigit() and int(found) < LEAST_CAPABILITY:
        has = f"this GPU has compute capability {found[:-1]}.{found[-1]}, and they need 8.0 or newer"
        return MissingOperators(has, "use a newer GPU or engine.device: cpu")
    strange = {form.group for form in forms if form.codes == "int4" and form.group % PIECE}
    if strange:
        has = f"its int4 has groups of {min(strange)} inputs, and a GPU multiplies groups of a multiple of {PIECE}"
        return MissingOperators(has, "use model.quantization: none, int8 or fp8")
    if any(form.codes == "int4" and not form.whole_zeros for form in forms):
        has = "its int4 has zeros between codes (GGUF's Q4_1 and Q4_K, torchao's), and a GPU multiplies whole ones"
        return MissingOperators(has, "use model.quantization: none, int8 or fp8")
    sparse = any(not form.coded for form in forms)
    if sparse and (why := why_not_sparse(dtype)) is not None:
        return MissingOperators(why, "install torch's own build for CUDA")
    missing = why_not_fp8() if any(form.codes == "fp8" for form in forms) else None
    return (
        None if missing is None else MissingOperators(missing, "use model.quantization: int8 or a newer GPU")
    )
