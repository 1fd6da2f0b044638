"""The layouts of zero points in the `qzeros` tensors of GPTQ checkpoints. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from batchinfer.models.files.weight_files import StoredTensor

FIRST, SECOND = "gptq", "gptq_v2"
# The number that packers subtract from each zero point. GPTQModel packs zero points and then subtracts from whole
# words, modulo 2^32 (`convert_gptq_v2_to_v1_format_module`)
LAYOUTS = {FIRST: 1, SECOND: 0}
WORD_BITS = 32

Words = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class ZeroLayout:
    """How a GPTQ checkpoint stores zero points: unchanged, or with 1 subtracted.

    Attributes:
        name: The layout of the stored zero points, a key of LAYOUTS.
        stated: The layout that the configuration states.
        symmetric: True if the configuration states that the quantisation is symmetric: every zero point is the middle
            of the range of values.
    """

    name: str
    stated: str
    symmetric: bool

    @property
    def notices(self) -> tuple[str, ...]:
        """Return a notice for the user if zero points have another layout than the configuration states; () if not."""
        if self.name == self.stated:
            return ()
        return (
            f"checkpoint_format is {self.stated}, but the zero points are stored as {self.name} and read so",
        )

    def subtracted(self, bits: int) -> int:
        """Return the number that is subtracted from each int32 word of zero points when it is stored.

        It is 0 for layouts that store zero points unchanged.

        Args:
            bits: Bits of a zero point.
        """
        return LAYOUTS[self.name] * _ones(bits)

    def detect(self, zeros: StoredTensor, bits: int) -> ZeroLayout:
        """Return the layout that a checkpoint really uses for its zero points, as configurations may state a wrong one.

        If they are symmetric, the first stored zero point shows the layout. Otherwise, the configuration is trusted.

        Args:
            zeros: The `qzeros` tensor of any module.
            bits: Bits of a value of that module.
        """
        if not self.symmetric or zeros.info.dtype != "I32" or not zeros.info.nbytes:
            return self
        found = int(zero_words(zeros).flat[0]) % 2**bits
        names = [name for name, less in LAYOUTS.items() if found == _middle(bits) - less]
        return replace(self, name=names[0]) if names else self

    def first_wrong_value(self, words: Words, bits: int, outputs: int) -> int | None:
        """Return the first stored zero point that contradicts the configuration's claim of symmetry; None if all fit.

        Args:
            words: The content of a `qzeros` tensor, (groups, words of outputs).
            bits: Bits of a value.
            outputs: Number of outputs.
        """
        if not self.symmetric:
            return None
        wrong = (words ^ np.uint32(_middle(bits) * _ones(bits) - self.subtracted(bits))) & _used(
            bits, outputs
        )
        if not wrong.any():
            return None
        place = np.flatnonzero(wrong)[0]
        highest = (1 << bits) - 1
        shift = next(at for at in range(0, WORD_BITS, bits) if int(wrong.flat[place]) >> at & highest)
        return int(words.flat[place]) >> shift & highest

    def expected_values(self, bits: int) -> Iterator[str]:
        """Yield the stored value of a symmetric zero point in each layout, with the layout's name, such as "7 (gptq)".

        Args:
            bits: Bits of a value.
        """
        yield from (f"{_middle(bits) - less} ({name})" for name, less in LAYOUTS.items())

    def is_misread(self, words: Words, bits: int, outputs: int) -> bool:
        """Return True if older versions of batchinfer read a wrong zero point from these words.

        Args:
            words: The content of a `qzeros` tensor, (groups, words of outputs).
            bits: Bits of a value.
            outputs: Number of outputs.
        """
        if self.name != self.stated:  # older versions assumed the stated layout
            return True
        if not self.subtracted(bits):
            return False
        # They added 1 to each stored value without a carry, so they misread 0, which is stored as the highest value
        highest = words & _used(bits, outputs)
        for shift in range(1, bits):
            highest &= words >> np.uint32(shift)
        return bool((highest & np.uint32(_ones(bits))).any())


def zero_words(zeros: StoredTensor) -> Words:
    """Return the content of a `qzeros` tensor, (groups, words of outputs), read from the file."""
    words: Words = np.frombuffer(zeros.content(), "<u4").reshape(zeros.info.shape)
    return words


def _ones(bits: int) -> int:
    return sum(1 << place for place in range(0, WORD_BITS, bits))


def _middle(bits: int) -> int:
    return 1 << (bits - 1)


def _used(bits: int, outputs: int) -> Words:
    held = WORD_BITS // bits
    used = np.full(-(-outputs // held), 2**WORD_BITS - 1, np.uint32)
    if rest := outputs % held:  # the last word is not full
        used[-1] = 2 ** (rest * bits) - 1
    return used
