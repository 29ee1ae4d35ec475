"""Device profiles: what was measured of a bundle on a machine, kept in the user's cache.

Owns the file and its key. Knows nothing of how costs are measured or used.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgespec.bundle import cache_dir
from edgespec.costs import CostTable
from edgespec.params import RuntimeParams, Spinning
from edgespec.state import write_atomically

_VERSION = 2
_MAX_SIZE = 1 << 20
_MAX_POINTS = 4096
_NOISY = 0.1  # uncertainty from which on it is worth to measure again
MOST_TRIES = 3  # of a machine that is always busy


@dataclass(frozen=True, slots=True)
class Profile:
    """Costs of the target's calls and of the draft's, where there is one.

    Attributes:
        tries: how often it was measured; these are the most certain figures.
    """

    target: CostTable
    draft: CostTable | None
    tries: int = 1

    @property
    def uncertainty(self) -> float:
        """Share by which a time may be wrong."""
        return max(self.target.uncertainty, 0.0 if self.draft is None else self.draft.uncertainty)

    @property
    def is_doubtful(self) -> bool:
        """Whether the machine was busy, and another measurement may find it less so."""
        return self.uncertainty > _NOISY and self.tries < MOST_TRIES


@dataclass(frozen=True, slots=True)
class Advice:
    """Threads and spinning with which a bundle was fastest. `edgespec tune` finds them."""

    threads: int
    spinning: Spinning


def profile_key(*facts: object) -> str:
    """A name for a profile: of everything that a cost depends on, and of this machine."""
    machine = (platform.machine(), platform.processor(), platform.system(), os.cpu_count())
    text = json.dumps([_VERSION, machine, [str(fact) for fact in facts]])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def read_profile(key: str) -> Profile | None:
    """The stored profile, or `None` where there is none that can be read."""
    try:
        data = _read(key)
        draft = data["draft"]
        return Profile(_table(data["target"]), None if draft is None else _table(draft), int(data["tries"]))
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return None


def read_advice(key: str) -> Advice | None:
    """The stored advice, or `None` where there is none that can be followed."""
    try:
        data = _read(key)
        advice = RuntimeParams(threads=data["threads"], spinning=data["spinning"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    if advice.threads is None or advice.spinning == "auto":
        return None
    return Advice(advice.threads, advice.spinning)


def write_profile(key: str, profile: Profile | Advice) -> bool:
    """Store a profile or advice, all or nothing, and say whether that was possible.

    A cache that cannot be written is no reason to fail: it is measured again.
    """
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: file.write(json.dumps(asdict(profile)).encode()))
    except OSError:
        return False
    return True


def _read(key: str) -> dict[str, Any]:
    path = _path(key)
    if path.stat().st_size > _MAX_SIZE:
        raise ValueError("no profile is as large as that")
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data


def _path(key: str) -> Path:
    return cache_dir() / "profiles" / f"{key}.json"


def _table(data: dict[str, Any]) -> CostTable:
    """Read a table.

    Raises:
        ValueError: it is not one that can be computed with.
    """
    pasts, rows = (tuple(int(n) for n in data[name]) for name in ("pasts", "rows"))
    seconds = tuple(tuple(float(s) for s in line) for line in data["seconds"])
    uncertainty = float(data["uncertainty"])
    fits = 0 < len(pasts) * len(rows) < _MAX_POINTS and len(seconds) == len(pasts)
    fits = fits and all(len(line) == len(rows) and all(0 < s < 1e4 for s in line) for line in seconds)
    ascending = all(axis and list(axis) == sorted(set(axis)) and axis[0] >= 0 for axis in (pasts, rows))
    if not (fits and ascending and rows[0] == 1 and 0 <= uncertainty < math.inf):
        raise ValueError("not a cost table")
    return CostTable(pasts, rows, seconds, uncertainty)
