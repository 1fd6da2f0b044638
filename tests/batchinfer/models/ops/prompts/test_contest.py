"""Tests which library or kernel reads prompts, and missing or broken libraries.

Test machines have none of them: fake modules have their interfaces. Uses the GPU if there is one, otherwise
the interpreter.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("there is no triton", allow_module_level=True)

import torch
from triton.compiler.errors import CompilationError

from batchinfer.engine.config import Agreed, choose_alone
from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.prompts import flash_attention, gluon
from batchinfer.models.ops.prompts.contest import BUDGET_S, ROUNDS, prefill_contest
from batchinfer.models.ops.prompts.flash_attention import FlashAttentionPrefill
from batchinfer.models.ops.prompts.flashinfer import FlashInferPrefill
from batchinfer.models.ops.prompts.gluon import GluonPrefill
from batchinfer.models.ops.prompts.trial import LAYERS, PARTS, PromptSizes, Trial
from batchinfer.models.ops.torch_ops import TorchOps
from batchinfer.models.ops.triton_ops import TritonOps
from batchinfer.models.spec.spec import AttentionRules
from batchinfer_kernels.gpu import hopper_prefill
from batchinfer_kernels.gpu.attention_plan import AttentionShape
from tests.batchinfer.models.ops.prompts import flash_attention_stand_in, flashinfer_stand_in
from tests.batchinfer.models.ops.prompts.flash_attention_stand_in import Forward
from tests.batchinfer.models.ops.prompts.steps import BLOCK, DEVICE, DIM, SHAPE, Counted

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # masked lanes are computed too, by NumPy
SIZES = PromptSizes(tokens=10, longest=10, block_size=BLOCK)
OURS, INFER, ATTENTION, GLUON = "triton", "triton+flashinfer", "triton+flash-attn", "triton+gluon"
PLAIN, LOCAL = AttentionRules(), AttentionRules(6, 1.5, True)


def install(monkeypatch: pytest.MonkeyPatch, *, infer: Any = None, forward: Any = None) -> None:
    """Install fake modules of FlashInfer and FlashAttention-4."""
    versions = {FlashInferPrefill: infer and "0.7.2", FlashAttentionPrefill: forward and "4.0.0b36"}
    for library, version in versions.items():
        monkeypatch.setattr(library, "version", lambda version=version: version)
    monkeypatch.setattr(flash_attention, "capability", lambda _: 9)
    modules = {"flashinfer": infer} if infer else {}
    for name, module in (modules | flash_attention_stand_in.stand_in(forward)).items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def infer(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = flashinfer_stand_in.stand_in()
    install(monkeypatch, infer=module)
    return module


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Forward:
    forward = Forward()
    install(monkeypatch, infer=flashinfer_stand_in.stand_in(), forward=forward)
    return forward


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Enable our Gluon kernel on this device."""
    if DEVICE.type == "cuda":
        pytest.skip("tests/kernels/gpu compares the results of GPUs")
    kernel = Counted(hopper_prefill, "_hopper_prefill_kernel", 0)
    monkeypatch.setattr(hopper_prefill, "_hopper_prefill_kernel", kernel)
    monkeypatch.setattr(gluon, "capability", lambda _: 9)
    return kernel


