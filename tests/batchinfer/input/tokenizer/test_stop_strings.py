"""Stop strings are found as soon as the decoded text contains one, across token borders."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.input.tokenizer.stop_strings import StopStrings, find_text_end
from tests.batchinfer.store.index.ingest_kit import byte_bpe

BPE = byte_bpe()
TEXT = st.text(alphabet="abthe quick .\né漢🙂🙃", max_size=30)
STOP = st.text(alphabet="abthe .\né漢🙂", min_size=1, max_size=4)
ANY_IDS = st.lists(st.integers(0, BPE.get_vocab_size() - 1), max_size=40)


def expected(ids: list[int], stops: list[str], include: bool = False) -> tuple[int, int] | None:
    """Return (tokens, characters) by decoding the whole text at every step."""
    for count in range(1, len(ids) + 1):
        text = BPE.decode(ids[:count], skip_special_tokens=True)
        keep = find_text_end(text, stops)
        if keep is not None:
            first = min((stop for stop in stops if text.startswith(stop, keep)), key=len)
            return count, keep + include * len(first)
    return None


def found(ids: list[int], stops: list[str], include: bool = False) -> tuple[int, int] | None:
    watch = StopStrings(BPE, stops, include=include)
    for count, token in enumerate(ids, 1):
        keep = watch.push(token)
        if keep is not None:
            return count, keep
    return None


@given(TEXT.map(lambda text: BPE.encode(text).ids) | ANY_IDS, st.lists(STOP, max_size=3), st.booleans())
def test_agrees_with_cutting_the_whole_text(ids: list[int], stops: list[str], include: bool) -> None:
    assert found(ids, stops, include) == expected(ids, stops, include)


def test_a_stop_string_inside_split_characters() -> None:
    ids = BPE.encode("ab🙂🙃 end").ids
    assert len(ids) > len("ab🙂🙃 end") - 2
    assert found(ids, ["🙃"]) == expected(ids, ["🙃"])
    assert found(ids, ["🙃"])[1] == 3  # type: ignore[index]


def test_special_tokens_are_no_text() -> None:
    ids = [*BPE.encode("he").ids, BPE.token_to_id("<|im_end|>"), *BPE.encode("llo").ids]
    assert found(ids, ["hello"]) is not None
    assert found(ids, ["im_end"]) is None


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(BPE, [""])


def test_no_stop_string_ends_an_answer_below_min_tokens() -> None:
    ids = BPE.encode("a.b🙂.c.d").ids
    texts = [BPE.decode(ids[:count], skip_special_tokens=True) for count in range(len(ids) + 1)]
    for least in range(len(ids) + 1):
        watch = StopStrings(BPE, ["."], least)
        kept = [watch.push(token) for token in ids]
        ended = next((count for count, keep in enumerate(kept, 1) if keep is not None), None)
        wanted = next(
            (n for n in range(max(1, least), len(ids) + 1) if "." in texts[n][len(texts[n - 1]) :]), None
        )
        assert ended == wanted
        if ended is not None:
            assert kept[ended - 1] == texts[ended].rindex(".")


def test_a_stop_string_before_a_character_that_never_ends() -> None:
    """The token contains " 🙂" and half of another character."""
    token = next(
        i for i in range(BPE.get_vocab_size()) if BPE.decode([i]).strip("\ufffd") == " 🙂" != BPE.decode([i])
    )
    assert found([token], [" "]) == (1, 0)
