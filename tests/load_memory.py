"""How much memory a load takes at most, for each published format of weights.

    python -m tests.load_memory [NAME ...]

Writes a checkpoint of each format, with some 50 million weights in layers, and loads it in bfloat16 as an engine does,
once with weights as they are stored, where operators for them exist here, and once dequantised. MB: the files, what the
loaded weights take, and the most memory that the process had beyond what it had before, without pages of the files; and
that ÷ the loaded weights and the largest file together. The last line is JSON. Linux only.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from batchinfer.models.checkpoint.checkpoint import inspect_checkpoint
from batchinfer.models.spec.model_cost import loaded_bytes
from tests.load_speed import ON_CPUS, load
from tests.published_formats import PUBLISHED, make_published

SIZES = {
    "hidden_size": 1024, "intermediate_size": 3072, "moe_intermediate_size": 512, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 64, "num_hidden_layers": 4,
}  # fmt: skip
MB = 1e6


def measured(name: str, place: Path) -> Iterator[dict[str, Any]]:
    """Yield what loading a format takes, in each way that a CPU has."""
    folder = place / "stored"
    make_published(folder, place / "plain", name, **SIZES)
    files = sorted(folder.glob("*.safetensors"))
    checkpoint = inspect_checkpoint(folder)
    for kind in {"none", checkpoint.stored_quantization} & {"none", *ON_CPUS}:
        held = checkpoint.held_for(kind)
        loaded = loaded_bytes(held.spec, held.parameters, 2)
        largest = max(path.stat().st_size for path in files)
        took, most = load(folder, kind, files, cold=False)
        yield {
            "format": name, "kind": kind, "files_mb": round(sum(path.stat().st_size for path in files) / MB),
            "loaded_mb": round(loaded / MB), "peak_mb": round(most / MB), "seconds": round(took, 2),
            "share": round(most / (loaded + largest), 2),
        }  # fmt: skip


def main() -> None:
    rows = []
    for name in sys.argv[1:] or PUBLISHED:
        with tempfile.TemporaryDirectory() as place:
            for row in measured(name, Path(place)):
                print(row, file=sys.stderr)
                rows.append(row)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
