"""How fast a checkpoint is loaded beside how fast its bytes are read: `dd` and loads in turns, cold and warm.

    python -m tests.load_speed [--model qwen2.5-0.5b] [--shards 1 4] [--rounds 5] [--folder DIR] [--once KIND]

Writes the model with random weights in bfloat16, in so many files. A load is that of an engine (inspecting the folder,
reading, packing), in a process that has imported all it needs and chosen its operators. Cold: no page of the files is
in memory, which is checked with mincore; warm: all are. `peak` is the most memory that the process had beyond what it
had before, without pages of the files, as a multiple of the files' bytes; the share is dd's seconds ÷ those of the
load. Before each of them memory is touched and freed, since a virtual machine's host may have taken it back. Linux
only. The last line is JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Any

KINDS = ("none", "int8", "int4")
ON_CPUS = ("stored-int8", "stored-int4", "stored-mxfp4")  # with operators for weights as they are stored
SAMPLE_S = 0.005
WARMING_TRIES = 3


def make(model: str, folder: Path, shards: int) -> list[Path]:
    """Write the checkpoint, if it is not there, and return its files of weights."""
    import torch

    from batchinfer.models.checkpoint.dummy import DummyWeights, write_checkpoint
    from batchinfer.models.checkpoint.shapes import SHAPES, shape_config

    if not folder.exists():
        weights = DummyWeights(shape_config(model), torch.bfloat16, "cpu")
        write_checkpoint(folder, SHAPES[model], weights)
        split(folder, shards)
        os.sync()
    return sorted(folder.glob("*.safetensors"))


def split(folder: Path, shards: int) -> None:
    """Divide the one file of weights into so many of about the same size, in the order of the tensors' names."""
    from safetensors.torch import load_file, save_file

    if shards == 1:
        return
    whole = folder / "model.safetensors"
    tensors, place = load_file(whole), dict[str, str]()
    most, held = sum(each.nbytes for each in tensors.values()) / shards, 0
    parts: list[dict[str, Any]] = [{} for _ in range(shards)]
    for name in sorted(tensors):
        at = min(shards - 1, int(held / most))
        parts[at][name], held = tensors[name], held + tensors[name].nbytes
        place[name] = f"model-{at + 1:05}-of-{shards:05}.safetensors"
    for at, part in enumerate(parts):
        save_file(part, folder / f"model-{at + 1:05}-of-{shards:05}.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    whole.unlink()


def resident(files: Sequence[Path]) -> float:
    """Return the share of the files' pages that are in memory."""
    libc, pages, found = ctypes.CDLL(None, use_errno=True), 0, 0
    for path in files:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE) as mapped:
            count = -(-len(mapped) // mmap.PAGESIZE)
            there, held = (
                ctypes.create_string_buffer(count),
                (ctypes.c_char * len(mapped)).from_buffer(mapped),
            )
            at = ctypes.c_void_p(ctypes.addressof(held))
            assert libc.mincore(at, ctypes.c_size_t(len(mapped)), there) == 0, os.strerror(ctypes.get_errno())
            del held
            pages, found = pages + count, found + sum(each & 1 for each in there.raw)
    return found / pages


def forget(files: Sequence[Path]) -> None:
    """Have no page of the files in memory."""
    while True:
        for path in files:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if not resident(files):
            return
        time.sleep(SAMPLE_S)  # what is still being read cannot be forgotten


def warm(files: Sequence[Path]) -> None:
    """Have all pages of the files in memory; other processes may make the system forget some at any time."""
    for _ in range(WARMING_TRIES):
        read_by_dd(files)
        if resident(files) == 1:
            return
    raise RuntimeError("the system does not keep the files in memory")


def touch(size: int) -> None:
    """Touch memory and free it. The host of a virtual machine takes free memory back after some seconds (free page
    reporting), and to get it again takes ten times as long as to clear it, whoever does."""
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as room:
        room.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, size, mmap.PAGESIZE):
            room[at] = 1


