"""Measures the time and memory of loading checkpoints. Linux only.

A load is an engine's (inspecting the folder, reading, packing), in a process that has imported everything and
chosen its operators. Memory is touched and freed before each load.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from batchinfer.models.checkpoint.checkpoint import inspect_checkpoint
from batchinfer.models.spec.model_cost import loaded_bytes
from tests.speed.processes import Growth, command_of
from tests.suite.run import ROOT
from tests.suite.section import BenchSection, Part, Result
from tests.suite.turns import Metrics, compared

KINDS = ("none", "int8", "int4")
ON_CPUS = ("stored-int8", "stored-int4", "stored-mxfp4")  # with operators for weights as they are stored
SIZES = {
    "hidden_size": 1024, "intermediate_size": 3072, "moe_intermediate_size": 512, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 64, "num_hidden_layers": 4,
}  # fmt: skip
SAMPLE_S = 0.005
WARMING_TRIES = 3


def make(model: str, folder: Path, shards: int) -> list[Path]:
    """Write the checkpoint if it does not exist, and return its weight files."""
    import torch

    from batchinfer.models.checkpoint.dummy import DummyWeights, write_checkpoint
    from batchinfer.models.checkpoint.shapes import SHAPES, shape_config

    if not folder.exists():
        weights = DummyWeights(shape_config(model), torch.bfloat16, "cpu")
        write_checkpoint(folder, SHAPES[model], weights)
        if shards > 1:
            split(folder / "model.safetensors", shards)
        os.sync()
    return sorted(folder.glob("*.safetensors"))


def split(whole: Path, shards: int) -> None:
    """Divide the weight file into about `shards` files of equal size."""
    from huggingface_hub import save_torch_state_dict
    from safetensors.torch import load_file

    tensors = load_file(whole)
    size = whole.stat().st_size
    whole.unlink()
    save_torch_state_dict(tensors, whole.parent, max_shard_size=-(-size // shards))


def resident(files: Sequence[Path]) -> float:
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
    """Evict all pages of the files from memory."""
    while True:
        for path in files:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if not resident(files):
            return
        time.sleep(SAMPLE_S)  # pages that are being read cannot be evicted


def warm(files: Sequence[Path]) -> None:
    """Read all pages of the files into memory. Other processes may evict some at any time."""
    for _ in range(WARMING_TRIES):
        read_by_dd(files)
        if resident(files) == 1:
            return
    raise RuntimeError("the system does not keep the files in memory")


def touch(size: int) -> None:
    """Touch memory and free it.

    The host of a virtual machine reclaims free memory after some seconds (free page reporting). Getting it
    back takes ten times the time of clearing it.
    """
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as room:
        room.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, size, mmap.PAGESIZE):
            room[at] = 1


def prepare(files: Sequence[Path], cold: bool) -> None:
    """Read or evict the files' pages, and free the memory that the largest load needs."""
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


def load_once(folder: str, kind: Any) -> None:
    """Prepare, report that, wait for a line, load, and print the seconds and peak memory."""
    import torch

    from batchinfer.models.ops.choose import Arithmetic
    from batchinfer.models.sources import checkpoint_source

    arithmetic = Arithmetic(torch.bfloat16, torch.device("cpu"))
    checkpoint_source(Path(folder), quantization=kind).choose_ops(arithmetic)
    print("ready", flush=True)
    sys.stdin.readline()
    with Growth(own_bytes, SAMPLE_S) as grown, torch.inference_mode():
        began = time.perf_counter()
        source = checkpoint_source(Path(folder), quantization=kind)
        ops = source.choose_ops(arithmetic)
        loaded = source.load(ops, arithmetic)
        took = time.perf_counter() - began
    print(json.dumps([took, grown.most]))
    del loaded


def load(folder: Path, kind: str, files: Sequence[Path], cold: bool) -> tuple[float, int]:
    """Load in a separate process. Return the seconds and the peak memory."""
    order = command_of(load_once, folder, kind)
    with subprocess.Popen(order, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        prepare(files, cold)
        child.stdin.write("\n")
        child.stdin.flush()
        took, most = json.loads(child.stdout.readline())
    return took, most


def loads(section: BenchSection) -> list[Part]:
    """Return a part per number of files, cold and warm. `dd` reads the files before each load.

    Weights are random, in bfloat16. Cold: no page of the files is in memory, checked with mincore. Warm: all
    are. `peak_of_files`: the process's additional peak memory, without file pages, ÷ the files' bytes.
    `dd_share`: dd's seconds ÷ the load's seconds.
    """
    cases = product(section.given.shards, ("cold", "warm"))
    return [(f"{shards} files, {kind}", partial(_loads, section, shards, kind)) for shards, kind in cases]


def _loads(section: BenchSection, shards: int, pages: str) -> list[Result]:
    given, cold = section.given, pages == "cold"
    folder = (given.folder or section.place) / f"{given.model}-{shards}"
    files = make(given.model, folder, shards)
    size = sum(path.stat().st_size for path in files)

    def pair(kind: str, _: int) -> Metrics:
        prepare(files, cold)
        dd_s = read_by_dd(files)
        load_s, most = load(folder, kind, files, cold)
        return {"load_s": load_s, "dd_s": dd_s, "dd_share": dd_s / load_s, "peak_of_files": most / size}

    ways = {kind: partial(pair, kind) for kind in KINDS}
    return compared(f"{len(files)} files, {pages}", ways, given.rounds, "load_s", files_bytes=size)


def memory(section: BenchSection) -> list[Part]:
    """Return a part for each published format of weights.

    About 50 million weights in layers are loaded in bfloat16, once as stored if operators for them exist here, and
    once dequantised. Bytes: files, loaded weights, and peak memory above the start without pages of the files.
    `times_held`: that peak ÷ (loaded weights + largest file).
    """
    from tests.published_formats import PUBLISHED

    return [(name, partial(_memory, section, name)) for name in section.given.names or PUBLISHED]


def _memory(section: BenchSection, name: str) -> list[Result]:
    from tests.published_formats import make_published

    folder, found = section.place / f"{name}-stored", list[Result]()
    make_published(folder, section.place / f"{name}-plain", name, **SIZES)
    files = sorted(folder.glob("*.safetensors"))
    sizes = [path.stat().st_size for path in files]
    checkpoint = inspect_checkpoint(folder)
    for kind in {"none", checkpoint.stored_quantization} & {"none", *ON_CPUS}:
        held = checkpoint.for_quantization(kind)
        loaded = loaded_bytes(held.spec, held.parameters, 2)
        took, most = load(folder, kind, files, cold=False)
        bytes_of = {"files_bytes": sum(sizes), "loaded_bytes": loaded, "peak_bytes": most}
        metrics = {"load_s": took, **bytes_of, "times_held": most / (loaded + max(sizes))}
        found.append(Result(f"{name}, {kind}", metrics=metrics))
    shutil.rmtree(folder)
    return found
