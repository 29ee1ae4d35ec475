"""What the fusing pass says: its report when it succeeds, `NoMatch` when it does not."""

from __future__ import annotations

from dataclasses import dataclass


class NoMatch(Exception):
    """The graph is not what the pass can fuse. Internal to the export: its caller falls back, and says so.

    Attributes:
        layer: index of the decoder layer, or None if the reason concerns the whole model.
        reason: one line for the person who exports.
    """

    def __init__(self, reason: str, layer: int | None = None) -> None:
        super().__init__(reason if layer is None else f"layer {layer}: {reason}")
        self.layer = layer
        self.reason = reason


@dataclass(frozen=True)
class FuseReport:
    """What the fused graph is like.

    Attributes:
        num_layers, num_kv_heads, head_dim: the cache is `[1, num_kv_heads, capacity, head_dim]`, twice a layer.
        rotary_folded: every layer that rotates q and k does so inside the attention operator.
        qkv_packed: every layer computes q, k and v by one product.
        windows: per layer, how many tokens (itself included) a token sees; None is all of them.
        softcap: of the attention scores; 0 is none.
        max_len: most tokens of the graph, set by the rope tables and learned positions; None if neither exists.
        warnings: what the person who exports should know, one line each.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    rotary_folded: bool
    qkv_packed: bool
    windows: tuple[int | None, ...]
    softcap: float
    max_len: int | None
    warnings: tuple[str, ...]
