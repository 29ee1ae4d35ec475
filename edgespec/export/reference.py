"""The original model in torch, on a text that travels with the package: what every exported graph is held against."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.contracts import Tokens
from edgespec.errors import ExportError
from edgespec.export.convert import quiet
from edgespec.export.skeleton import load_buffers, make_skeleton, stream_weights
from edgespec.export.source import Source
from edgespec.export.weights import Checkpoint

_TEXT = Path(__file__).with_name("check_text.txt")
MOST_TOKENS = 420
_FEWEST_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Reference:
    """What the original says about the check text.

    Attributes:
        tokens: shape (n,), an even number of them.
        logits: float32, shape (n, columns), read from disk as needed; row i follows token i.
    """

    tokens: Tokens
    logits: NDArray[np.float32]


def check_tokens(source: Source, context_length: int) -> Tokens:
    """`check_text_tokens` of a source."""
    return check_text_tokens(source.tokenizer, context_length, source.name)


def check_text_tokens(tokenizer: Path, context_length: int, name: str) -> Tokens:
    """The check text in a model's own tokens, at most as many as fit, less one, and an even number.

    Args:
        tokenizer: `tokenizer.json`.
        context_length: of the model.
        name: of the model, for messages.

    Raises:
        ExportError: too few for a meaningful check.
    """
    from tokenizers import Tokenizer

    text = _TEXT.read_text(encoding="utf-8")
    ids = Tokenizer.from_file(str(tokenizer)).encode(text).ids
    count = min(len(ids), MOST_TOKENS, context_length - 1) // 2 * 2
    if count < _FEWEST_TOKENS:
        raise ExportError(
            f"{name}: only {count} tokens to check the export with, and {_FEWEST_TOKENS} are needed; "
            "allow a longer context or check the tokenizer"
        )
    return np.array(ids[:count], np.int64)


def compute_reference(source: Source, tokens: Tokens, file: Path, num_layers: int | None = None) -> Reference:
    """Run the original once over `tokens` in float32 and keep its logits in `file` (.npy).

    Attention is computed in the plain way, without fused kernels that leave out a model's peculiarities. Each
    module reads its weights when it is called, so that one weight at a time is in memory.

    Args:
        num_layers: only so many of the first layers.
    """
    import torch

    with quiet(), torch.no_grad():
        model = make_skeleton(source.folder, num_layers)
        checkpoint = Checkpoint(source.folder)
        load_buffers(model, checkpoint)
        stream_weights(model, checkpoint)
        logits = model(torch.from_numpy(tokens)[None], use_cache=False).logits[0].float().numpy()
    np.save(file, logits)
    return Reference(tokens, np.load(file, mmap_mode="r"))
