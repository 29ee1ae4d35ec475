"""Whether a graph still computes on this machine what it computed where it was exported, and under which row rule.

Kernels differ between processors and ONNX Runtime versions, so both are tested at the first load and kept in the
cache folder. Knows nothing of text.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from edgespec.bundle import Manifest, ModelInfo, cache_dir
from edgespec.errors import SessionError
from edgespec.invariance import measure_row_invariance, probe_tokens
from edgespec.ort import runtime_version
from edgespec.params import RowInvariance
from edgespec.session import DecoderSession

_TOKENS = 24
_ROWS = 6
_KEPT = 8  # most probable tokens of a row that are recorded
_BUDGET_S = 2.0
_FEWEST, _MOST = 12, 48  # tokens that the row rule is tried on
_TIMINGS = 4
_CALLS = 7.0  # calls per token that trying both rules takes
# Mean total variation that other kernels may make: what the export allows between ways to compute the same rows.
TOLERANCE = {"fp32": 1e-3, "fp16": 0.05, "int8": 0.15, "int4": 0.25}


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """What was found out about a graph on this machine.

    Attributes:
        distance: mean total variation to what the export recorded, or None where it recorded nothing.
        row_rule: the weakest rule under which a row's logits do not depend on the others of its call; None where
            nobody asked yet.
    """

    distance: float | None
    row_rule: RowInvariance | None = None


def make_probe(session: DecoderSession) -> dict[str, Any]:
    """The most probable tokens after a fixed text, with their probabilities, as it goes into a manifest.

    The session's cache is empty afterwards.
    """
    return {"tokens": _TOKENS, "rows": [[[int(i), float(p[i])] for i in _top(p)] for p in _distributions(session)]}


def probe_distance(session: DecoderSession, recorded: Mapping[str, Any]) -> float:
    """Mean total variation, over the recorded tokens, to what an export found.

    Raises:
        KeyError, TypeError, ValueError, IndexError: `recorded` is no probe of this graph.
    """
    rows = recorded["rows"]
    found = _distributions(session)
    if len(rows) != len(found) or recorded["tokens"] != _TOKENS:
        raise ValueError("a probe of another kind")
    return float(np.mean([_distance(p, entries) for p, entries in zip(found, rows, strict=True)]))


def self_check(session: DecoderSession, manifest: Manifest, threads: int | None, *, exact: bool) -> SelfCheck:
    """Check a bundle's target on this machine, or look up what was found before.

    Takes at most about two seconds with a model whose call of two rows takes up to 50 ms. What was found is kept for
    the same files, machine, ONNX Runtime, provider and number of threads.

    Args:
        session: of the target; its cache is empty afterwards.
        manifest: of the bundle.
        threads: as the session was opened with.
        exact: find the row rule, too.
    Raises:
        SessionError: the graph computes something else here.
    """
    key = _key(session, manifest, threads)
    found = known = _read(key)
    info = manifest.target
    if found is None:
        found = SelfCheck(_measure_distance(session, info, manifest.check.get("target_probe")))
    limit = TOLERANCE[info.precision]
    if found.distance is not None and not found.distance <= limit:
        raise SessionError(
            f"{info.path} computes something else on this machine than where it was exported (total variation "
            f"{found.distance:.2g}, at most {limit:g} is rounding): export it here, or use another provider"
        )
    if exact and found.row_rule is None:
        tokens = probe_tokens(session.vocab_size, affordable_tokens(session, _BUDGET_S, _MOST))
        found = replace(found, row_rule=measure_row_invariance(session, tokens))
    if found != known:
        _write(key, found)
    return found


def _measure_distance(session: DecoderSession, info: ModelInfo, recorded: object) -> float | None:
    if recorded is None:
        return None
    try:
        return probe_distance(session, recorded)  # type: ignore[arg-type]  # whatever the manifest holds
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise SessionError(f"{info.path}: the manifest's probe cannot be read ({error}); export it again") from error


def affordable_tokens(session: DecoderSession, seconds: float, most: int) -> int:
    """On how many tokens, an even number, the row rule can be tried in so much time. The cache is empty afterwards."""
    session.rewind(0)
    session.forward(probe_tokens(session.vocab_size, 4), 1)
    # The fastest of a few: a stall must not make the check a weak one.
    cost = min(_seconds_of_two_rows(session) for _ in range(_TIMINGS))
    session.rewind(0)
    wanted = int(seconds / (_CALLS * max(cost, 1e-6)))
    return max(_FEWEST, min(most, wanted, session.context_length - 2)) // 2 * 2


def _seconds_of_two_rows(session: DecoderSession) -> float:
    started = time.perf_counter()
    session.forward(probe_tokens(session.vocab_size, 2), 2)
    return time.perf_counter() - started


def _distributions(session: DecoderSession) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Next-token probabilities after the last tokens of the probe's text: shape (rows, vocabulary)."""
    session.rewind(0)
    logits = session.forward(probe_tokens(session.vocab_size, _TOKENS), _ROWS).astype(np.float64)
    session.rewind(0)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)  # type: ignore[no-any-return]


def _top(row: np.ndarray[Any, np.dtype[np.float64]]) -> list[int]:
    kept = min(_KEPT, len(row))
    found = np.argpartition(row, len(row) - kept)[-kept:]
    return [int(i) for i in found[np.argsort(-row[found])]]


def _distance(row: np.ndarray[Any, np.dtype[np.float64]], entries: Sequence[Any]) -> float:
    return float(sum(abs(float(row[int(i)]) - float(p)) for i, p in entries)) / 2


def _key(session: DecoderSession, manifest: Manifest, threads: int | None) -> str:
    folder = manifest.target.path.rpartition("/")[0]
    files = {name: info.sha256 for name, info in manifest.files.items() if name.rpartition("/")[0] == folder}
    recorded = manifest.check.get("target_probe")
    where: list[Any] = [files, recorded, machine_name(), runtime_version(), session.provider, threads]
    return hashlib.sha256(json.dumps(where, sort_keys=True).encode()).hexdigest()


def machine_name() -> str:
    """The processor, as far as the system tells: kernels are chosen by it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            named = [line.split(":", 1)[1].strip() for line in lines if line.startswith(("model name", "flags"))][:2]
    except OSError:
        named = []
    return " ".join([platform.system(), platform.machine(), platform.processor(), str(os.cpu_count()), *named])


def _read(key: str) -> SelfCheck | None:
    try:
        content = json.loads((cache_dir() / "selfcheck" / f"{key}.json").read_text(encoding="utf-8"))
        rule, distance = content["row_rule"], content["distance"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    is_sound = rule in (None, ">=2", "even", "none") and (distance is None or isinstance(distance, float))
    return SelfCheck(distance, rule) if is_sound else None


def _write(key: str, found: SelfCheck) -> None:
    """Keep a result. A cache that cannot be written costs the next load the check again, and nothing else."""
    folder = cache_dir() / "selfcheck"
    part = folder / f"{key}.{os.getpid()}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(asdict(found)), encoding="utf-8")
        os.replace(part, folder / f"{key}.json")
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
