"""Write data/orders.jsonl: held-out orders with their expected answers, some duplicates, some broken rows.

    python jobs/quickstart/make_data.py

As in real tables, a message may occur twice under two numbers, and a few lines are broken, each in another way. The
engine must compute the answer to a duplicate once, and report broken lines.
"""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from random import Random

from held_out import COMPOUND_NAMES, FIRST_NAMES, ITEMS, LAST_NAMES, TEMPLATES
from orders import Order, plain_number, quantity_phrase, random_date, random_quantity, written_date

HERE = Path(__file__).parent
SEED = 14
UNIQUE_ROWS = 2200
DUPLICATE_ROWS = 240


def customer(rng: Random) -> str:
    """Return a person or a firm from the held-out lists."""
    draw = rng.random()
    if draw < 0.2:
        return rng.choice(COMPOUND_NAMES)
    if draw < 0.25:
        return f"{rng.choice(FIRST_NAMES)} {rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"
    if draw < 0.28:
        return f"{rng.choice(FIRST_NAMES)} {rng.choice('ABCDEFGHJKLMNPRSTW')}. {rng.choice(LAST_NAMES)}"
    return f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"


def sentence(rng: Random, order: Order, template: str) -> str:
    """Return a held-out template filled with an order, and with random distractions in all other slots."""
    placed = order.due - timedelta(days=rng.randint(3, 120))
    text = template.format(
        name=order.customer,
        item=order.item,
        qty=quantity_phrase(rng, order.quantity),
        num=plain_number(rng, order.quantity),
        digits=order.quantity,
        due=written_date(rng, order.due),
        date2=written_date(rng, placed),
        price=rng.choice(("{} euros", "${}", "EUR {}", "£{}")).format(
            f"{rng.randint(2, 900)}.{rng.randint(0, 99):02d}"
        ),
        phone=f"0{rng.randint(20, 999)} {rng.randint(100, 999)} {rng.randint(1000, 9999)}",
        ref=rng.choice(("{}", "A-{}", "PO{}", "{}")).format(rng.randint(1000, 99999)),
    )
    return text[0].upper() + text[1:]


def unique_rows(rng: Random) -> list[dict[str, str]]:
    """Return rows with different texts, which use all templates and all items in turn."""
    rows: dict[str, str] = {}
    while len(rows) < UNIQUE_ROWS:
        template, item = TEMPLATES[len(rows) % len(TEMPLATES)], ITEMS[len(rows) * 7 % len(ITEMS)]
        order = Order(customer(rng), random_quantity(rng), item, random_date(rng))
        rows.setdefault(sentence(rng, order, template), order.answer())
    return [{"text": text, "expected": answer} for text, answer in rows.items()]


def clean_lines(rng: Random) -> list[bytes]:
    """Return the valid rows in random order. About a tenth of them is repeated under another order_id."""
    rows = unique_rows(rng)
    rows += rng.sample(rows, DUPLICATE_ROWS)
    rng.shuffle(rows)
    numbered = ({"order_id": f"order-{number:05d}", **row} for number, row in enumerate(rows, start=1))
    return [json.dumps(row, ensure_ascii=False).encode() for row in numbered]


def bad_lines() -> list[bytes]:
    """Return a line for each way in which a row can be broken. None has an expected answer."""
    long_text = "We have a very long message about an order of lamps. " * 120
    nested = "[" * 100 + "]" * 100
    lines = [
        b'{"order_id": "bad-truncated", "text": "Please send 3 lamps to Ma',
        b'{"order_id": "bad-utf8", "text": "Caf\xff\xfe needs 3 lamps by 2026-03-14.", "expected": null}',
        b'{"order_id": "bad-no-text", "expected": null}',
        b'{"order_id": "bad-null-text", "text": null, "expected": null}',
        b'["bad-array", "Please send 3 lamps by 2026-03-14.", null]',
        b'{"order_id": "bad-duplicate-key", "text": "Send 3 lamps.", "text": "Send 4 lamps.", "expected": null}',
        b'{"order_id": "bad-nan", "text": NaN, "expected": null}',
        json.dumps({"order_id": "bad-too-long", "text": long_text, "expected": None}).encode(),
        rb'{"order_id": "bad-surrogate", "text": "Send 3 lamps \ud800 by 2026-03-14.", "expected": null}',
        f'{{"order_id": "bad-nesting", "text": "Send 3 lamps.", "expected": null, "extra": {nested}}}'.encode(),
        b"{'order_id': 'bad-quotes', 'text': 'Send 3 lamps by 2026-03-14.', 'expected': None}",
        b'{"order_id": "bad-comma", "text": "Send 3 lamps by 2026-03-14.", "expected": null,}',
    ]
    return lines


def write(path: Path, seed: int = SEED) -> int:
    """Write the table with the broken rows at random positions. Return the number of lines."""
    rng = Random(seed)
    lines = clean_lines(rng)
    for line in bad_lines():
        lines.insert(rng.randint(1, len(lines)), line)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\n".join(lines) + b"\n")
    return len(lines)


if __name__ == "__main__":
    print(f"{write(HERE / 'data' / 'orders.jsonl')} lines")
