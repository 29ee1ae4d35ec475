"""`edgespec distill`: a draft of one's own, from what the target writes. Owns the options and the closing lines."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli import terminal
from edgespec.cli.help import HELP
from edgespec.cli.options import NamedPath, NamedSource, option
from edgespec.distill.options import Settings

if TYPE_CHECKING:
    from edgespec.distill import DistillReport

_DEFAULT = Settings()
_QUIET_S = 30.0  # between lines about the time left, where there is no bar


@click.command("distill", context_settings=HELP)
@click.argument("target", type=NamedSource())
@click.option("-o", "--output", "out", required=True, metavar="DIR", type=NamedPath(), help="Draft.")
@option("--layers", text="Blocks of the draft.", default=_DEFAULT.layers, type=int)
@click.option("--width", type=int, help="Neurons of each block.  [default: as the target's layers]")
@option("--head-size", text="Tokens that can be drafted.", default=_DEFAULT.head_size, type=int)
@click.option("--attention/--no-attention", default=_DEFAULT.attention, help="Attend to the target's cache.")
@option("--tokens", text="That the target writes or reads.", default=_DEFAULT.tokens, type=int)
@click.option("--train-tokens", type=int, help="Places to train on, at most.  [default: five times --tokens]")
@click.option(
    "--prompts",
    type=NamedPath(exists=True, dir_okay=False),
    metavar="FILE",
    help="A prompt on each line, for half of the conversations.",
)
@click.option("--from", "start", metavar="DRAFT", type=NamedPath(), help="Go on training this draft.")
@click.option("--work", metavar="DIR", type=NamedPath(), help="Texts and checkpoints.  [default: DIR.work]")
@option("--seed", text="Of everything random.", default=_DEFAULT.seed, type=int)
@click.option("--force", is_flag=True, help="Replace a draft that is there already.")
def distill_command(target: str, out: Path, work: Path | None, force: bool, **options: Any) -> int:
    """Make a draft for a model out of what the model itself writes.

    TARGET is what `edgespec export` takes, built like a llama. It writes conversations and reads documentation of
    installed packages; a small draft that reads its hidden states is trained to agree with it. A run that was ended
    goes on where it was when it is started again. `edgespec export TARGET --draft DIR` then makes a bundle of both.
    """
    # Where cores are shared, threads that spin while waiting make torch ten times slower. Read when it is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from edgespec.distill import distill

    settings = Settings(**options)
    with DistillProgress() as progress:
        report = distill(target, out, settings, work=work, overwrite=force, progress=progress)
    for line in summary(report):
        terminal.write(f"{line}\n")
    return 0


def summary(report: DistillReport) -> Iterator[str]:
    """What was made and what was measured, a line each."""
    yield f"reads layers {report.layers}, and the head's input; {report.trained_tokens:,} places trained on"
    yield report.acceptance.line()
    yield ", ".join(f"{name.replace('_', ' ')} alone {value:.3f}" for name, value in report.baselines.items())
    yield f"{report.path}: {report.size / 1e6:.1f} MB in {report.seconds:.0f} s"


class DistillProgress(terminal.ExportProgress):
    """Steps that take long: the bar of an export, and the time left; where there is no bar, a line now and then."""

    def __init__(self) -> None:
        super().__init__()
        self._name, self._began, self._said = "", 0.0, 0.0
        self._first: float | None = None

    def step(self, name: str) -> None:
        super().step(name)
        self._name, self._began, self._first = name, time.monotonic(), None
        self._said = self._began

    def advance(self, fraction: float) -> None:
        super().advance(fraction)
        now = time.monotonic()
        if self._first is None:  # a step that was taken up again does not begin at 0
            self._first, self._began = fraction, now
        gained = fraction - self._first
        if gained <= 0 or now - self._said < (1.0 if self._bar is not None else _QUIET_S):
            return
        self._said = now
        left = f"about {_duration((now - self._began) * (1 - fraction) / gained)} left"
        if self._bar is not None:
            self._bar.update(self._task, description=f"{self._name}, {left}")
        else:
            terminal.note(f"  {self._name}: {fraction:.0%}, {left}")
            sys.stderr.flush()


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if seconds < 90 else f"{minutes} min" if minutes < 90 else f"{seconds / 3600:.1f} h"
