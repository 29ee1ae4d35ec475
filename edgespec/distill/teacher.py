"""The target in torch: reading texts and writing many at once, its distributions kept. Owns what is kept of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache, DynamicLayer

from edgespec.distill.attention import register
from edgespec.distill.options import Settings
from edgespec.distill.store import ANSWER, READ, TEMPLATE, USER, Layers, Seen, Texts, id_type
from edgespec.distill.turns import Turns
from edgespec.errors import ExportError
from edgespec.export.source import Source

# Temperatures of the answers, in turn. Users are sampled, so that greedy answers differ, too; a small model asks
# nonsense at 1.
TEMPERATURES = (0.0, 0.7, 1.0)
_USER = 0.8
_LOGITS_BYTES = 256 << 20  # of the logits of a call


@dataclass(frozen=True, slots=True)
class Machine:
    """Where and in which type models run."""

    device: str
    dtype: str

    @property
    def torch_dtype(self) -> Any:
        return getattr(torch, self.dtype)

    def autocast(self) -> Any:
        """Multiply in the faster type while weights and sums stay float32."""
        return torch.autocast(self.device, dtype=self.torch_dtype, enabled=self.dtype != "float32")


def find_machine() -> Machine:
    """An accelerator if there is one, and the type in which matrices multiply faster, measured."""
    if torch.cuda.is_available():
        return Machine("cuda", "bfloat16" if torch.cuda.is_bf16_supported() else "float32")
    seconds = {name: _time_product(getattr(torch, name)) for name in ("float32", "bfloat16")}
    # Rounding is worth a clear gain only.
    return Machine("cpu", "bfloat16" if seconds["bfloat16"] < 0.8 * seconds["float32"] else "float32")


def _time_product(dtype: Any) -> float:
    left, right = torch.ones(512, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
    times = []
    for _ in range(6):
        started = time.perf_counter()
        left @ right
        times.append(time.perf_counter() - started)
    return min(times[1:])


def load_target(source: Source, machine: Machine) -> Any:
    """The target in torch.

    Raises:
        ExportError: it is not built like a llama.
    """
    from transformers import AutoModelForCausalLM

    from edgespec.export.convert import quiet

    try:
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(
                source.folder,
                dtype=machine.torch_dtype,
                local_files_only=True,
                trust_remote_code=False,
                attn_implementation=register(),
            )
    except KeyError:  # a family that looks its attention up among its own classes
        model = None
    body = getattr(model, "model", None)
    parts = ("embed_tokens", "layers", "norm")
    if body is None or any(not hasattr(body, part) for part in parts) or not hasattr(model, "lm_head"):
        raise ExportError(
            f"{source.name} is a {source.config.get('model_type')} model, and a draft is made of models that are built "
            "like a llama only: name another target"
        )
    return model.to(machine.device).eval().requires_grad_(False)


class _Slab(DynamicLayer):  # type: ignore[misc]
    """A layer's cache in one buffer: each step writes a column instead of copying all of them."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.length = size, 0

    def update(self, keys: Any, values: Any, settings: Any = None) -> tuple[Any, Any]:
        if not self.length:
            batch, heads, _, width = keys.shape
            self.keys = keys.new_empty(batch, heads, self.size, width)
            self.values = torch.empty_like(self.keys)
            self.is_initialized = True
        start, self.length = self.length, self.length + keys.shape[2]
        self.keys[:, :, start : self.length] = keys
        self.values[:, :, start : self.length] = values
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def get_seq_length(self, *_: Any) -> int:
        return self.length

    def get_mask_sizes(self, cache_position: Any) -> tuple[int, int]:
        return self.length + len(cache_position), 0


