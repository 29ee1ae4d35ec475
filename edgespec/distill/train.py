"""Training a draft: batches, loss, schedule, validation, checkpoints. Each step depends on the seed and its number
alone, so that a run that was killed goes on as if nothing had happened.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from edgespec.distill.loss import HeadMap, distance
from edgespec.distill.options import Settings
from edgespec.distill.store import Texts
from edgespec.distill.student import trained_names
from edgespec.distill.teacher import Machine
from edgespec.distill.validate import Acceptance, measure
from edgespec.errors import ConfigError

_WARM_UP = 0.03  # of the budget
_DECAY = 0.25  # of the tokens trained on before it begins
_GAIN = 0.002  # of acceptance: less is none
_CLIP = 1.0
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(slots=True)
class State:
    """How far a training is.

    Attributes:
        step, tokens: done.
        decay_from: tokens at which the learning rate began to fall, or None before that.
        curve: what each validation found, with `tokens` and `loss`.
    """

    step: int = 0
    tokens: int = 0
    decay_from: int | None = None
    curve: list[dict[str, Any]] = field(default_factory=list)


class Trainer:
    """One draft in training.

    Args:
        model: of `make_student`.
        heads: its head.
        train: texts to train on by sort.
        check: texts to validate on, of one or more lengths.
        file: the checkpoint; read if it is there. None keeps none.
        budget: most tokens.
    """

    def __init__(
        self,
        model: Any,
        heads: HeadMap,
        train: Mapping[str, Texts],
        check: list[Texts],
        settings: Settings,
        machine: Machine,
        file: Path | None,
        budget: int,
    ) -> None:
        self.model, self.heads, self.settings, self.machine = model, heads, settings, machine
        self.train, self.check, self.file, self.budget = dict(train), check, file, budget
        self.state = State()
        self._losses: list[float] = []
        weights = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(weights, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
        if file is not None and file.is_file():
            self._resume(file)

    @property
    def end(self) -> int:
        """Tokens at which training is over, as things stand."""
        start = self.state.decay_from
        return self.budget if start is None else min(self.budget, start + max(1, int(_DECAY * start)))

    @property
    def is_over(self) -> bool:
        return self.state.tokens >= self.end

    def run(self, until: int, tell: Callable[[State, float], None]) -> None:
        """Train up to `until` tokens, or to the end if that comes first.

        Args:
            tell: told the state and the loss after every step.
        """
        settings, state = self.settings, self.state
        while state.tokens < min(until, self.end):
            loss = self._step()
            self._losses.append(loss)
            if state.step % settings.validate_every == 0:
                self._validate()
            if state.step % settings.checkpoint_every == 0:
                self.save()
            tell(state, loss)
        self.save()

    def validate(self) -> Acceptance:
        """Acceptance on the validation texts, now."""
        return measure(self.model, self.check, self.heads, self.machine.autocast())

    def finish(self) -> Acceptance:
        """Acceptance at the end, which is the last point of the curve."""
        if not self.state.curve or self.state.curve[-1]["tokens"] != self.state.tokens:
            self._validate()
            self.save()
        point = self.state.curve[-1]
        return Acceptance(point["greedy"], point["sampled"], point["read"])

    def save(self) -> None:
        """Write a checkpoint that appears whole or not at all."""
        if self.file is None:
            return
        tensors = {}
        named = dict(self.model.named_parameters())
        for name in trained_names(self.model):
            tensors[name] = named[name].detach().contiguous()
            for moment, value in self._optimizer.state[named[name]].items():
                if moment in _MOMENTS:
                    tensors[f"{moment}:{name}"] = value.contiguous()
        part = self.file.with_suffix(".part")
        state = asdict(self.state) | {"losses": self._losses}
        save_file(tensors, part, metadata={"state": json.dumps(state)})
        os.replace(part, self.file)

    def _step(self) -> float:
        state = self.state
        batch = self._batch()
        for group in self._optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * self._rate()
        tokens = torch.from_numpy(batch.tokens[:, :-1].astype(np.int64)).to(self.machine.device)
        with self.machine.autocast():
            logits = self.model(tokens).logits
        logits = logits.float().reshape(-1, logits.shape[-1])
        loss = distance(logits, self.heads.wanted(batch, self.machine.device), self.settings.total_variation)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.requires_grad], _CLIP)
        self._optimizer.step()
        state.step += 1
        state.tokens += tokens.numel()
        return float(loss.detach())

    def _batch(self) -> Texts:
        """Rows of one sort, each sort as often as it has tokens."""
        rng = np.random.default_rng([self.settings.seed, self.state.step])
        sizes = np.array([texts.tokens.size for texts in self.train.values()], float)
        texts = list(self.train.values())[int(rng.choice(len(sizes), p=sizes / sizes.sum()))]
        count = max(1, self.settings.batch_tokens // texts.tokens.shape[1])
        return texts.rows(np.sort(rng.choice(len(texts.tokens), min(count, len(texts.tokens)), replace=False)))

    def _rate(self) -> float:
        """Share of the learning rate: up, level, and down to a hundredth where training winds down."""
        state = self.state
        if state.decay_from is None and state.tokens >= self.budget / (1 + _DECAY):
            state.decay_from = state.tokens
        warm = min(1.0, (state.tokens + 1) / (_WARM_UP * self.budget))
        if state.decay_from is None:
            return warm
        left = (self.end - state.tokens) / max(1, self.end - state.decay_from)
        return warm * max(0.01, left)

    def _validate(self) -> None:
        found = self.validate()
        state = self.state
        state.curve.append(
            {"tokens": state.tokens, "loss": float(np.mean(self._losses)), "score": found.score, **found.as_dict()}
        )
        self._losses = []
        scores = [point["score"] for point in state.curve]
        earlier, recent = scores[: -self.settings.patience], scores[-self.settings.patience :]
        if state.decay_from is None and earlier and max(recent) < max(earlier) + _GAIN:
            state.decay_from = state.tokens

    def _resume(self, file: Path) -> None:
        try:
            with safe_open(file, "pt") as stored:
                content = json.loads(stored.metadata()["state"])
                named = dict(self.model.named_parameters())
                for name in trained_names(self.model):
                    parameter = named[name]
                    with torch.no_grad():
                        parameter.copy_(stored.get_tensor(name))
                    moments = {m: stored.get_tensor(f"{m}:{name}").to(parameter.device) for m in _MOMENTS}
                    self._optimizer.state[parameter] = {"step": torch.tensor(float(content["step"])), **moments}
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{file} is no checkpoint of this training ({error}): delete it") from error
        self._losses = content.pop("losses")
        self.state = State(**content)
