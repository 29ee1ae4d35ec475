"""The draft in torch: from the target's hidden states and the last token to the next token, and on from its own state.

Owns the shape of a draft and where its weights start. It has no attention and no cache: what it knows of the text is in
the hidden states of the target, which the target computes anyway (Ankner et al. 2024, "Hydra"; Li et al. 2024,
"EAGLE").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from edgespec.errors import ConfigError

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
    """

    hidden_layers: tuple[int, ...]
    hidden_size: int
    intermediate_size: int
    num_blocks: int
    head_size: int
    vocab_size: int
    rms_norm_eps: float

    @property
    def num_features(self) -> int:
        """Width of what is read of the target."""
        return (len(self.hidden_layers) + 1) * self.hidden_size


def draft_shape(
    config: Any, hidden_layers: tuple[int, ...], blocks: int, width: int | None, head_size: int
) -> DraftShape:
    """The shape of a draft for a target.

    Raises:
        ConfigError: the width is out of range.
    """
    own = int(config.intermediate_size)
    if width is not None and width > 8 * own:
        raise ConfigError(f"width is {width}, but the target's layers have {own} neurons: ask for fewer")
    return DraftShape(
        hidden_layers,
        int(config.hidden_size),
        own if width is None else width,
        blocks,
        head_size,
        int(config.vocab_size),
        float(getattr(config, "rms_norm_eps", 1e-5)),
    )


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
    """

    def __init__(self, shape: DraftShape, embedding: Any, head: Any, scale: Any) -> None:
        super().__init__()
        self.shape = shape
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.register_buffer("embedding", embedding.float(), persistent=False)
        self.fc = nn.Linear(shape.num_features, hidden, bias=False)
        self.norm_state, self.norm_token = nn.RMSNorm(hidden, eps), nn.RMSNorm(hidden, eps)
        self.mix = nn.Linear(2 * hidden, hidden, bias=False)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_blocks))
        self.norm = nn.RMSNorm(hidden, eps)
        self.head = nn.Linear(hidden, shape.head_size, bias=False)
        same = torch.eye(hidden)
        with torch.no_grad():  # at first: what the target's head reads, plus the token, to the target's own head
            self.fc.weight.copy_(_start(shape.num_features, hidden, same))
            self.mix.weight.copy_(_start(2 * hidden, hidden, torch.cat([same, same], 1)))
            self.norm.weight.copy_(scale)
            self.head.weight.copy_(head)

    def read(self, hidden: Any) -> Any:
        """The state that the target's hidden states are worth: shape (n, num_features) -> (n, hidden_size)."""
        return self.fc(hidden)

    def forward(self, state: Any, tokens: Any) -> tuple[Any, Any]:
        """The next state, and the logits of what follows `tokens`: shapes (n, hidden_size) and (n, head_size)."""
        token = functional.embedding(tokens, self.embedding)
        state = self.mix(torch.cat([self.norm_state(state.float()), self.norm_token(token)], -1))
        for block in self.blocks:
            state = block(state)
        return state, self.head(self.norm(state.float()))


def _start(width: int, height: int, last: Any) -> Any:
    start = _NOISE * torch.randn(height, width)
    start[:, width - last.shape[1] :] += last
    return start


def make_student(target: Any, shape: DraftShape, head_ids: NDArray[np.int64]) -> HiddenDraft:
    """A draft that starts from the target's embedding, last norm and head."""
    rows = torch.from_numpy(head_ids).to(target.device)
    head = target.lm_head.weight[rows].float()
    scale = getattr(target.model.norm, "weight", torch.ones(shape.hidden_size)).float()
    draft = HiddenDraft(shape, target.get_input_embeddings().weight, head.cpu(), scale.cpu())
    return draft.to(target.device).train()  # type: ignore[no-any-return]