class Teacher:
    """The target, keeping the best of each distribution.

    Args:
        model: of `load_target`.
        vocab_size: tokens there are; further rows of logits are padding.
    """

    def __init__(self, model: Any, settings: Settings, vocab_size: int, machine: Machine) -> None:
        self.model, self.settings, self.vocab_size, self.machine = model, settings, vocab_size, machine
        self.num_kept = min(settings.kept, vocab_size)

    def read(self, tokens: NDArray[np.int64], kinds: NDArray[np.uint8] | None = None) -> Texts:
        """What the target says after each token of texts, shape (n, length), that others wrote."""
        count, length = tokens.shape
        at_once = self._texts_at_once(length)
        ids, logps, chosen = [], [], []
        for start in range(0, count, at_once):
            part = torch.from_numpy(tokens[start : start + at_once]).to(self.machine.device)
            with torch.inference_mode():
                logits = self._cut(self.model(part, use_cache=False).logits)
                best, found, total = self._keep(logits)
                after = part[:, 1:, None]
                chosen.append(_pad((logits[:, :-1].gather(-1, after).float() - total[:, :-1])[..., 0]))
            ids.append(best.cpu())
            logps.append(found.half().cpu())
        return Texts(
            tokens.astype(np.int32),
            np.full(tokens.shape, READ, np.uint8) if kinds is None else kinds,
            np.ones(count, np.float32),
            torch.cat(ids).numpy().astype(id_type(self.vocab_size)),
            torch.cat(logps).numpy(),
            torch.cat(chosen).numpy(),
        )

    def see(self, tokens: NDArray[np.int64], layers: Layers) -> Seen:
        """What a draft reads of the target after each token of texts, shape (n, length)."""
        found: dict[int, Any] = {}
        hooks = [
            self.model.model.layers[layer].self_attn.register_forward_pre_hook(
                lambda _, inputs, named, layer=layer: found.update({layer: _first_input(inputs, named)}),
                with_kwargs=True,
            )
            for layer in layers.hidden
        ]
        hidden, keys = [], []
        try:
            for start in range(0, len(tokens), self._texts_at_once(tokens.shape[1])):
                part = torch.from_numpy(tokens[start : start + self._texts_at_once(tokens.shape[1])])
                with torch.inference_mode():
                    made = self.model.model(part.to(self.machine.device), use_cache=layers.attended is not None)
                parts = [*(found[layer] for layer in layers.hidden), made.last_hidden_state]
                hidden.append(torch.cat(parts, -1).half().cpu())
                if layers.attended is not None:
                    layer = made.past_key_values.layers[layers.attended]
                    keys.append(torch.stack([layer.keys, layer.values], 2).permute(0, 3, 2, 1, 4).half().cpu())
        finally:
            for hook in hooks:
                hook.remove()
        return Seen(torch.cat(hidden).numpy(), torch.cat(keys).numpy() if keys else None)

    def write(self, turns: Turns, openings: Sequence[list[int] | None], length: int, seed: Sequence[int]) -> Texts:
        """Conversations that the target writes on both sides, one for each opening.

        Args:
            turns: of its template.
            openings: tokens of each first user turn, cut to what leaves room for an answer; None lets the target write
                it.
            length: of each conversation, in tokens.
            seed: decides everything.
        """
        rng = np.random.default_rng(seed)
        count = len(openings)
        rows = [_Row(turns, TEMPERATURES[i % len(TEMPERATURES)]) for i in range(count)]
        for row, opening in zip(rows, openings, strict=True):
            if opening is not None:
                row.start_with(opening, length)
        before = turns.before[-(length // 2) :]
        writing = _Writing(np.tile(np.array(before), (count, 1)), length, self.num_kept)
        cache = Cache(layers=[_Slab(length) for _ in range(self.model.config.num_hidden_layers)])
        fed = torch.from_numpy(writing.tokens[:, : len(before)]).to(self.machine.device)
        for at in range(len(before), length):
            with torch.inference_mode():
                logits = self.model(fed, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
                logits = self._cut(logits)[:, -1]
                best, logps, total = self._keep(logits)
            sampled, found = _sample(logits, best, logps, total, np.array([row.now for row in rows]), rng)
            writing.put(at, best, logps)
            for i, row in enumerate(rows):
                writing.tokens[i, at], writing.kinds[i, at] = row.next(int(sampled[i]))
            writing.chosen[:, at - 1] = found
            fed = torch.from_numpy(writing.tokens[:, at : at + 1]).to(self.machine.device)
        temperatures = np.array([row.temperature for row in rows], np.float32)
        return writing.texts(temperatures, id_type(self.vocab_size))

    def _texts_at_once(self, length: int) -> int:
        return max(1, _LOGITS_BYTES // (4 * length * self.vocab_size))

    def _cut(self, logits: Any) -> Any:
        return logits[..., : self.vocab_size]

    def _keep(self, logits: Any) -> tuple[Any, Any, Any]:
        """The best tokens, their log probabilities, and the logarithm of the sum, last axis 1."""
        values, best = logits.topk(self.num_kept, dim=-1)
        total = logits.float().logsumexp(-1, keepdim=True)
        return best, values.float() - total, total


class _Row:
    """Whose turn it is in one conversation, and which tokens are given."""

    def __init__(self, turns: Turns, temperature: float) -> None:
        self.turns, self.temperature = turns, temperature
        self.is_answer = not turns.to_answer
        self._given: list[tuple[int, int]] = []

    @property
    def now(self) -> float:
        """The temperature of the next token."""
        return self.temperature if self.is_answer else _USER

    def start_with(self, prompt: list[int], length: int) -> None:
        """Let the user say this, cut to what leaves room for an answer."""
        self._given = [(token, TEMPLATE) for token in [*prompt[: length // 2], *self.turns.to_answer]]
        self.is_answer = True

    def next(self, sampled: int) -> tuple[int, int]:
        """The next token and its kind: a given one if there is one, else what was sampled."""
        if self._given:
            return self._given.pop(0)
        kind = ANSWER if self.is_answer else USER
        if sampled in self.turns.ends:
            given = self.turns.bridge(sampled, is_answer=self.is_answer)
            self._given = [(token, TEMPLATE) for token in given]
            self.is_answer = not self.is_answer
        return sampled, kind


class _Writing:
    """The arrays of `Texts` while they are filled column by column."""

    def __init__(self, before: NDArray[np.int64], length: int, kept: int) -> None:
        count, given = before.shape
        self.tokens = np.zeros((count, length), np.int64)
        self.tokens[:, :given] = before
        self.kinds = np.full((count, length), TEMPLATE, np.uint8)
        self.ids = np.zeros((count, length, kept), np.int64)
        self.logps = np.zeros((count, length, kept), np.float16)
        self.chosen = np.zeros((count, length), np.float16)

    def put(self, at: int, best: Any, logps: Any) -> None:
        self.ids[:, at - 1] = best.cpu().numpy()
        self.logps[:, at - 1] = logps.half().cpu().numpy()

    def texts(self, temperatures: NDArray[np.float32], ids: type[np.generic]) -> Texts:
        return Texts(
            self.tokens.astype(np.int32), self.kinds, temperatures, self.ids.astype(ids), self.logps, self.chosen
        )


def _sample(
    logits: Any, best: Any, logps: Any, total: Any, temperatures: NDArray[np.float64], rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """A token for each row and its log probability at temperature 1, out of the kept ones.

    At temperature 1 the rest has its share, too, so that such rows follow the target's own distribution.
    """
    ids, scores = best.cpu().numpy(), logps.cpu().numpy().astype(np.float64)
    with np.errstate(divide="ignore"):
        noise = -np.log(-np.log(rng.random(scores.shape)))
    picked = (scores + temperatures[:, None] * noise).argmax(-1)  # Gumbel's way to sample at a temperature
    rows = np.arange(len(ids))
    tokens, found = ids[rows, picked], scores[rows, picked]
    beyond = (rng.random(len(ids)) < 1 - np.exp(scores).sum(-1)) & (temperatures == 1)
    for row in np.flatnonzero(beyond):
        rest = torch.exp(logits[row].float() - total[row]).cpu().numpy().astype(np.float64)
        rest[ids[row]] = 0
        if rest.sum() > 0:
            tokens[row] = min(np.searchsorted(np.cumsum(rest), rng.random() * rest.sum()), len(rest) - 1)
            found[row] = np.log(max(rest[tokens[row]], 1e-30))
    return tokens, found.astype(np.float32)


def _first_input(inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return inputs[0] if inputs else named["hidden_states"]


def _pad(chosen: Any) -> Any:
    return torch.nn.functional.pad(chosen, (0, 1)).half().cpu()
