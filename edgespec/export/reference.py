"""The original model in torch, on a text that travels with the package: what every exported graph is held against."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.contracts import Tokens
from edgespec.errors import ExportError
from edgespec.export.convert import quiet
from edgespec.export.source import Source

_TEXT = Path(__file__).with_name("check_text.txt")
MOST_TOKENS = 420
_FEWEST_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Reference:
    """What the original says about the check text.

    Attributes:
        tokens: shape (n,), an even number of them.
        logits: float32, shape (n, vocabulary), read from disk as needed; row i follows token i.
    """

    tokens: Tokens
    logits: NDArray[np.float32]


def check_tokens(source: Source, context_length: int) -> Tokens:
    """The check text in the model's own tokens, at most as many as fit, less one, and an even number.

    Raises:
        ExportError: too few for a meaningful check.
    """
    from tokenizers import Tokenizer

    text = _TEXT.read_text(encoding="utf-8")
    ids = Tokenizer.from_file(str(source.tokenizer)).encode(text).ids
    count = min(len(ids), MOST_TOKENS, context_length - 1) // 2 * 2
    if count < _FEWEST_TOKENS:
        raise ExportError(
            f"{source.name}: only {count} tokens to check the export with, and {_FEWEST_TOKENS} are needed; "
            "allow a longer context or check the tokenizer"
        )
    return np.array(ids[:count], np.int64)


def compute_reference(source: Source, tokens: Tokens, file: Path) -> Reference:
    """Run the original once over `tokens` and keep its logits in `file` (.npy).

    Attention is computed in the plain way, without fused kernels that leave out a model's peculiarities.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with quiet(), torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(
            source.folder,
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        ).eval()
        logits = model(torch.from_numpy(tokens)[None], use_cache=False).logits[0].float().numpy()
    np.save(file, logits)
    return Reference(tokens, np.load(file, mmap_mode="r"))