class Speeds:
    """A clock that gives each attention call a duration, by the name of its operators and its window."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.calls = 0.0, []  # type: float, list[str]
        self.seconds: Callable[[str, int | None], float] = lambda name, window: 0.0
        attention, made = TritonOps.attention, {}  # type: Any, dict[object, tuple[Any, torch.Tensor]]

        def slowed(ops: TritonOps, q: torch.Tensor, *args: Any) -> torch.Tensor:
            window = args[2].window
            self.calls.append(ops.name)
            self.now += self.seconds(ops.name, window)
            place = (id(ops), id(q), window)  # the same again is not computed again
            if place not in made:
                made[place] = (
                    (ops, q),
                    attention(ops, q, *args),
                )  # kept: a new object must not get a used id
            return made[place][1]

        monkeypatch.setattr(TritonOps, "attention", slowed)

    def chosen(
        self,
        seconds: Mapping[str, float] | Callable[[str, int | None], float],
        layers: Mapping[AttentionRules, int] | None = None,
        ops: Ops | None = None,
        agreed: Agreed = choose_alone,
        sizes: PromptSizes = SIZES,
    ) -> str:
        """Return the name of the operators that win the contest.

        Args:
            seconds: duration of a call, by name, or by name and window.
            layers: number of layers by their rules; two plain layers if None.
        """
        self.seconds = seconds if callable(seconds) else lambda name, _: seconds[name]
        ops, layers = ops or TritonOps(SHAPE), {PLAIN: 2} if layers is None else layers
        made = prefill_contest(ops, sizes, DEVICE, layers, lambda: self.now)
        return (ops if made is None else made.winner(agreed(made.decide))).name


@pytest.fixture
def speeds(monkeypatch: pytest.MonkeyPatch) -> Speeds:
    return Speeds(monkeypatch)


NEVER = {OURS: 2.0, INFER: 1.0, ATTENTION: 1.0, GLUON: 1.0}  # where nothing is timed


def test_the_fastest_is_chosen(both, speeds, caplog):
    caplog.set_level(logging.INFO)
    assert speeds.chosen({OURS: 2e-3, INFER: 1e-3, ATTENTION: 1.5e-3}) == INFER
    assert "prompts are read by FlashInfer" in caplog.text
    told = (
        "FlashAttention-4 4.0.0b36 takes 3.00",
        "FlashInfer 0.7.2 takes 2.00",
        "batchinfer's kernel takes 4.00",
    )
    for one in told:
        assert f"{one} ms a layer" in caplog.text
    assert speeds.chosen({OURS: 2e-3, INFER: 1e-3, ATTENTION: 0.5e-3}) == ATTENTION
    assert speeds.chosen({OURS: 1e-3, INFER: 2e-3, ATTENTION: 3e-3}) == OURS
    assert speeds.chosen({OURS: 1e-3, INFER: 2e-3, ATTENTION: 0.98e-3}) == OURS, (
        "not for a difference that may be noise"
    )


@pytest.mark.parametrize(("plain", "chosen"), [(1, OURS), (2, ATTENTION)])
def test_layers_count_by_how_many_of_their_kind_there_are(both, speeds, plain, chosen):
    """FlashAttention is faster in plain layers, and slower by a similar time with a window."""

    def seconds(name: str, window: int | None) -> float:
        return {OURS: 1.5, INFER: 1.6, ATTENTION: 1.0 if window is None else 2.2}[name]

    assert speeds.chosen(seconds, {PLAIN: plain, LOCAL: 1}) == chosen


def test_the_choice_of_another_engine_is_used_without_timing(both, speeds, caplog):
    """Libraries round differently: engines of one run would give a row different bits."""
    caplog.set_level(logging.INFO)
    for name, chosen in {
        "FlashInfer": INFER,
        "FlashAttention-4": ATTENTION,
        "batchinfer's kernel": OURS,
    }.items():
        assert speeds.chosen(NEVER, agreed=lambda _, name=name: name) == chosen
        assert f"read by {name}, which another engine of this run has timed" in caplog.text
    assert "takes" not in caplog.text, "nothing was timed"


def test_a_library_that_another_engine_chose_and_is_missing_is_a_warning(infer, speeds, caplog):
    assert speeds.chosen(NEVER, agreed=lambda _: "FlashAttention-4") == OURS
    assert "FlashAttention-4 cannot be used here; batchinfer's own kernel reads prompts" in caplog.text


@pytest.mark.sample(1)
@pytest.mark.parametrize(("seconds", "rounds"), [(BUDGET_S, 1), (1e-6, ROUNDS)])
def test_timing_ends_when_its_time_is_over(both, speeds, seconds, rounds):
    took = {OURS: seconds, INFER: seconds / 2, ATTENTION: seconds}
    assert speeds.chosen(took, {PLAIN: 1, LOCAL: 1}) == INFER
    timed = len(PARTS) * LAYERS * rounds * 2
    tried = (len(PARTS) + 2) * LAYERS  # with short ones
    assert {name: speeds.calls.count(name) for name in took} == {
        OURS: timed + 3 * tried,
        INFER: timed + tried,
        ATTENTION: timed + 2 * tried,
    }, "FlashInfer is tried in plain layers, FlashAttention in both kinds"


def test_steps_are_of_the_job_s_sizes():
    ops, sizes = TritonOps(SHAPE), PromptSizes(tokens=40, longest=24, block_size=BLOCK)
    longer = PromptSizes(tokens=16, longest=70, block_size=BLOCK)
    whole, eighth, split = (
        Trial.timed(ops, of, part, DEVICE).inputs for of, part in ((sizes, 1), (sizes, 8), (longer, 1))
    )
    assert (whole.query_lens, whole.context_lens) == ([24], [24])
    assert (eighth.query_lens, eighth.context_lens) == ([3] * 13, [3] * 13)
    assert (split.query_lens, split.context_lens) == ([16], [70])
    few, most = (Trial.short(ops, sizes, count, DEVICE).inputs for count in (1, 257))
    assert (few.query_lens, most.query_lens) == ([2], [2] * 20)


HEADS = "is installed and not used: it has no kernels for heads of 72"
NEVER_SAME = "is installed and not used: engine.deterministic is true"
OTHERS = "is installed and not used: it does not support the attention of any layer, or its quantised cache"
RULED_OUT: list[tuple[AttentionShape, dict[AttentionRules, int], tuple[str, ...]]] = [
    (replace(SHAPE, deterministic=True), {PLAIN: 2}, (f"FlashInfer {NEVER_SAME}", f"FlashAttention-4 {NEVER_SAME}")),
    (replace(SHAPE, dtype=torch.float32), {LOCAL: 2}, ("not used: it has no kernels for float32",)),
    (replace(SHAPE, head_dim=72), {PLAIN: 2}, (f"FlashInfer {HEADS}", f"FlashAttention-4 {HEADS}")),
    (replace(SHAPE, latent=True), {PLAIN: 2}, ("keeps latents",)),
    (AttentionShape(torch.float16, 4, 2, DIM, causal=False), {PLAIN: 2}, ()),
    (SHAPE, {}, (f"FlashInfer {OTHERS}", f"FlashAttention-4 {OTHERS}")),
    (SHAPE, {AttentionRules(codes="int8"): 3}, (f"FlashInfer {OTHERS}", f"FlashAttention-4 {OTHERS}")),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "layers", "reasons"), RULED_OUT)
def test_the_reason_against_a_library_is_logged(both, speeds, caplog, shape, layers, reasons):
    """No library is timed then."""
    caplog.set_level(logging.INFO)
    assert speeds.chosen(NEVER, layers, TritonOps(shape)) == OURS
    assert all(reason in caplog.text for reason in reasons)
    assert speeds.chosen(NEVER, ops=TorchOps()) == "torch"
    assert speeds.calls == []


def test_layers_with_windows_use_flash_attention(both, speeds, caplog):
    caplog.set_level(logging.INFO)
    assert speeds.chosen(NEVER, {LOCAL: 3}) == ATTENTION
    assert (
        "FlashInfer is installed and not used: it does not support the attention of any layer" in caplog.text
    )


@pytest.mark.parametrize(("seconds", "chosen"), [(1.0, GLUON), (3.0, OURS)])
def test_our_gluon_kernel_is_used_if_it_is_faster(hopper, speeds, caplog, seconds, chosen):
    caplog.set_level(logging.INFO)
    took = {OURS: 2.0, GLUON: seconds}
    assert speeds.chosen(took) == chosen
    assert "batchinfer's kernel in triton's Gluon" in caplog.text
    launched = hopper.launches
    assert launched > 0
    assert speeds.chosen(took, ops=TritonOps(replace(SHAPE, deterministic=True))) == OURS
    assert hopper.launches == launched


def _no_such_layout(*_: object, **__: object) -> None:
    raise CompilationError("def kernel(): ...", None, "no such layout")


@pytest.mark.parametrize("wrong", ["results", "language"])
def test_a_kernel_in_gluon_that_does_not_work_is_a_warning(hopper, speeds, monkeypatch, caplog, wrong):
    """Gluon's language may differ in another version; its error is no RuntimeError."""
    if wrong == "results":
        monkeypatch.setattr(GluonPrefill, "run", lambda *args: args[5].zero_())
    else:
        monkeypatch.setattr(hopper_prefill, "hopper_prefill", _no_such_layout)
    assert speeds.chosen(NEVER, {AttentionRules(codes="fp8"): 1}) == OURS
    assert "another version of triton may help" in caplog.text
    assert ("the kernel does not compile" in caplog.text) == (wrong == "language")


