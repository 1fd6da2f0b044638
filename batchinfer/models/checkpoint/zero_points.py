"""Scans the zero points of a GPTQ checkpoint once, and remembers the result. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from batchinfer.models.files.config_fields import checkpoint_error
from batchinfer.models.files.fingerprint import file_identity
from batchinfer.models.formats.encoded_tensor import EncodedTensor, Stored
from batchinfer.models.formats.gptq import GptqTensor
from batchinfer.models.formats.zero_layout import zero_words

_AS_BEFORE, _MISREAD = "as before", "misread before"


def misread_before(
    path: Path, encoded: Mapping[str, EncodedTensor], tensors: Stored, cache: MutableMapping[str, str]
) -> bool:
    """Return True if earlier versions of batchinfer read wrong zero points from a GPTQ checkpoint.

    Answers that these versions stored are then wrong.

    Args:
        path: The checkpoint, for messages.
        encoded: Its quantised or sparse weights by name. Only GPTQ tensors are scanned.
        tensors: Its stored tensors by name.
        cache: Results of earlier scans, by files and format. A new result is added.

    Raises:
        JobFileError: The checkpoint states that it is symmetric, but its zero points are not.
    """
    scanned = [each for each in encoded.values() if isinstance(each, GptqTensor)]
    if not scanned:
        return False
    key = _key(scanned, tensors)
    if key not in cache:
        cache[key] = _MISREAD if _scan(path, scanned, tensors) else _AS_BEFORE
    return cache[key] == _MISREAD


def _key(scanned: list[GptqTensor], tensors: Stored) -> str:
    files = sorted({tensors[each.stored_zeros].file for each in scanned})
    read = sorted({(each.bits, each.zeros.stated, each.zeros.symmetric) for each in scanned})
    parts = [*map(file_identity, files), *map(repr, read)]
    return f"gptq zero points|{hashlib.sha256('|'.join(parts).encode()).hexdigest()}"


def _scan(path: Path, scanned: list[GptqTensor], tensors: Stored) -> bool:
    misread, wrong = False, []
    for each in scanned:
        words, outputs = zero_words(tensors[each.stored_zeros]), each.shape[0]
        misread = misread or each.zeros.is_misread(words, each.bits, outputs)
        found = each.zeros.first_wrong_value(words, each.bits, outputs)
        if found is not None:
            wanted = " or ".join(each.zeros.expected_values(each.bits))
            wrong.append(
                f"{each.stored_zeros} stores {found}, and the checkpoint states sym: true; wanted {wanted} everywhere"
            )
    if wrong:
        more = [f"{len(wrong) - 1} more tensors store zero points that do not fit"] if wrong[1:] else []
        hint = "if the zero points may differ, set sym: false in quantization_config; if not, download the model again"
        raise checkpoint_error(path, wrong[0], *more, hint=hint)
    return misread
