"""The training stream: made-up names and items in sentences from a small grammar.

Copying is the hard part, so no list of names can be learned by heart: words are syllables, random letters or random
tokens of the vocabulary, with accents, hyphens and odd capitals. `Words._allowed` checks every made-up word, and
rejects held-out words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from grammar import FORM_KEYS, GRAMMAR, ITEM_WORDS, PARTICLES, SUFFIXES
from orders import (
    Order,
    listed,
    plain_number,
    quantity_phrase,
    random_date,
    random_quantity,
    written_date,
)

_ONSETS = (
    listed(
        "b c d f g h j k l m n p r s t v w y z br cr dr fr gr pr tr bl cl fl gl pl sl st sp sk sm sn sw "
        "sh ch th ph wh qu kn wr str scr spr thr kh zh ng x q"
    )
    + ("",) * 8
)
_NUCLEI = listed("a e i o u a e i o u ai ea ee oo ou ie io au ei oa ue y ia ua eo ao aa")
_CODAS = (
    listed(
        "n r l s t d m k p g b f x z ck ll ss nd nt st rd rt rk ng sh ch th ld lt mp nk ft ct ff tt zz rn rm"
    )
    + ("",) * 24
)
_SIMPLE = listed("b c d f g h j k l m n p r s t v w y z") + ("",) * 3
_SIMPLE_CODAS = listed("n r l s t m") + ("",) * 9
_ENDINGS = listed("s es er ers ing ed le ly y ies et ets or ors tion ment ton son sen ez ski ini ova ell")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_ACCENTS = {
    "a": "áàâäãåāăą", "e": "éèêëēęě", "i": "íìîïīı", "o": "óòôöõøōő", "u": "úùûüūůű",
    "c": "çćč", "n": "ñńň", "s": "śšşß", "z": "źžż", "y": "ýÿ", "l": "ł", "d": "đďð", "r": "ř",
    "t": "ť", "g": "ğ",
}  # fmt: skip
_LETTER_RUN = re.compile(r"[^\W\d_]+")
_SYMBOL = re.compile(r"<(\w+)>")
_SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Example:
    """A training pair.

    Attributes:
        skeleton: The sentence with its slots unfilled, to prove that no held-out template leaks.
        text: The sentence.
        order: The order, which determines the answer.
    """

    skeleton: str
    text: str
    order: Order


def words_of(text: str) -> list[str]:
    """Return the runs of letters in a text, in lower case. Leaks are counted in these words."""
    return [run.lower() for run in _LETTER_RUN.findall(text)]


class Words:
    """Makes random words, names and items without forbidden words.

    Args:
        rng: The source of randomness.
        forbidden: The words that must not occur.
        pieces: Tokens that words are also built from.
    """

    def __init__(self, rng: Random, forbidden: frozenset[str], pieces: Sequence[str] = ()) -> None:
        self._rng = rng
        self._forbidden = forbidden
        self._pieces = tuple(pieces)
        self._item_words = tuple(word for word in ITEM_WORDS if word not in forbidden)

    def _allowed(self, text: str) -> bool:
        return self._forbidden.isdisjoint(words_of(text))

    def word(self) -> str:
        """Return a random lower-case word. It is drawn again until no part of it is forbidden."""
        while True:
            word = self._accented(self._raw_word())
            if self._allowed(word):
                return word

    def _raw_word(self) -> str:
        rng, draw = self._rng, self._rng.random()
        if self._pieces and draw < 0.30:
            return "".join(rng.choice(self._pieces) for _ in range(rng.choice((2, 2, 3, 3, 4))))
        if draw < 0.40:
            return "".join(rng.choice(_LETTERS) for _ in range(rng.randint(2, 8)))
        onsets, nuclei, codas = (
            (_ONSETS, _NUCLEI, _CODAS) if draw < 0.65 else (_SIMPLE, "aeiou", _SIMPLE_CODAS)
        )
        parts = (
            rng.choice(onsets) + rng.choice(nuclei) + rng.choice(codas)
            for _ in range(rng.choice((1, 2, 2, 2, 3)))
        )
        return "".join(parts) + (rng.choice(_ENDINGS) if rng.random() < 0.25 else "")

    def _accented(self, word: str) -> str:
        if self._rng.random() > 0.16:
            return word
        return "".join(
            self._rng.choice(_ACCENTS[c]) if c in _ACCENTS and self._rng.random() < 0.4 else c for c in word
        )

    def _name_word(self) -> str:
        rng, word, draw = self._rng, self.word(), self._rng.random()
        if draw < 0.90:
            return word[:1].upper() + word[1:]
        if draw < 0.92:
            return word.upper()
        if draw < 0.93:
            return word
        if draw < 0.95:
            return "".join(c.upper() if rng.random() < 0.4 else c for c in word)
        prefix = rng.choice(("O'", "D'", "Mc", "Mac", "L'", "De", "Al-", "El-", "Fitz"))
        return prefix + word[:1].upper() + word[1:]

    def name(self) -> str:
        """Return a random customer: a person with one to four names, or a firm."""
        return self._checked(self._draw_name)

    def item(self) -> str:
        """Return a random item: one to four words, sometimes with a code, a size or a hyphen."""
        return self._checked(self._draw_item)

    def _checked(self, draw: Callable[[], str]) -> str:
        while True:  # a prefix or a code may have made a forbidden word out of an allowed one
            text = draw()
            if self._allowed(text):
                return text

    def _draw_name(self) -> str:
        rng, word, draw = self._rng, self._name_word, self._rng.random()
        if draw < 0.50:
            return f"{word()} {word()}"
        if draw < 0.60:
            return f"{word()} {word()} {word()}"
        if draw < 0.65:
            return word()
        if draw < 0.71:
            return f"{word()} {rng.choice(PARTICLES)} {word()}"
        if draw < 0.77:
            return f"{word()}-{word()} {word()}"
        if draw < 0.82:
            return f"{word()} {word()}-{word()}"
        if draw < 0.87:
            initial = f"{rng.choice(_LETTERS).upper()}."
            return f"{initial} {word()}" if rng.random() < 0.4 else f"{word()} {initial} {word()}"
        if draw < 0.89:
            return f"{rng.choice(_LETTERS).upper()}. {rng.choice(_LETTERS).upper()}. {word()}"
        if draw < 0.92:
            return f"{word()} & {word()}"
        if draw < 0.94:
            return f"{word()} and {word()}" if rng.random() < 0.5 else f"The {word()} {word()}"
        return (
            f"{word()} {word()} {rng.choice(SUFFIXES)}"
            if rng.random() < 0.5
            else f"{word()} {rng.choice(SUFFIXES)}"
        )

    def _item_word(self) -> str:
        rng, draw = self._rng, self._rng.random()
        if draw < 0.10:
            return rng.choice(self._item_words)
        word = self.word()
        if draw < 0.93:
            return word
        if draw < 0.97:
            return word[:1].upper() + word[1:]
        return word.upper() if rng.random() < 0.5 else f"{word}-{self.word()}"

    def _code(self) -> str:
        rng = self._rng
        letters = "".join(rng.choice(_LETTERS) for _ in range(rng.randint(1, 3)))
        digits = str(rng.randint(1, 9 if rng.random() < 0.5 else 150))
        shapes = (
            letters.upper() + digits, digits + letters, letters.upper(), f"{digits}-{self.word()}",
            f"{letters.upper()}-{rng.choice(_LETTERS).upper()}", f"{letters.upper()}-{digits}",
        )  # fmt: skip
        return rng.choice(shapes)

    def _draw_item(self) -> str:
        rng, word, draw = self._rng, self._item_word, self._rng.random()
        if draw < 0.22:
            return word()
        if draw < 0.60:
            return f"{word()} {word()}"
        if draw < 0.72:
            return f"{word()} {word()} {word()}"
        if draw < 0.76:
            return f"{word()}-{word()} {word()}"
        if draw < 0.79:
            return f"{word()} {word()}-{word()}"
        if draw < 0.87:
            return f"{word()} of {word()}" if rng.random() < 0.6 else f"{word()} of {word()} {word()}"
        if draw < 0.90:
            return f"{word()} {rng.choice(('with', 'and', 'without', 'in'))} {word()}"
        if draw < 0.97:
            return f"{self._code()} {word()}" if rng.random() < 0.7 else f"{self._code()} {word()} {word()}"
        return f"{word()} {self._code()}"


class Sentences:
    """An endless, seeded stream of training examples."""

    def __init__(self, seed: int, forbidden: frozenset[str], pieces: Sequence[str] = ()) -> None:
        self._rng = Random(seed)
        self._words = Words(self._rng, forbidden, pieces)

    def __iter__(self) -> Iterator[Example]:
        while True:
            yield self.example()

    def example(self) -> Example:
        """Return a random sentence with its order."""
        rng, words = self._rng, self._words
        order = Order(words.name(), random_quantity(rng), words.item(), random_date(rng))
        skeleton = self._form() if rng.random() < 0.14 else self._expand("<message>")
        skeleton = self._roughened(skeleton)
        text = _SLOT.sub(lambda slot: self._fill(slot.group(1), order), skeleton)
        if skeleton.startswith(("{qty}", "{num}", "{due}")) and rng.random() < 0.7:
            text = text[:1].upper() + text[1:]
        return Example(skeleton, text, order)

    def _expand(self, text: str) -> str:
        while symbol := _SYMBOL.search(text):
            text = text[: symbol.start()] + self._rng.choice(GRAMMAR[symbol.group(1)]) + text[symbol.end() :]
        return text

    def _form(self) -> str:
        """Return the skeleton of a filled-in form: labelled fields in random order."""
        rng = self._rng
        fields = [f"{rng.choice(keys)}<colon>{{{slot}}}" for slot, keys in FORM_KEYS.items()]
        fields += [self._rng.choice(GRAMMAR["extra_field"]) for _ in range(rng.choice((0, 0, 1, 2)))]
        rng.shuffle(fields)
        colon = rng.choice((": ", ": ", ": ", " - ", " = ", ":", " "))
        joined = rng.choice((", ", "; ", ". ", " | ", " / ", " - ", "\n")).join(fields)
        opening = rng.choice(("", "", "", "<form_title>"))
        return self._expand(opening + joined.replace("<colon>", colon) + rng.choice(("", ".")))

    def _roughened(self, skeleton: str) -> str:
        """Add small accidents of real mail: no capital, no full stop, a sentence of unknown words."""
        rng = self._rng
        if rng.random() < 0.06:
            skeleton = skeleton[:1].lower() + skeleton[1:]
        elif rng.random() < 0.6:
            skeleton = skeleton[:1].upper() + skeleton[1:]
        if rng.random() < 0.12:
            skeleton = self._reworded(skeleton)
        if rng.random() < 0.06:
            skeleton = skeleton.rstrip(".!")
        if rng.random() < 0.08 and skeleton[-1] in ".!?":
            skeleton = f"{skeleton} {self._nonsense()}"
        if rng.random() < 0.06:
            skeleton = f"{self._nonsense()} {skeleton}"
        return skeleton

    def _reworded(self, skeleton: str) -> str:
        """Drop or replace one in ten fixed words, so that the model does not rely on any single word."""
        rng = self._rng
        words = skeleton.split(" ")
        for index, word in enumerate(words):
            # Next to a slot, the end of the name would become unclear
            near = words[max(0, index - 1) : index + 2]
            if word.isalpha() and word.islower() and "{" not in "".join(near) and rng.random() < 0.1:
                words[index] = rng.choice(("", "{nonce}"))
        return " ".join(word for word in words if word)

    def _nonsense(self) -> str:
        words = [self._words.word() for _ in range(self._rng.randint(2, 7))]
        return " ".join(words).capitalize() + self._rng.choice((".", ".", "!", "?"))

    def _fill(self, slot: str, order: Order) -> str:
        rng = self._rng
        if slot == "name":
            return order.customer
        if slot == "item":
            return order.item
        if slot == "qty":
            return quantity_phrase(rng, order.quantity)
        if slot == "num":
            return plain_number(rng, order.quantity)
        if slot == "digits":
            return str(order.quantity)
        if slot == "due":
            return written_date(rng, order.due)
        return self._distraction(slot)

    def _distraction(self, slot: str) -> str:
        """Return a text for a slot that the answer must leave out, such as a price."""
        rng = self._rng
        if slot == "date2":
            return written_date(rng, random_date(rng))
        if slot == "price":
            return (
                f"{rng.randint(1, 999)}.{rng.randint(0, 99):02d}"
                if rng.random() < 0.7
                else str(rng.randint(1, 3000))
            )
        if slot == "phone":
            groups = [str(rng.randint(10, 9999)) for _ in range(rng.randint(2, 4))]
            return rng.choice(("", "+", "0")) + rng.choice((" ", "-", "")).join(groups)
        if slot == "ref":
            letters = "".join(rng.choice("BCDFGHJKLMNPQRSTVWXZ") for _ in range(rng.choice((0, 0, 1, 2, 3))))
            return letters + rng.choice(("", "-")) * bool(letters) + str(rng.randint(10, 999999))
        if slot == "small":
            return plain_number(rng, rng.randint(1, 40))
        if slot == "nonce":
            return self._words.word()
        raise ValueError(f"the grammar has an unknown slot {slot!r}")
