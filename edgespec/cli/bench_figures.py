"""The figures of `edgespec bench`, four in one picture. Knows the document that the command makes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.bench.summary import is_fixed, is_peer
from edgespec.cli import tables

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(document: dict[str, Any], path: Path) -> None:
    """Speed-up by family, accepted lengths, cost of rows, and prediction against measurement.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ConfigError: `path` has an ending of no kind of picture.
    """
    with tables.figure(path, 12, 8) as drawing:
        axes = drawing.subplots(2, 2)
        _draw_speedups(axes[0][0], document)
        _draw_lengths(axes[0][1], document)
        _draw_costs(axes[1][0], document["costs"])
        _draw_prediction(axes[1][1], document)


def _draw_speedups(axes: Axes, document: dict[str, Any]) -> None:
    rows = [r for r in document["rows"] if r["setting"] != "none" and not is_fixed(r["setting"])]
    families = list(dict.fromkeys(row["family"] for row in rows))
    settings = [s for s in dict.fromkeys(row["setting"] for row in rows) if not is_peer(s)]
    width = 0.8 / max(len(settings), 1)
    for i, setting in enumerate(settings):
        mine = [row for row in rows if row["setting"] == setting]
        at = [families.index(row["family"]) + (i - (len(settings) - 1) / 2) * width for row in mine]
        middles = [row["speedup"]["median"] for row in mine]
        below = [row["speedup"]["median"] - row["speedup"]["low"] for row in mine]
        above = [row["speedup"]["high"] - row["speedup"]["median"] for row in mine]
        axes.bar(at, middles, width, yerr=[below, above], capsize=2, label=setting)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(families)), families, rotation=30, ha="right")
    axes.set_ylabel("speed-up over plain, median and quartiles")
    axes.legend(fontsize="small")


def _draw_lengths(axes: Axes, document: dict[str, Any]) -> None:
    lines = {s: counts for s, counts in document["accepted_lengths"].items() if not is_fixed(s)}
    for setting, counts in lines.items():
        axes.plot(range(len(counts)), [n / sum(counts) for n in counts], marker="o", label=setting)
    axes.set_xlabel("accepted tokens of a draft")
    axes.set_ylabel("share of the rounds that drafted")
    if lines:
        axes.legend(fontsize="small")


def _draw_costs(axes: Axes, costs: dict[str, Any] | None) -> None:
    for model in ("target", "draft"):
        table = costs and costs[model]
        if table:
            for past, seconds in zip(table["pasts"], table["seconds"], strict=True):
                label = f"{model}, {past} cached"
                axes.plot(table["rows"], [s * 1e3 for s in seconds], marker="o", label=label)
    axes.set_xlabel("rows of a call")
    axes.set_ylabel("ms")
    axes.set_ylim(bottom=0)
    if costs:
        axes.legend(fontsize="small")


def _draw_prediction(axes: Axes, document: dict[str, Any]) -> None:
    names = dict.fromkeys(t["setting"] for t in document["trials"] if t["predicted_tokens_per_s"] is not None)
    for setting in names:
        mine = [t for t in document["trials"] if t["setting"] == setting and t["tokens_per_s"] is not None]
        both = [(t["predicted_tokens_per_s"], t["tokens_per_s"]) for t in mine if t["predicted_tokens_per_s"]]
        axes.scatter([p for p, _ in both], [m for _, m in both], s=12, label=setting)
    top = max([axes.get_xlim()[1], axes.get_ylim()[1]])
    axes.plot([0, top], [0, top], color="black", linewidth=0.8)
    axes.set_xlabel("tokens per second, expected by the controller")
    axes.set_ylabel("measured")
    if names:
        axes.legend(fontsize="small")
