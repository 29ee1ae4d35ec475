"""The draft in torch: from the target's hidden states and the last token to the next token, and on from its own state.

Owns the shape of a draft and where its weights start. It has no cache: what it knows of the text is in the hidden
states of the target, which the target computes anyway (Ankner et al. 2024, "Hydra"; Li et al. 2024, "EAGLE"), and in
the keys and values of one of its layers, to which it attends (Du et al. 2024, "GLIDE"). And it is told what prompt
lookup would propose: it decides how much to trust that.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from edgespec.distill.store import Layers
from edgespec.errors import ConfigError
from edgespec.lookup import NUM_HINT_KINDS

_ATTENTION = 0.3  # of what the target's layer adds to its states, to begin with: the draft's states are smaller
_PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj")
_NOISE = 0.01  # of weights that would otherwise start at 0, so that they learn different things


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Sizes of a draft.

    Attributes:
        hidden_layers: of the target, whose attention's input is read beside what its head reads.
        hidden_size: of the target and of the state.
        intermediate_size: neurons of each block.
        num_blocks: of them.
        head_size: tokens that can be drafted.
        vocab_size: rows of the embedding.
        rms_norm_eps: of the norms.
        attended_layer: of the target, whose keys and values are attended to; None for a draft without attention.
        num_heads, num_kv_heads, head_dim: of that attention, 0 without it.
    """

    hidden_layers: tuple[int, ...]
    hidden_size: int
    intermediate_size: int
    num_blocks: int
    head_size: int
    vocab_size: int
    rms_norm_eps: float
    attended_layer: int | None = None
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0

    @property
    def num_features(self) -> int:
        """Width of what is read of the target."""
        return (len(self.hidden_layers) + 1) * self.hidden_size


