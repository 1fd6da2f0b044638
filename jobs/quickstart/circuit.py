"""Write into a new model the one skill that is slow to learn: copying the token after the last same context.

Two layers of attention that copy by matching ("induction heads") form late and suddenly in training. Their weights are
known, so they are written into the new model, and training only has to learn when to use them:

    layer 0   two heads look one and two tokens back, and store the tokens there
    layer 1   one head looks for the position whose two predecessors are the current two tokens, and proposes
              its token; another head subtracts the current token, which would otherwise predict itself

The residual stream is divided into a constant, the token, its predecessor, the token before that, and the rest. All
weights stay trainable, and the architecture is a plain Llama.
"""

from __future__ import annotations

import math

import torch
from transformers import LlamaForCausalLM

CONSTANT = 0  # one dimension that is the same for every token, so that a head can ignore what it reads
WIDTH = 60
TOKEN, BEFORE, BEFORE_THAT = (slice(1 + part * WIDTH, 1 + (part + 1) * WIDTH) for part in range(3))
TOKEN_SCALE, CONSTANT_VALUE = 0.08, 0.3
FAST = 4  # rotary pairs that turn fast enough to tell neighbours apart
SLOW = 14  # rotary pairs from here on barely turn within a prompt: content is compared there


def write_copying(model: LlamaForCausalLM) -> None:
    """Write the circuit into a new model. The outputs of all other parts become zero."""
    with torch.no_grad():
        _embed(model)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        _look_back(model, head=0, steps=1, into=BEFORE)
        _look_back(model, head=1, steps=2, into=BEFORE_THAT)
        _match(model)
        _erase(model)


def _embed(model: LlamaForCausalLM) -> None:
    table = model.model.embed_tokens.weight
    table.normal_(0, 0.005)
    table[:, CONSTANT] = CONSTANT_VALUE
    table[:, TOKEN].normal_(0, TOKEN_SCALE)
    table[:, BEFORE_THAT.stop :].normal_(0, 0.04)


def _norm(model: LlamaForCausalLM, parts: int) -> float:
    """Return the length of the residual stream if `parts` of its parts contain a token."""
    assert model.config.hidden_size > BEFORE_THAT.stop
    return math.sqrt(parts * WIDTH * TOKEN_SCALE**2 + CONSTANT_VALUE**2)


def _turns(model: LlamaForCausalLM) -> torch.Tensor:
    """Return the angle by which each rotary pair turns from one position to the next."""
    turns: torch.Tensor = model.model.rotary_emb.inv_freq
    return turns


def _aim(model: LlamaForCausalLM, layer: int, head: int, steps: int, parts: int, score: float) -> None:
    """Make a head look a fixed number of positions back, whatever token is there.

    Args:
        model: The model to change.
        layer: The layer of the head.
        head: The number of the head.
        steps: The number of positions.
        parts: The number of parts of the residual stream that contain a token.
        score: The attention score of the position.
    """
    attention, size = model.model.layers[layer].self_attn, model.config.head_dim
    queries = attention.q_proj.weight.view(-1, size, model.config.hidden_size)[head]
    keys = attention.k_proj.weight.view(-1, size, model.config.hidden_size)[head // 2]
    constant = CONSTANT_VALUE / _norm(model, parts) * math.sqrt(model.config.hidden_size)
    strength = math.sqrt(score * math.sqrt(size) / FAST) / constant
    queries.zero_()
    keys.zero_()
    for pair, turn in enumerate(_turns(model)[:FAST].tolist()):
        keys[pair, CONSTANT] = strength
        queries[pair, CONSTANT] = strength * math.cos(-steps * turn)
        queries[pair + size // 2, CONSTANT] = strength * math.sin(-steps * turn)


def _carry(model: LlamaForCausalLM, layer: int, head: int, into: slice, parts: int, gain: float) -> None:
    """Make a head copy the token that it looks at into the part `into` of the stream, multiplied by `gain`."""
    attention, size = model.model.layers[layer].self_attn, model.config.head_dim
    values = attention.v_proj.weight.view(-1, size, model.config.hidden_size)[head // 2]
    outputs = attention.o_proj.weight.view(model.config.hidden_size, -1, size)[:, head]
    values.zero_()
    share = math.sqrt(abs(gain) * _norm(model, parts) / math.sqrt(model.config.hidden_size))
    values[:WIDTH, TOKEN] = torch.eye(WIDTH) * share
    outputs[into, :WIDTH] = torch.eye(WIDTH) * math.copysign(share, gain)


def _look_back(model: LlamaForCausalLM, head: int, steps: int, into: slice) -> None:
    _aim(model, 0, head, steps, parts=1, score=26.0)
    _carry(model, 0, head, into, parts=1, gain=1.0)


def _match(model: LlamaForCausalLM) -> None:
    """Set head 0 of layer 1: it compares the two current tokens with the two predecessors of every earlier position."""
    attention, size = model.model.layers[1].self_attn, model.config.head_dim
    half = size // 2
    rows = [*range(SLOW, half), *range(half + SLOW, size)]
    token_length = TOKEN_SCALE * math.sqrt(WIDTH) / _norm(model, 3) * math.sqrt(model.config.hidden_size)
    strength = math.sqrt(8.0 * math.sqrt(size)) / token_length
    queries = attention.q_proj.weight.view(-1, size, model.config.hidden_size)[0]
    keys = attention.k_proj.weight.view(-1, size, model.config.hidden_size)[0]
    queries.zero_()
    keys.zero_()
    for now, then in ((TOKEN, BEFORE), (BEFORE, BEFORE_THAT)):
        project = torch.randn(len(rows), WIDTH) / math.sqrt(len(rows)) * strength
        queries[rows, now] = project
        keys[rows, then] = project
    _carry(model, 1, 0, TOKEN, parts=3, gain=2.5)


def _erase(model: LlamaForCausalLM) -> None:
    """Set head 2 of layer 1: it looks at its own position and subtracts its token."""
    _aim(model, 1, 2, 0, parts=3, score=26.0)
    _carry(model, 1, 2, TOKEN, parts=3, gain=-1.0)
