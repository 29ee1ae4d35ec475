"""`edgespec plan`: what drafting would gain, from an acceptance and a cost. Owns the options and the table."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import click

from edgespec import theory
from edgespec.cli import tables, terminal
from edgespec.cli.help import HELP
from edgespec.cli.options import FiniteRange, NamedPath

_MAX_COST = 1000  # target passes; far more than what drafting could pay for


@dataclasses.dataclass(frozen=True, slots=True)
class Depth:
    """What one draft length gains.

    Attributes:
        draft_tokens: gamma.
        tokens_per_pass: that the target emits on average.
        speedup: tokens per second over plain decoding.
        operations: arithmetic per token over plain decoding.
    """

    draft_tokens: int
    tokens_per_pass: float
    speedup: float
    operations: float


@click.command("plan", context_settings=HELP)
@click.option("--alpha", required=True, type=FiniteRange(0, 1), help="Probability that a drafted token is accepted.")
@click.option(
    "--cost-ratio",
    required=True,
    type=FiniteRange(0, _MAX_COST),
    help="Time of a draft pass over that of a target pass.",
)
@click.option(
    "--row-cost",
    type=FiniteRange(0, _MAX_COST),
    default=0.0,
    show_default=True,
    help="What each further row adds to the time of a target pass, as a share of it; on CPUs about 0.1.",
)
@click.option("--max-depth", type=click.IntRange(1, 64), default=12, show_default=True, help="Longest draft shown.")
@click.option("--plot", type=NamedPath(dir_okay=False), help="Draw the curve to this file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def plan_command(
    alpha: float, cost_ratio: float, row_cost: float, max_depth: int, plot: Path | None, as_json: bool
) -> None:
    """Show what drafting would gain.

    Calculated for drafted tokens that are accepted independently of each other; `edgespec run` shows what is
    measured. Operations are counted for a draft whose share of the target's operations is the cost ratio.
    """
    if plot is not None:
        tables.require_matplotlib()
    depths = plan(alpha, cost_ratio, row_cost, max_depth)
    best = max(depths, key=lambda depth: depth.speedup)
    if plot is not None:
        _draw(plot, depths, best)
    if as_json:
        terminal.write_json(
            {"alpha": alpha, "cost_ratio": cost_ratio, "row_cost": row_cost, "best": best.draft_tokens}
            | {"depths": [dataclasses.asdict(depth) for depth in depths]}
        )
        return
    headers = ("draft tokens", "tokens per pass", "speed-up", "operations", "")
    tables.write_table(headers, [_cells(depth, is_best=depth is best) for depth in depths])
    terminal.write("\n".join(_remarks(alpha, cost_ratio, row_cost, best)) + "\n")


def plan(alpha: float, cost_ratio: float, row_cost: float, max_depth: int) -> list[Depth]:
    """Depths 0 (plain decoding) to `max_depth`."""
    return [
        Depth(
            gamma,
            theory.expected_tokens(alpha, gamma),
            theory.measured_speedup(alpha, gamma, lambda rows: 1 + row_cost * (rows - 1), cost_ratio),
            theory.extra_operations(alpha, gamma, cost_ratio),
        )
        for gamma in range(max_depth + 1)
    ]


def _cells(depth: Depth, *, is_best: bool) -> list[str]:
    figures = [f"{depth.tokens_per_pass:.2f}", f"{depth.speedup:.2f}x", f"{depth.operations:.2f}x"]
    return [str(depth.draft_tokens), *figures, "best" if is_best else ""]


def _remarks(alpha: float, cost_ratio: float, row_cost: float, best: Depth) -> list[str]:
    if best.draft_tokens == 0:
        return ["drafting does not pay: a draft costs more than the tokens that it saves"]
    lines = [f"best: {best.draft_tokens} draft tokens a round, {best.speedup:.2f}x"]
    if row_cost == 0:
        optimum = theory.optimal_gamma(alpha, cost_ratio)
        lines[0] += f"; the optimum of the curve is at {optimum:.1f}" if math.isfinite(optimum) else ""
        bound = theory.guaranteed_speedup(alpha, cost_ratio)
        lines.append(f"one draft token already gives (1 + alpha) / (1 + c) = {bound:.2f}x")
    return lines


def _draw(path: Path, depths: list[Depth], best: Depth) -> None:
    with tables.figure(path, 6, 4) as drawing:
        axes = drawing.add_subplot()
        axes.plot([d.draft_tokens for d in depths], [d.speedup for d in depths], marker="o")
        axes.plot(best.draft_tokens, best.speedup, marker="o", color="tab:red")
        axes.axhline(1, color="grey", linewidth=0.8)
        axes.set_xlabel("draft tokens a round")
        axes.set_ylabel("speed-up over plain decoding")
        axes.set_title(f"best: {best.draft_tokens} draft tokens, {best.speedup:.2f}x")
