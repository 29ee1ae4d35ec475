"""Training a draft: batches, loss, schedule, validation, checkpoints. Each step depends on the seed and its number
alone, so that a run that was killed goes on as if nothing had happened.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from edgespec.distill.loss import HeadMap, distance, survival
from edgespec.distill.options import Settings
from edgespec.distill.places import Places
from edgespec.distill.teacher import Machine
from edgespec.distill.validate import Acceptance, measure
from edgespec.errors import ConfigError

_WARM_UP = 0.03  # of the budget
_DECAY = 0.25  # of the tokens trained on before it begins
_GAIN = 0.002  # of acceptance: less is none
_CLIP = 1.0
_FEWER = 3  # times fewer places at each further depth
_EACH = 32  # places of a row of a text in a batch: they share its keys and values
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(slots=True)
class State:
    """How far a training is.

    Attributes:
        step, tokens: done; `tokens` are places, repetitions counted.
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
        train: places to train on.
        check: places to validate on.
        file: the checkpoint; read if it is there. None keeps none.
        budget: most places, repetitions counted.
    """

    def __init__(
        self,
        model: Any,
        heads: HeadMap,
        train: Places,
        check: Places,
        settings: Settings,
        machine: Machine,
        file: Path | None,
        budget: int,
    ) -> None:
        self.model, self.heads, self.settings, self.machine = model, heads, settings, machine
        self.train, self.check, self.file, self.budget = train, check, file, budget
        self.state = State()
        self._losses: list[float] = []
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
        )
        if file is not None and file.is_file():
            self._resume(file)

    @property
    def end(self) -> int:
        """Tokens at which training is over, as things stand."""
        start = self.state.decay_from
        return self.budget if start is None else min(self.budget, start + max(1, int(_DECAY * start)))

    @property
    def _num_rows(self) -> int:
        """Of a batch, each with as many places."""
        return max(1, self.settings.batch_tokens // _EACH)

    def run(self, tell: Callable[[State, float], None], most: int | None = None) -> None:
        """Train to the end.

        Args:
            tell: told the state and the loss after every step.
            most: steps after which to stop before the end.
        """
        settings, state = self.settings, self.state
        while state.tokens < self.end and (most is None or state.step < most):
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
        for name, parameter in self.model.named_parameters():
            tensors[name] = parameter.detach().contiguous()
            for moment, value in self._optimizer.state[parameter].items():
                if moment in _MOMENTS:
                    tensors[f"{moment}:{name}"] = value.contiguous()
        part = self.file.with_suffix(".part")
        state = asdict(self.state) | {"losses": self._losses}
        save_file(tensors, part, metadata={"state": json.dumps(state)})
        os.replace(part, self.file)

    def _step(self) -> float:
        state = self.state
        for group in self._optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * self._rate()
        loss = self._loss()
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), _CLIP)
        self._optimizer.step()
        state.step += 1
        state.tokens += self._num_rows * _EACH
        return float(loss.detach())

    def _loss(self) -> Any:
        """Summed over the depths, each weighted by how likely a draft gets there.

        Behind the first depth the draft goes on from a state of its own, and its tokens are weighted so that they are
        distributed as drafted ones that were accepted.
        """
        settings = self.settings
        rng = np.random.default_rng([settings.seed, self.state.step])
        rows = self._num_rows
        batch = self.train.batch(self.train.draw(rng, rows, _EACH), self.heads, self.machine.device)
        weights, memory = torch.ones(rows * _EACH, device=self.machine.device), batch.memory
        with self.machine.autocast():
            state = self.model.read(batch.hidden)
        total = torch.zeros((), device=self.machine.device)
        for depth, wanted in enumerate(batch.wanted):
            count = rows * _EACH
            wanted = wanted.first(count)
            weights = weights[:count] * batch.counts[:count, depth]
            memory = memory and memory.first(rows)
            with self.machine.autocast():
                state, logits = self.model(
                    state[:count], batch.tokens[:count, depth], batch.hints[:count, depth], memory
                )
            logits = logits.float()
            total = total + (distance(logits, wanted, settings.total_variation) * weights).sum() / count
            weights = weights * survival(logits, wanted)
            rows = max(1, rows // _FEWER)
        return total

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
                for name, parameter in self.model.named_parameters():
                    with torch.no_grad():
                        parameter.copy_(stored.get_tensor(name))
                    moments = {m: stored.get_tensor(f"{m}:{name}").to(parameter.device) for m in _MOMENTS}
                    self._optimizer.state[parameter] = {"step": torch.tensor(float(content["step"])), **moments}
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{file} is no checkpoint of this training ({error}): delete it") from error
        self._losses = content.pop("losses")
        self.state = State(**content)