def test_without_the_packages_nothing_is_logged(monkeypatch, speeds, caplog):
    caplog.set_level(logging.DEBUG)
    install(monkeypatch)
    assert speeds.chosen(NEVER) == OURS
    assert caplog.text == ""


def _no_compiler(*_: object, **__: object) -> None:
    raise RuntimeError(
        "Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist\n  more of it"
    )


def _older_plan(self: object, starts: object, page_starts: object, pages: object, last: object) -> None:
    raise AssertionError("its arguments do not fit")


BROKEN = {
    "RuntimeError: Could not find nvcc": {"plan": _no_compiler},
    "TypeError: ": {"plan": _older_plan},
    "ValueError: its results differ from batchinfer's by 0.5": {"offset": 0.5},
    "ValueError: its results differ from batchinfer's by nan": {"offset": float("nan")},
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("library", ["FlashInfer", "FlashAttention-4"])
@pytest.mark.parametrize("reason", BROKEN)
def test_a_package_that_does_not_work_is_a_warning(monkeypatch, speeds, caplog, library, reason):
    """The other package is used if it is faster than our kernel."""
    changed, forwards = BROKEN[reason], Forward()
    if library == "FlashInfer":
        module = flashinfer_stand_in.stand_in(**changed)
    else:
        module = flashinfer_stand_in.stand_in()
        forwards = Forward(changed["offset"]) if "offset" in changed else changed["plan"]  # type: ignore[assignment]
    install(monkeypatch, infer=module, forward=forwards)
    assert speeds.chosen(NEVER) == (ATTENTION if library == "FlashInfer" else INFER)
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert f"{library} " in record.getMessage()
    assert f"cannot be used ({reason}" in record.getMessage()
    assert "\n" not in record.getMessage()


WRONG: dict[str, Callable[[torch.Tensor, torch.Tensor, int | None], bool]] = {
    "windows": lambda q, k, window: window is not None,
    "short prompts": lambda q, k, window: len(q) == 2,
    "NaN after the end": lambda q, k, window: bool(k.isnan().any()),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_results_are_compared_with_a_library_that_may_be_wrong(monkeypatch, speeds, caplog, wrong):
    """A library that is right in plain layers and long prompts may be wrong in other cases."""

    class Wrong(Forward):
        def __call__(self, q: torch.Tensor, k: torch.Tensor, *args: Any, **more: Any) -> Any:
            self.offset = 0.5 if WRONG[wrong](q, k, more["window_size_left"]) else 0.0
            return super().__call__(q, k, *args, **more)

    install(monkeypatch, forward=Wrong())
    assert speeds.chosen(NEVER, {PLAIN: 9, LOCAL: 1}) == OURS
    assert "by 0.5" in caplog.text


def test_versions_without_a_needed_function_are_a_warning(monkeypatch, speeds, caplog):
    module = flashinfer_stand_in.stand_in()
    del module.BatchPrefillWithPagedKVCacheWrapper
    install(monkeypatch, infer=module)
    monkeypatch.setattr(FlashAttentionPrefill, "version", lambda: "4.0.0")
    assert speeds.chosen(NEVER) == OURS
    assert caplog.text.count("AttributeError") == 2
    for extra in ("flashinfer", "flash-attn"):
        assert (
            f"run `pip install '.[{extra}]'` in the clone of batchinfer, or uninstall {extra}-" in caplog.text
        )


@pytest.mark.parametrize("where", ["timed", "run"])
def test_our_kernel_is_used_without_memory_for_a_trial(monkeypatch, both, speeds, caplog, where):
    """Our kernel also stays if a right library fails while it is timed."""
    wanted, calls = getattr(Trial, where), list[int]()

    def scarce(*given: Any) -> Any:
        calls.append(1)
        if where == "timed" or len(calls) > 16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return wanted(*given)

    monkeypatch.setattr(Trial, where, scarce)
    assert speeds.chosen(NEVER) == OURS
    assert (
        "FlashInfer and FlashAttention-4 could not be tried (OutOfMemoryError: CUDA out of memory)"
        in caplog.text
    )
