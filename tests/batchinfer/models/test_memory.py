"""Tests that loading does not need the model's memory twice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from batchinfer.models.checkpoint.checkpoint import inspect_checkpoint
from batchinfer.models.ops.choose import choose_ops
from batchinfer.models.ops.torch_ops import TorchOps
from tests.checkpoints import LATENT, make_checkpoint

LOAD = """
import resource, sys
from pathlib import Path
import torch
from batchinfer.models.checkpoint.checkpoint import inspect_checkpoint
from batchinfer.models.decoder.decoder import Decoder
from batchinfer.models.decoder.packed_weights import pack_weights
from batchinfer.models.checkpoint.weights import CheckpointWeights
from batchinfer.models.ops.torch_ops import TorchOps

checkpoint = inspect_checkpoint(Path(sys.argv[1]))
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
weights = CheckpointWeights(checkpoint, getattr(torch, sys.argv[2]), "cpu")
decoder = Decoder(pack_weights(checkpoint.spec, weights, TorchOps(), "cpu"), TorchOps(), 512)
print((peak() - before) / checkpoint.weight_bytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB only on Linux")
@pytest.mark.parametrize(
    ("shards", "dtype", "limit"),
    [
        (4, "bfloat16", 1.2),
        pytest.param(1, "float32", 1.6, marks=pytest.mark.slow),
        pytest.param(4, "float32", 1.6, marks=pytest.mark.slow),
    ],
)
def test_peak_while_loading(tmp_path: Path, shards: int, dtype: str, limit: float) -> None:
    """70 MB in 10 layers: one layer's file pages and copy are allowed in memory, all pages of the model are
    not."""
    sizes = {"hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 10, "head_dim": 48}
    make_checkpoint(tmp_path, "llama", shards=shards, num_attention_heads=8, num_key_value_heads=4, **sizes)
    # A small shell starts it: ru_maxrss begins with the peak of the replaced process
    words = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", LOAD, str(tmp_path), dtype]
    out = subprocess.run(words, capture_output=True, text=True, check=True, env=os.environ)
    assert float(out.stdout) > 0
    assert float(out.stdout) < limit


@pytest.mark.parametrize("compiled", [False, True])
def test_a_cache_of_latents_stores_them_once(tmp_path: Path, compiled: bool) -> None:
    """Per token and layer: `kv_lora_rank` values and the rotated part of k, counted in the cache's storage."""
    make_checkpoint(tmp_path, "deepseek_v3")
    checkpoint, blocks, block_size = inspect_checkpoint(tmp_path), 7, 16
    attention, cpu = checkpoint.spec.attention, torch.device("cpu")
    sizes = (attention.group, attention.head_dim)
    ops = choose_ops(cpu, torch.bfloat16, *sizes, latent=True) if compiled else TorchOps()
    of_layers = [layer.attention.cache for layer in checkpoint.spec.layers]
    caches = [ops.allocate_cache(cache, blocks, block_size, torch.bfloat16, cpu) for cache in of_layers]
    held = {t.untyped_storage().data_ptr(): t.numel() for cache in caches for t in (cache.k, cache.v)}
    each = LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"]
    assert sum(held.values()) == blocks * block_size * len(caches) * each
    assert ops.block_bytes(of_layers, block_size, 2) * blocks == 2 * sum(held.values())