def prepare(files: Sequence[Path], cold: bool) -> None:
    """Have the files' pages in memory or not, and as much memory free at once as the fullest load takes."""
    (forget if cold else warm)(files)
    touch(2 * sum(path.stat().st_size for path in files))


def read_by_dd(files: Sequence[Path]) -> float:
    """Return the seconds in which dd reads the files."""
    began = time.perf_counter()
    for path in files:
        subprocess.run(["dd", f"if={path}", "of=/dev/null", "bs=1M"], check=True, capture_output=True)
    return time.perf_counter() - began


def own_bytes() -> int:
    """Return the memory of this process that no file backs."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1])


def load_once(folder: Path, kind: Any) -> None:
    """Get ready, say so, wait for a line, load, and print the seconds and the most memory."""
    import torch

    from batchinfer.models.ops.choose import Arithmetic
    from batchinfer.models.sources import checkpoint_source

    arithmetic = Arithmetic(torch.bfloat16, torch.device("cpu"))
    checkpoint_source(folder, quantization=kind).choose_ops(arithmetic)
    print("ready", flush=True)
    sys.stdin.readline()
    before, most, done = own_bytes(), [0], Event()

    def watch() -> None:
        while not done.wait(SAMPLE_S):
            most[0] = max(most[0], own_bytes())

    watcher = Thread(target=watch)
    watcher.start()
    with torch.inference_mode():
        began = time.perf_counter()
        source = checkpoint_source(folder, quantization=kind)
        ops = source.choose_ops(arithmetic)
        loaded = source.load(ops, arithmetic)
        took = time.perf_counter() - began
    done.set()
    watcher.join()
    print(json.dumps([took, most[0] - before]))
    del loaded


def load(folder: Path, kind: str, files: Sequence[Path], cold: bool) -> tuple[float, int]:
    """Return the seconds of a load in a process of its own, and the most memory that it took."""
    order = [sys.executable, "-m", "tests.load_speed", "--once", kind, "--folder", str(folder)]
    with subprocess.Popen(order, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        prepare(files, cold)
        child.stdin.write("\n")
        child.stdin.flush()
        took, most = json.loads(child.stdout.readline())
    return took, most


def measured(model: str, root: Path, shards: int, rounds: int) -> list[dict[str, Any]]:
    """Return the seconds of dd and of each load, medians of the rounds, in which they take turns."""
    folder = root / f"{model}-{shards}"
    files = make(model, folder, shards)
    size, found = sum(path.stat().st_size for path in files), list[dict[str, Any]]()
    for cold in (True, False):
        by_dd, times = list[float](), {kind: list[tuple[float, int]]() for kind in KINDS}
        for _ in range(rounds):
            for kind in KINDS:
                prepare(files, cold)
                by_dd.append(read_by_dd(files))
                times[kind].append(load(folder, kind, files, cold))
        dd = statistics.median(by_dd)
        for kind, each in times.items():
            took = statistics.median(seconds for seconds, _ in each)
            found.append({
                "shards": shards, "cold": cold, "kind": kind, "bytes": size,
                "dd_s": round(dd, 3), "dd_least_s": round(min(by_dd), 3), "dd_most_s": round(max(by_dd), 3),
                "load_s": round(took, 3), "load_least_s": round(min(each)[0], 3),
                "load_most_s": round(max(each)[0], 3), "share": round(dd / took, 3),
                "peak": round(max(most for _, most in each) / size, 3),
            })  # fmt: skip
            print(found[-1], file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen2.5-0.5b")
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--once", choices=(*KINDS, *ON_CPUS), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.once is not None:
        load_once(asked.folder, asked.once)
        return
    with tempfile.TemporaryDirectory() as place:
        root = asked.folder or Path(place)
        print(
            json.dumps(
                [row for shards in asked.shards for row in measured(asked.model, root, shards, asked.rounds)]
            )
        )


if __name__ == "__main__":
    main()
