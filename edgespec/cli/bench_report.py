"""The report of `edgespec bench` as tables. Knows the document that the command makes."""

from __future__ import annotations

from typing import Any

from edgespec.bench.summary import is_fixed, is_peer
from edgespec.cli import tables, terminal

_HEADERS = (
    "setting",
    "tokens/s",
    "speed-up",
    "quartiles",
    "over best plain",
    "accepted",
    "tokens/pass",
    "first token",
    "ratio",
    "peak MB",
    "equal",
)


def write_report(document: dict[str, Any]) -> None:
    """A table for each family, then what they say together."""
    families = list(dict.fromkeys(row["family"] for row in document["rows"]))
    for family in families:
        rows = [row for row in document["rows"] if row["family"] == family and not is_fixed(row["setting"])]
        cells = [_cells(row, document["peak_bytes"]) for row in rows]
        tables.write_table(_HEADERS, cells, title=f"{family}, {rows[0]['prompts']} prompts")
        terminal.write("\n")
    _write_search(document["search"], document["default"])
    _write_peers(document["over_peers"])
    terminal.write("\n".join(_remarks(document)) + "\n")


def _cells(row: dict[str, Any], peaks: dict[str, int | None]) -> list[str]:
    speedup, over_best = row["speedup"], row["over_best_plain"]
    peak = peaks.get(_process(row["setting"]))
    return [
        row["setting"],
        f"{row['tokens_per_s']:.1f}",
        f"{speedup['median']:.2f}x",
        f"{speedup['low']:.2f}-{speedup['high']:.2f}",
        f"{over_best['median']:.2f}x",
        "-" if row["acceptance"] is None else f"{row['acceptance']:.0%}",
        "-" if row["tokens_per_pass"] is None else f"{row['tokens_per_pass']:.2f}",
        f"{row['first_token_s'] * 1e3:.0f} ms",
        f"{row['first_token_ratio']:.2f}x",
        "-" if peak is None else f"{peak / 2**20:.0f}",
        f"{row['equal']} of {row['comparable']}" if row["comparable"] else "-",
    ]


def _process(setting: str) -> str:
    """Which process holds the memory: a peer has one for all its settings."""
    return setting.split(" ")[0] if is_peer(setting) else setting


def _write_search(search: dict[str, Any], default: str) -> None:
    if not search:
        return
    headers = ("family", "best fixed", "its speed-up", default, "over best fixed")
    cells = [
        [
            family,
            found["best_fixed"],
            f"{found['best_fixed_speedup']:.2f}x",
            f"{found['controller_speedup']:.2f}x",
            f"{found['controller_over_best_fixed']:.3f}",
        ]
        for family, found in search.items()
    ]
    tables.write_table(headers, cells, title="best fixed drafter and length in hindsight")
    terminal.write("\n")


def _write_peers(over_peers: dict[str, dict[str, float]]) -> None:
    if not over_peers:
        return
    families = list(dict.fromkeys(family for line in over_peers.values() for family in line))
    cells = [
        [setting, *(f"{line[family]:.2f}x" if family in line else "-" for family in families)]
        for setting, line in over_peers.items()
    ]
    tables.write_table(("tokens per second over", *families), cells)
    terminal.write("\n")


def _remarks(document: dict[str, Any]) -> list[str]:
    lines = []
    if document["geometric_mean"] is not None:
        lines.append(f"{document['default']} over none: {document['geometric_mean']:.2f}x, the mean of the families")
    predicted = document["prediction"].get(document["default"])
    if predicted is not None:
        lines.append(
            f"tokens per second that the controller expected over those that came: {predicted['median']:.2f}, "
            f"quartiles {predicted['low']:.2f} to {predicted['high']:.2f}"
        )
    if document["near_ties"]:
        margins = [tie["margin"] for tie in document["near_ties"]]
        lines.append(
            f"{len(margins)} texts part from plain decoding at a near-tie, where the best two tokens are up to "
            f"{max(margins):.2f} apart in log-probability; --exact keeps them equal"
        )
    lines += [f"left out: {name}" for name in document["left_out"]]
    return [*lines, f"trials: {document['trials_file']}"]
