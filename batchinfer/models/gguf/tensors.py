"""The tensors of a GGUF file under the names that the family's checkpoints use."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from batchinfer.core.gguf.files import GgufModel
from batchinfer.core.gguf.header import GgufTensor
from batchinfer.models.files.weight_files import StoredTensor
from batchinfer.models.formats.encoded_tensor import EncodedTensor
from batchinfer.models.formats.gguf import GgufWeight
from batchinfer.models.gguf.architectures import EXPERT, Architecture
from batchinfer.models.gguf.config import FACTORS, LONG, SHORT
from batchinfer.models.gguf.joined_experts import is_joined, joined_experts, part_of

# Their contents are in the configuration, or computed
_UNREAD = (FACTORS, SHORT, LONG)
_UNREAD_ENDS = (".attn_rot_embd.weight", ".rope_freqs.weight")
_LAYER = re.compile(r"blk\.(?P<number>\d+)\.(?P<module>.+)")
_ROW = "ffn_gate_inp_shexp"  # a matrix of one row, which is stored without that dimension
Stored = dict[str, StoredTensor]


def stored_tensors(
    model: GgufModel, known: Architecture, config: Mapping[str, Any]
) -> tuple[Stored, dict[str, EncodedTensor]]:
    """Return the tensors of a GGUF file under the names that checkpoints of the family use.

    A tensor of all experts becomes one tensor per expert. A tensor that the family does not know keeps its name.

    Args:
        model: The GGUF file.
        known: How the file's model is stored.
        config: The model's configuration, from `config_of`.

    Returns:
        All tensors that are read, and the weights that must be dequantised, reordered or shifted after reading.
    """
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    stored: Stored = {}
    encoded: dict[str, EncodedTensor] = {}
    for name, tensor in model.tensors.items():
        if name in _UNREAD or name.endswith(_UNREAD_ENDS) or (known.joined and is_joined(name)):
            continue
        module, _, end = name.rpartition(".")
        leaf = module.rpartition(".")[2]
        pairs = heads.get(leaf, 0) if known.pairs else 0
        less = known.norms if leaf.endswith("norm") else 0.0
        for ours, part in _named_parts(known, module, end, name, tensor):
            stored[ours] = part
            weight = GgufWeight(part.info.shape, (ours,), tensor.type, pairs, less)
            if weight.quantized or pairs or less:
                encoded[ours] = weight
    for ours, joined, under in joined_experts(model.tensors) if known.joined else ():
        encoded[ours] = joined
        stored |= under
    return stored, encoded


def _named_parts(
    known: Architecture, module: str, end: str, name: str, tensor: GgufTensor
) -> Iterator[tuple[str, StoredTensor]]:
    found = _LAYER.fullmatch(module)
    if found:
        ours = known.layer_tensor(found["number"], found["module"], end)
    else:
        around = known.module(module)
        ours = None if around is None else f"{around}.{end}"
    if ours is None:
        yield name, part_of(tensor, tensor.shape)
    elif EXPERT not in ours or len(tensor.shape) != 3:
        shape = (1, *tensor.shape) if module.endswith(_ROW) and len(tensor.shape) == 1 else tensor.shape
        yield ours, part_of(tensor, shape)
    else:
        experts = tensor.shape[0]
        for number in range(experts):
            part = part_of(tensor, tensor.shape[1:], number, experts)
            yield ours.replace(EXPERT, str(number)), part
