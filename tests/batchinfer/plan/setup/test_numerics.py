"""The context of every work key: the digest of all settings that change an answer."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.plan.setup import numerics
from batchinfer.plan.setup.numerics import NUMERICS_VERSION
from tests.batchinfer.plan.setup.test_resolve import SETTING, OfAnother
from tests.settings import changed

# The contexts under which answers are stored, in numerics version 4. They only ever grow by lines: a digest that
# changes throws every such answer away. What shall do that raises NUMERICS_VERSION, which moves all of them at once.
CONTEXTS: list[tuple[dict[str, Any], str]] = [
    ({}, "030e37391d9b5e5c29566d575879117cb6d986466e74a8726483c0e1503f1d7d"),
    ({"dtype": "float32"}, "e7c3f455ac20328db745f80d8623a26fd2aff36a7ca0cf69022b6f09d0d9dd18"),
    ({"dtype": "float16", "device": "cuda"}, "e6b1e939aeebc3d0b5a283e47e095fa5cc754cd6a489138547ed9d8ccb064080"),
    ({"device": "cuda"}, "030e37391d9b5e5c29566d575879117cb6d986466e74a8726483c0e1503f1d7d"),
    ({"quantization": "int8"}, "7bf3a5a043adab47a5621952d24cd7c00c7185b5f52dec292ef67e38d96a3020"),
    ({"block_size": 16}, "030e37391d9b5e5c29566d575879117cb6d986466e74a8726483c0e1503f1d7d"),
    ({"deterministic": True}, "927ad270ac9d15238577fb00ca4edeb3583df9399aac56b16dd1a34173bff8d2"),
    ({"deterministic": True, "dtype": "float32"}, "0b9d3714a33b53c2f76b192c058cd7de4ab84bc069954bc30543d8c484906adb"),
    ({"deterministic": True, "quantization": "int8"},
        "46f019df76c009263d013d18555f776bb7a0aab9df0ff0eda65d592324f51c54"),
    ({"deterministic": True, "block_size": 16}, "667646bf3d07761e7bf42e395ae798733afe4ea8655f01f14926b9421b8b0185"),
    ({"deterministic": True, "device": "cuda"}, "eab0a2617212934523503fee32f126fd0c2b0b7e7440e8baec48b5f743ac8a56"),
    ({"kv_cache": "int8"}, "c5b0ed4151c474b934996f6dde72a430a583d43ff99e3ba7c90d634814ed8713"),
    ({"max_model_len": 64}, "ace8b4efefad4cb0ad544ac821d15fa3ef9b11e7fd075f3bb1bf3fa6cc68a831"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "digest"), CONTEXTS)
def test_stored_answers_stay_valid(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], digest: str
) -> None:
    monkeypatch.setattr(numerics, "NUMERICS_VERSION", 4)
    assert changed(SETTING, **changes).numerics.context(checkpoint, "m", "t", version=1).hex() == digest


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_new_version_of_an_arithmetic_changes_its_own_keys_only(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    other, int8 = (
        changed(SETTING, quantization=one, deterministic=deterministic).numerics for one in ("none", "int8")
    )
    found = {one: one.context(checkpoint, "m", "t", version=1) for one in (other, int8)}
    monkeypatch.setattr(numerics, "VERSIONS", {"int8": {"cpu": 2, "cuda": 1}})
    now = {one: one.context(checkpoint, "m", "t") for one in (other, int8)}
    assert (now[other], int8.version) == (found[other], 2)
    assert len({now[int8], found[int8], int8.context(checkpoint, "m", "t", version=3)}) == 3
    assert changed(int8, device="cuda").version == 1


def digest_of(**more: Any) -> bytes:
    """Return the digest of the parts that every context has, plus `more`."""
    parts = {"model": "m", "tokenizer": "t", "dtype": "bfloat16", "max_model_len": 512, "eos": [257]}
    parts |= {"numerics": NUMERICS_VERSION, **more}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()


def test_an_option_at_its_default_is_absent_from_the_context(checkpoint: Checkpoint) -> None:
    """A new option must not change the keys of jobs that do not use it."""
    assert SETTING.numerics.context(checkpoint, "m", "t") == digest_of()
    assert changed(SETTING, block_size=16).numerics.context(checkpoint, "m", "t") == digest_of()


def test_integer_products_of_quantised_values_have_deterministic_keys_of_their_own(
    checkpoint: Checkpoint,
) -> None:
    """Dequantising first gave other bits. In float32, values are still dequantised."""
    coded = changed(SETTING, kv_cache="int8", deterministic=True)
    widened = {"deterministic": True, "kv_cache_dtype": "int8"}
    in_float32 = changed(coded, dtype="float32").numerics.context(checkpoint, "m", "t")
    assert in_float32 == digest_of(**widened, dtype="float32")
    assert coded.numerics.context(checkpoint, "m", "t") != digest_of(**widened)


def test_answers_that_were_checked_against_columns_are_apart(checkpoint: Checkpoint) -> None:
    digests = {SETTING.numerics.context(checkpoint, "m", "t", columns) for columns in range(3)}
    assert len(digests) == 3
    assert SETTING.numerics.context(checkpoint, "m", "t") in digests


def test_every_arithmetic_has_answers_of_its_own(checkpoint: Checkpoint) -> None:
    settings = [
        changed(SETTING, quantization=quantization, deterministic=deterministic, dtype=dtype, kv_cache=kept)
        for quantization in ("none", "int8", "fp8")
        for kept in ("auto", "int8", "fp8")
        for deterministic in (False, True)
        for dtype in ("bfloat16", "float32")
    ]
    assert len({one.numerics.context(checkpoint, "m", "t") for one in settings}) == len(settings)


DETERMINISTIC = {"deterministic": True}
# Options that decide in what order sums are added up, with their values
ORDERS: dict[str, tuple[Any, ...]] = {
    "tiles": (False, True),
    "arm": ("", "neon", "bfdot"),
    "block_size": ("auto", 8, 32),
    "device": ("cpu", "cuda"),
}


@pytest.mark.parametrize(
    ("option", "changes", "apart"),
    [
        *((option, changes, bool(changes)) for option in ORDERS for changes in (DETERMINISTIC, {})),
        ("tiles", DETERMINISTIC | {"quantization": "int8"}, True),  # attention also uses tiles
        ("tiles", DETERMINISTIC | {"dtype": "float32"}, False),
        ("tiles", {"quantization": "int8"}, False),
    ],
)
def test_another_order_of_sums_changes_keys_only_in_deterministic_jobs(
    checkpoint: Checkpoint, option: str, changes: dict[str, Any], apart: bool
) -> None:
    values = ORDERS[option]
    settings = [changed(SETTING, **changes, **{option: value}) for value in values]
    contexts = {one.numerics.context(checkpoint, "m", "t") for one in settings}
    assert len(contexts) == (len(values) if apart else 1)


def test_another_version_of_transformers_changes_keys(checkpoint: Checkpoint) -> None:
    """Only if transformers computes the model. Built-in families omit the option."""
    versions = ("batchinfer", "transformers 5.23.0", "transformers 5.24.0")
    contexts = [SETTING.numerics.context(OfAnother(checkpoint, one), "m", "t") for one in versions]  # type: ignore[arg-type]
    assert contexts[0] == SETTING.numerics.context(checkpoint, "m", "t")
    assert len(set(contexts)) == len(versions)
