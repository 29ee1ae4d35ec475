"""The file of a run: a JSON object a line, each with all that its figures depend on. Written as trials are made."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from edgespec.bench.run import NearTie
from edgespec.bench.trial import Trial
from edgespec.errors import ConfigError

# What a line is about, under `kind`.
_TRIAL, _TIE, _MEMORY, _COSTS = "trial", "near_tie", "memory", "costs"


class Journal:
    """Writes a run. A context manager.

    Args:
        path: of the file, which is replaced.
        facts: what is the same for all lines: machine, versions, bundle, sampling.
        settings: setting -> what it ran with.
    """

    def __init__(self, path: Path, facts: dict[str, Any], settings: dict[str, dict[str, Any]]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._facts, self._settings = facts, settings
        self._file = path.open("w", encoding="utf-8", newline="\n")

    def trial(self, trial: Trial) -> None:
        self._write(_TRIAL, trial.as_dict() | self._settings.get(trial.setting, {}))

    def near_ties(self, ties: Iterable[NearTie]) -> None:
        for tie in ties:
            self._write(_TIE, asdict(tie))

    def memory(self, peaks: dict[str, int | None]) -> None:
        for setting, peak in peaks.items():
            self._write(_MEMORY, {"setting": setting, "peak_bytes": peak})

    def costs(self, costs: dict[str, Any]) -> None:
        self._write(_COSTS, costs)

    def _write(self, kind: str, line: dict[str, Any]) -> None:
        self._file.write(json.dumps({"kind": kind} | line | self._facts) + "\n")
        self._file.flush()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


@dataclass
class Run:
    """What a journal holds.

    Attributes:
        facts: of its first line.
        trials, near_ties: in order.
        memory: setting -> bytes.
        costs: cost tables of the bundle, if they are in it.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)
    near_ties: list[dict[str, Any]] = field(default_factory=list)
    memory: dict[str, int | None] = field(default_factory=dict)
    costs: dict[str, Any] | None = None


def read_journal(path: Path) -> Run:
    """Read what `Journal` wrote.

    Raises:
        ConfigError: it is another kind of file.
    """
    run = Run()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            data = json.loads(line)
            kind = data["kind"]
            if kind == _TRIAL:
                run.trials.append(Trial.from_dict(data))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}, line {number}: not written by `edgespec bench`") from error
        run.facts = run.facts or data
        if kind == _TIE:
            run.near_ties.append(data)
        elif kind == _MEMORY:
            run.memory[data["setting"]] = data["peak_bytes"]
        elif kind == _COSTS:
            run.costs = {name: data[name] for name in ("target", "draft")}
    return run
