"""A plain reference of published EAGLE-3 heads, with the arithmetic of the authors' code.

It computes all positions of a row at once, and all of them again for each further token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import PreTrainedModel

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 2048,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "model_type": "llama",
    "tie_word_embeddings": False,
}


class Norm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.2 * torch.randn(hidden))

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.weight * (
            x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + SIZES["rms_norm_eps"])
        )
        return scaled


def linear(inputs: int, outputs: int) -> nn.Linear:
    made = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(made.weight, std=inputs**-0.5)
    return made


def rotated(x: Tensor, theta: float) -> Tensor:
    """Return x, [n, heads, dim], rotated for positions 0 … n - 1."""
    count, _, dim = x.shape
    angles = torch.arange(count)[:, None] * theta ** (-torch.arange(0, dim, 2) / dim)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class MidLayer(nn.Module):
    def __init__(self, hidden: int, norms_residual: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads = SIZES["num_attention_heads"], SIZES["num_key_value_heads"]
        dim, inner = hidden // self.heads, SIZES["intermediate_size"]
        self.norms_residual = norms_residual
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        for name, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
            self.self_attn.add_module(f"{name}_proj", linear(2 * hidden, heads * dim))
        self.self_attn.add_module("o_proj", linear(hidden, hidden))
        self.mlp.add_module("gate_proj", linear(hidden, inner))
        self.mlp.add_module("up_proj", linear(hidden, inner))
        self.mlp.add_module("down_proj", linear(inner, hidden))
        self.hidden_norm, self.input_layernorm = Norm(hidden), Norm(hidden)
        self.post_attention_layernorm = Norm(hidden)

    def forward(self, embedded: Tensor, states: Tensor) -> Tensor:
        normed = self.hidden_norm(states)
        residual = normed if self.norms_residual else states
        x, own = torch.cat((self.input_layernorm(embedded), normed), -1), self.self_attn
        q, k, v = (
            made(x).view(len(x), heads, -1)
            for made, heads in (
                (own.q_proj, self.heads),
                (own.k_proj, self.kv_heads),
                (own.v_proj, self.kv_heads),
            )
        )
        q, k = rotated(q, SIZES["rope_theta"]), rotated(k, SIZES["rope_theta"])
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, 1) for part in (k, v))
        attended = scaled_dot_product_attention(*(part.transpose(0, 1) for part in (q, k, v)), is_causal=True)
        x = residual + own.o_proj(attended.transpose(0, 1).flatten(1))
        normed, mlp = self.post_attention_layernorm(x), self.mlp
        given: Tensor = x + mlp.down_proj(silu(mlp.gate_proj(normed)) * mlp.up_proj(normed))
        return given


class EagleReference(nn.Module):
    """A draft head for a target model.

    Args:
        model_hidden: hidden size of the target model.
        vocab: number of tokens of the target model.
        draft_vocab: number of tokens that the head can propose.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(
        self,
        model_hidden: int,
        vocab: int,
        draft_vocab: int,
        own_embedding: bool = False,
        norms_residual: bool = False,
    ) -> None:
        super().__init__()
        hidden = SIZES["hidden_size"]
        self.midlayer = MidLayer(hidden, norms_residual)
        self.fc, self.norm = linear(3 * model_hidden, hidden), Norm(hidden)
        self.lm_head = linear(hidden, draft_vocab)
        if own_embedding:
            self.embed_tokens = nn.Embedding(vocab, hidden)
        tokens = torch.randperm(vocab)[:draft_vocab].sort().values
        self.register_buffer("d2t", tokens - torch.arange(draft_vocab))
        self.register_buffer("t2d", torch.zeros(vocab, dtype=torch.bool).index_fill(0, tokens, True))

    @torch.inference_mode()
    def proposed(
        self, states: Tensor, tokens: Sequence[int], count: int, embedding: Tensor, allowed: Sequence[int]
    ) -> list[int]:
        """Return `count` proposed tokens after the given tokens.

        Args:
            states: states of the target model before each token but the first, [n - 1, 3 × hidden].
            tokens: n tokens of a row.
            embedding: embedding table of the target model, for a head without its own.
            allowed: tokens that may be proposed.
        """
        own = torch.arange(len(self.d2t)) + self.d2t
        barred = ~torch.isin(own, torch.tensor(allowed))
        table = self.embed_tokens.weight if hasattr(self, "embed_tokens") else embedding
        states, said = self.fc(states), list(tokens[1:])
        for _ in range(count):
            given = self.midlayer(table[said], states)[-1:]
            best = int(self.lm_head(self.norm(given))[0].masked_fill(barred, float("-inf")).argmax())
            said.append(best + int(self.d2t[best]))
            states = torch.cat((states, given))
        return said[len(tokens) - 1 :]


class EagleOf:
    """A draft head with its target model from transformers.

    Args:
        layers: layers whose inputs are the states that the head reads. The number after the last layer
            selects the input of the final norm.
    """

    def __init__(self, head: EagleReference, model: PreTrainedModel, layers: Sequence[int]) -> None:
        self.head, self.model, self.read = head, model, dict[int, Tensor]()
        self.layers = layers
        for layer, module in enumerate((*model.model.layers, model.model.norm)):
            module.register_forward_pre_hook(partial(self._take, layer))

    def _take(self, layer: int, _: nn.Module, given: tuple[Tensor, ...]) -> None:
        self.read[layer] = given[0][0]

    @torch.inference_mode()
    def proposed(self, tokens: Sequence[int], count: int, allowed: Sequence[int]) -> list[int]:
        """Return `count` proposed tokens after the tokens of a row, all of them in `allowed`."""
        self.model(torch.tensor([list(tokens[:-1])]))
        states = torch.cat([self.read[layer] for layer in self.layers], -1)
        return self.head.proposed(states, tokens, count, self.model.get_input_embeddings().weight, allowed)


def save_eagle(folder: Path, head: EagleReference, vocab: int, start: str = "midlayer.", **said: Any) -> Path:
    """Save a head in the authors' layout, or with another `start` in the layout of vLLM's speculators."""
    folder.mkdir()
    weights = {name.replace("midlayer.", start): one.contiguous() for name, one in head.state_dict().items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    sizes = {**SIZES, "vocab_size": vocab}
    own = {"draft_vocab_size": head.lm_head.out_features, "architectures": ["LlamaForCausalLMEagle3"]}
    config = {**own, **said, **(sizes if start == "midlayer." else {"transformer_layer_config": sizes})}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
