"""The values that the ranks of a model send each other in a step, derived from the spec of a rank's part. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from batchinfer.models.spec.spec import ExpertsSpec, LayerSpec, ModelSpec

LOGIT_BYTES = 4  # of a logit
BEST_BYTES = 16  # of a row's greatest logit and its token, both of which are sent as float64


@dataclass(frozen=True, slots=True)
class RankTraffic:
    """The values that ranks with the same layers send each other, in bytes of a token: `sums` times in a step the
    hidden states of all tokens are added up, and once, where there is an `embedding`, their embeddings. Of each row
    that is sampled every rank sends `logits` bytes where logits are asked for, or the best of them: `best` bytes."""

    sums: int
    token_bytes: int  # of a token's hidden state, which the next stage gets, too
    embedding: bool = False
    logits: int = 0
    best: int = 0


def rank_traffic(own: ModelSpec, itemsize: int, experts_alone: bool = False) -> RankTraffic:
    """Return the traffic of a rank with this part of a model. `itemsize`: bytes of an activation; `experts_alone`:
    nothing but its experts is divided among ranks with the same layers."""
    if experts_alone:
        sums = sum(isinstance(layer.feed_forward, ExpertsSpec) for layer in own.layers)
        return RankTraffic(sums, own.hidden * itemsize)
    head = own.has_head
    first, end = own.tokens or (0, own.vocab)
    return RankTraffic(
        sums=sum(map(_sums, own.layers)),
        token_bytes=own.hidden * itemsize,
        embedding=own.begins,
        logits=LOGIT_BYTES * (end - first) if head else 0,
        best=BEST_BYTES if head else 0,
    )


def _sums(layer: LayerSpec) -> int:
    """Count the sums over ranks in a layer: behind attention, behind the feed-forward half or experts, and behind the
    shared experts, where there are any."""
    fed = layer.feed_forward
    shared = isinstance(fed, ExpertsSpec) and fed.shared is not None
    return (layer.attention is not None) + 1 + shared