def draft_shape(config: Any, layers: Layers, blocks: int, width: int | None, head_size: int) -> DraftShape:
    """The shape of a draft for a target.

    Raises:
        ConfigError: the width is out of range.
    """
    own, hidden, heads = int(config.intermediate_size), int(config.hidden_size), int(config.num_attention_heads)
    if width is not None and width > 8 * own:
        raise ConfigError(f"width is {width}, but the target's layers have {own} neurons: ask for fewer")
    sizes = (heads, int(getattr(config, "num_key_value_heads", None) or heads))
    return DraftShape(
        layers.hidden,
        hidden,
        own if width is None else width,
        blocks,
        head_size,
        int(config.vocab_size),
        float(getattr(config, "rms_norm_eps", 1e-5)),
        layers.attended,
        *((0, 0, 0) if layers.attended is None else (*sizes, getattr(config, "head_dim", None) or hidden // heads)),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """What the draft attends to, for rows of texts with as many places in each.

    Attributes:
        keys, values: of the target's layer, keys rotated, shape (rows, kv_heads, length, head_dim).
        positions: of the last token that the target has read, shape (rows, places).
        own: keys and values of the tokens drafted from there, each of shape (rows, kv_heads, places, head_dim).
    """

    keys: Any
    values: Any
    positions: Any
    own: list[tuple[Any, Any]] = field(default_factory=list)

    def first(self, rows: int) -> Memory:
        """Of the first rows."""
        own = [(key[:rows], value[:rows]) for key, value in self.own]
        return Memory(self.keys[:rows], self.values[:rows], self.positions[:rows], own)


class Attention(nn.Module):  # type: ignore[misc]
    """Attention to a layer of the target, and to what was drafted since.

    Args:
        rotate: (queries, keys, positions) -> both rotated as the target does it: shapes (rows, heads, places,
            head_dim), and positions (rows, places).
    """

    def __init__(self, shape: DraftShape, rotate: Any) -> None:
        super().__init__()
        self.shape, self.rotate = shape, rotate
        hidden, dim = shape.hidden_size, shape.head_dim
        self.norm = nn.RMSNorm(hidden, shape.rms_norm_eps)
        self.q_proj = nn.Linear(hidden, shape.num_heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, shape.num_kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, shape.num_kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * dim, hidden, bias=False)
        nn.init.zeros_(self.o_proj.weight)

    def forward(self, state: Any, memory: Memory) -> Any:
        """Shape (rows x places, hidden_size); the memory gets the new keys and values."""
        shape = self.shape
        rows, places = memory.positions.shape
        inner = self.norm(state.float())

        def heads(product: Any, count: int) -> Any:
            return product.view(rows, places, count, shape.head_dim).transpose(1, 2)

        position = memory.positions + 1 + len(memory.own)
        query, key = heads(self.q_proj(inner), shape.num_heads), heads(self.k_proj(inner), shape.num_kv_heads)
        query, key = self.rotate(query, key, position)
        memory.own.append((key, heads(self.v_proj(inner), shape.num_kv_heads)))
        query = query.reshape(rows, shape.num_kv_heads, -1, places, shape.head_dim) * shape.head_dim**-0.5
        scores = query @ memory.keys[:, :, None].transpose(-1, -2)
        is_behind = torch.arange(memory.keys.shape[2], device=position.device) > memory.positions[..., None]
        scores = scores.float().masked_fill(is_behind[:, None, None], -torch.inf)
        own = [(query * key[:, :, None]).sum(-1, keepdim=True).float() for key, _ in memory.own]
        weights = torch.cat([scores, *own], -1).softmax(-1).to(query.dtype)
        length = memory.keys.shape[2]
        mixed = weights[..., :length] @ memory.values[:, :, None]
        for i, (_, value) in enumerate(memory.own, length):
            mixed = mixed + weights[..., i : i + 1] * value[:, :, None]
        mixed = mixed.reshape(rows, shape.num_heads, places, shape.head_dim).transpose(1, 2)
        return state + self.o_proj(mixed.reshape(rows * places, -1))


def target_rotation(target: Any) -> Any:
    """`rotate` of `Attention`, out of the target's own code."""
    apply = sys.modules[type(target).__module__].apply_rotary_pos_emb

    def rotate(query: Any, key: Any, positions: Any) -> tuple[Any, Any]:
        with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
            cos, sin = target.model.rotary_emb(query.float(), positions)
        query, key = apply(query, key, cos.to(query.dtype), sin.to(query.dtype))
        return query, key

    return rotate


class Block(nn.Module):  # type: ignore[misc]
    """A gated MLP beside its input. It starts as nothing. Norms are computed in float32, whatever products are."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        hidden, width = shape.hidden_size, shape.intermediate_size
        self.norm = nn.RMSNorm(hidden, shape.rms_norm_eps)
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, state: Any) -> Any:
        inner = self.norm(state.float())
        return state + self.down_proj(functional.silu(self.gate_proj(inner)) * self.up_proj(inner))


class HiddenDraft(nn.Module):  # type: ignore[misc]
    """One step of the draft.

    Args:
        shape: its sizes.
        embedding: the target's, shape (vocab_size, hidden_size); it is not trained and no part of the draft.
        head: rows of the target's head that its own starts from, shape (head_size, hidden_size).
        scale: of the target's last norm, shape (hidden_size,).
        rotate: as for `Attention`.
    """

    def __init__(self, shape: DraftShape, embedding: Any, head: Any, scale: Any, rotate: Any = None) -> None:
        super().__init__()
        self.shape = shape
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.register_buffer("embedding", embedding.float(), persistent=False)
        self.fc = nn.Linear(shape.num_features, hidden, bias=False)
        self.norm_state, self.norm_token = nn.RMSNorm(hidden, eps), nn.RMSNorm(hidden, eps)
        self.mix = nn.Linear(2 * hidden, hidden, bias=False)
        self.attention = None if shape.attended_layer is None else Attention(shape, rotate)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_blocks))
        self.norm = nn.RMSNorm(hidden, eps)
        self.head = nn.Linear(hidden, shape.head_size, bias=False)
        self.hints = nn.Embedding(NUM_HINT_KINDS, hidden)
        same = torch.eye(hidden)
        with torch.no_grad():  # at first: what the target's head reads, plus the token, to the target's own head
            self.fc.weight.copy_(_start(shape.num_features, hidden, same))
            self.mix.weight.copy_(_start(2 * hidden, hidden, torch.cat([same, same], 1)))
            self.norm.weight.copy_(scale)
            self.head.weight.copy_(head)
            self.hints.weight.zero_()

    def read(self, hidden: Any) -> Any:
        """The state that the target's hidden states are worth: shape (n, num_features) -> (n, hidden_size)."""
        return self.fc(hidden)

    def forward(self, state: Any, tokens: Any, hints: Any, memory: Memory | None = None) -> tuple[Any, Any]:
        """The next state, and the logits of what follows `tokens`: shapes (n, hidden_size) and (n, head_size).

        Args:
            hints: column of the head and kind of what prompt lookup would say, shape (n, 2); kind 0 where it is silent.
            memory: of these n places, where the draft has attention.
        """
        token = functional.embedding(tokens, self.embedding)
        state = self.mix(torch.cat([self.norm_state(state.float()), self.norm_token(token)], -1))
        if self.attention is not None:
            state = self.attention(state, memory)
        for block in self.blocks:
            state = block(state)
        inner = self.norm(state.float())
        column, kind = hints.unbind(-1)
        trust = (self.hints(kind) * inner).sum(-1).float() * (kind > 0)
        return state, self.head(inner).float().scatter_add(-1, column[:, None], trust[:, None])


def _start(width: int, height: int, last: Any) -> Any:
    start = _NOISE * torch.randn(height, width)
    start[:, width - last.shape[1] :] += last
    return start


def make_student(target: Any, shape: DraftShape, head_ids: NDArray[np.int64]) -> HiddenDraft:
    """A draft that starts from the target's embedding, last norm, head, and the attention of the attended layer."""
    rows = torch.from_numpy(head_ids).to(target.device)
    head = target.lm_head.weight[rows].float()
    embedding = target.get_input_embeddings().weight
    rotate = None if shape.attended_layer is None else target_rotation(target)
    draft = HiddenDraft(shape, embedding, head.cpu(), _scale(target.model.norm, shape.hidden_size), rotate)
    if draft.attention is not None:
        _start_attention(draft.attention, target.model.layers[shape.attended_layer])
    return draft.to(target.device).train()  # type: ignore[no-any-return]


def go_on_from(draft: HiddenDraft, weights: Mapping[str, NDArray[np.float32]]) -> None:
    """Replace a draft's weights by those of another of the same sizes, which may be without attention."""
    with torch.no_grad():
        if draft.attention is not None:
            draft.attention.o_proj.weight.zero_()  # what the others were trained without must not disturb them
        for name, parameter in draft.named_parameters():
            if name in weights or not name.startswith("attention."):
                parameter.copy_(torch.from_numpy(weights[name]))


def _start_attention(attention: Attention, layer: Any) -> None:
    """Start from the layer's own products, which is better than from random ones (docs/distill.md)."""
    own = {name: getattr(attention, name).weight for name in _PRODUCTS}
    products = {name: getattr(layer.self_attn, name, None) for name in _PRODUCTS}
    found = {name: getattr(product, "weight", own[name][:0]) for name, product in products.items()}
    norm = getattr(layer, "input_layernorm", None)  # some families have norms behind the attention only
    if norm is None or any(weight.shape != own[name].shape for name, weight in found.items()):
        return
    with torch.no_grad():
        attention.norm.weight.copy_(_scale(norm, attention.shape.hidden_size))
        for name, weight in found.items():
            own[name].copy_(weight.float() * (_ATTENTION if name == "o_proj" else 1))


def _scale(norm: Any, size: int) -> Any:
    """What a norm without a mean multiplies by, shape (size,), whatever it calls its weight; ones of another norm."""
    weight = next(iter(norm.parameters()), torch.ones(size))
    ones = torch.ones(1, size, dtype=weight.dtype, device=weight.device)
    with torch.no_grad():
        found = (norm(ones) - norm(0 * ones))[0].float().cpu()  # less a bias
    return found if found.abs().sum() > 0 else torch.ones(size)
