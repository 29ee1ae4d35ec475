"""What may be asked of a distillation: every default, once, and the checks. Knows no step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Settings:
    """How a draft is made.

    Attributes:
        layers: blocks of the draft.
        width: neurons of each block; None has as many as a layer of the target.
        head_size: tokens that can be drafted; the others have probability 0.
        attention: let the draft attend to keys and values of the target, and so look back at the text.
        tokens: that the target writes or reads, with its distributions and hidden states kept.
        train_tokens: most places that the draft is trained on, repetitions counted; None is five times `tokens`.
        prompts: a file with a prompt on each line, which half of the conversations start with; None for none.
        start: a distilled draft of this target to go on training, in its sizes; it gets attention where it has none.
            None starts from the target's weights.
        seed: of everything random.
        written: share of the tokens that the target writes in conversations of its own.
        asked: share of those that it writes about passages of its own answers and of what is installed; the rest is
            text that it reads.
        kept: most probable tokens of each distribution that are kept, the mass of the rest beside them.
        write_rows, write_length: conversations that are written at once, and their tokens.
        read_rows, read_length: the same of texts that are read.
        depth: tokens that the draft is trained to draft one after the other.
        batch_tokens: places of a training step, in whole 32s; each further depth is trained on a third of those before.
        learning_rate: after the warm-up.
        total_variation: weight of the lost acceptance in the loss, beside the Kullback-Leibler divergence.
        search_steps: of each candidate for the layers to read.
        validate_every: steps between validations.
        patience: validations without a gain after which training winds down.
        checkpoint_every: steps between checkpoints.
    """

    layers: int = 2
    width: int | None = None
    head_size: int = 12_288
    attention: bool = True
    tokens: int = 1_300_000
    train_tokens: int | None = None
    prompts: Path | None = None
    start: Path | None = None
    seed: int = 0
    written: float = 0.5
    asked: float = 0.4
    kept: int = 32
    write_rows: int = 64
    write_length: int = 256
    read_rows: int = 64
    read_length: int = 512
    depth: int = 4
    batch_tokens: int = 1024
    learning_rate: float = 1e-3
    total_variation: float = 0.9
    search_steps: int = 60
    validate_every: int = 200
    patience: int = 8
    checkpoint_every: int = 50

    def __post_init__(self) -> None:
        least = {"layers": 1, "head_size": 16, "tokens": 1000, "kept": 2, "depth": 1, "batch_tokens": 1}
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {smallest}")
        for name in ("width", "train_tokens"):
            value = getattr(self, name)
            if value is not None and value < 8:
                raise ConfigError(f"{name} is {value}; it must be at least 8")
        if min(self.written, self.asked) < 0 or self.written + self.asked > 1 + 1e-9:
            raise ConfigError(
                f"written is {self.written} and asked is {self.asked}: they are shares, of 0 to 1 together"
            )

    @property
    def budget(self) -> int:
        """Most places that are trained on."""
        return 5 * self.tokens if self.train_tokens is None else self.train_tokens
