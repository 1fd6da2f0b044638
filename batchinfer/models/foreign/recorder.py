"""Records the attention calls of a model that runs on the meta device, where nothing is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from batchinfer.models.foreign.spec import CannotRun, ForeignLayer

_WINDOW = "batchinfer_window"
# Arguments of attention that can be ignored: q and k already include positions, and the mask includes the window
NEUTRAL = (
    "cache_position",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "max_length_k",
    "max_length_q",
    "output_attentions",
    "position_embeddings",
    "position_ids",
    "sliding_window",
    "use_cache",
)
# (batch, head, query, key) as tensors of positions that broadcast → True if the query attends to the key
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Any]


class Recorder:
    """Stands in for attention while a model runs without weights, and records the attention that each layer needs.

    Attributes:
        layers: The attention of each call so far.
        outermost: Per call, the path of the model's outermost submodule that contains the calling layer; "" for none.
    """

    def __init__(self, positions: int) -> None:
        self.layers: list[ForeignLayer] = []
        self.outermost: list[str] = []
        self._positions = positions
        self._path: list[str] = []

    def attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: object, scale: object, **more: Any
    ) -> Tensor:
        """Record the attention of a layer, and return an empty tensor of its shape; see `AttentionBackend.attend`."""
        self.outermost.append(self._path[1] if len(self._path) > 1 else "")
        self.layers.append(_layer(module, q, k, v, mask, scale, more))
        return q.new_empty(*(q.shape[0], q.shape[2], q.shape[1], v.shape[3]))

    def mask(self, **of: Any) -> Any:
        """Return a mask without values that has the window as an attribute.

        If a layer changes the mask, the window is lost.

        Args:
            of: The keyword arguments of transformers' mask interface.
        """
        found = torch.empty(1, 1, of["q_length"], of["kv_length"], dtype=torch.bool, device="meta")
        setattr(found, _WINDOW, window_of(of["mask_function"], self._positions))
        return found

    def _leave(self, *_: object) -> None:
        self._path.pop()

    @contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        """Return a context manager that tracks which modules of a model are running. `outermost` needs this."""
        hooks = []
        for name, module in model.named_modules():
            hooks.append(module.register_forward_pre_hook(lambda *_, name=name: self._path.append(name)))
            hooks.append(module.register_forward_hook(self._leave))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _unknown(more: dict[str, Any]) -> list[str]:
    found = [
        name
        for name, value in more.items()
        if value is not None
        and value is not False
        and name not in (*NEUTRAL, "is_causal", "softcap", "s_aux")
    ]
    return found if more.get("is_causal", True) in (True, None) else [*found, "is_causal=False"]


def _layer(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: object, scale: object, more: dict[str, Any]
) -> ForeignLayer:
    unknown = _unknown(more)
    if unknown:
        raise CannotRun("its attention takes what our operators lack", ", ".join(unknown))
    if not hasattr(mask, _WINDOW):
        raise CannotRun("its layers make masks of attention of their own, or none")
    if scale is not None and not isinstance(scale, int | float):
        raise CannotRun("its attention takes what our operators lack", "a scale that is no number")
    tokens = {t.shape[0] * t.shape[2] for t in (q, k, v)}
    if len(tokens) > 1 or q.shape[1] % k.shape[1] or k.shape[1] != v.shape[1]:
        sizes = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
        raise CannotRun("its attention has more or fewer keys than tokens", sizes)
    dim = q.shape[3]
    return ForeignLayer(
        q_heads=q.shape[1],
        kv_heads=k.shape[1],
        k_dim=dim,
        v_dim=v.shape[3],
        scale=dim**-0.5 if scale is None else float(scale),
        window=getattr(mask, _WINDOW),
        soft_cap=_soft_cap(more.get("softcap")),
        sinks=_has_sinks(more.get("s_aux"), q.shape[1]),
    )


def _soft_cap(stated: object) -> float | None:
    if stated is not None and not isinstance(stated, int | float):
        raise CannotRun("its attention takes what our operators lack", "a cap that is no number")
    return None if stated is None else float(stated)


def _has_sinks(stated: object, heads: int) -> bool:
    if stated is not None and (not isinstance(stated, Tensor) or stated.shape != (heads,)):
        raise CannotRun(
            "its attention takes what our operators lack", "sinks that are not one number per head"
        )
    return stated is not None


def window_of(mask_function: MaskFunction, positions: int) -> int | None:
    """Return the size of a mask's sliding window: the number of keys that a query attends to. None: all earlier keys.

    Args:
        mask_function: Returns True for each pair of a query and a key if the query attends to the key.
        positions: The length of the longest sequence.

    Raises:
        CannotRun: The mask is neither causal nor a sliding window.
    """
    last = positions - 1
    window = int(_seen(mask_function, last, positions).sum())
    places = {0, 1, positions // 2, last, window - 1, window, window + 1}
    for query in sorted(place for place in places if 0 <= place <= last):
        keys = torch.arange(positions)
        wanted = (keys <= query) & (keys > query - window)
        if not torch.equal(_seen(mask_function, query, positions), wanted):
            raise CannotRun("its attention is neither causal nor a sliding window", f"see token {query}")
    return None if window == positions else window


def _seen(mask_function: MaskFunction, query: int, positions: int) -> Tensor:
    zero = torch.zeros((), dtype=torch.long)
    try:
        found = mask_function(zero, zero, torch.tensor(query), torch.arange(positions))
        return torch.as_tensor(found).expand(positions).bool().cpu()
    except (RuntimeError, NotImplementedError, IndexError, TypeError) as error:
        raise CannotRun("its mask of attention depends on more than positions") from error
