"""`edgespec plan`: the table, its remarks, JSON and the figure."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from edgespec.cli import main


def plan(*args: object) -> Result:
    return CliRunner().invoke(main, ["plan", *map(str, args)])


def test_the_table_marks_the_best_length() -> None:
    """At acceptance 0.8 and a cost of 0.1 it is six tokens, 2.47 times as fast."""
    result = plan("--alpha", 0.8, "--cost-ratio", 0.1)
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["6", "3.95", "2.47x", "1.92x", "best"] in lines
    assert sum("best" in line for line in lines) == 1
    assert len(lines) == 1 + 13 + 2
    assert "best: 6 draft tokens a round, 2.47x; the optimum of the curve is at 5.8" in result.stdout
    assert "= 1.64x" in result.stdout


def test_where_drafting_does_not_pay() -> None:
    """The table says that plain decoding is best, and a sentence why."""
    result = plan("--alpha", 0.4, "--cost-ratio", 0.5, "--max-depth", 3)
    assert "drafting does not pay" in result.stdout
    assert ["0", "1.00", "1.00x", "1.00x", "best"] in [line.split() for line in result.stdout.splitlines()]


def test_json_with_a_cost_per_row() -> None:
    """One document; rows that cost time make shorter drafts best."""
    document = json.loads(plan("--alpha", 0.8, "--cost-ratio", 0.1, "--row-cost", 0.1, "--json").stdout)
    assert (document["alpha"], document["best"], len(document["depths"])) == (0.8, 4, 13)
    assert document["depths"][4]["speedup"] == pytest.approx(3.3616 / 1.8)


def test_the_figure(tmp_path: Path) -> None:
    """--plot writes a picture beside the table."""
    pytest.importorskip("matplotlib")
    result = plan("--alpha", 0.8, "--cost-ratio", 0.1, "--plot", tmp_path / "curve.png")
    assert result.exit_code == 0
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "name a file that ends in" in plan("--alpha", 1, "--cost-ratio", 0, "--plot", tmp_path / "a.doc").stderr


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One line that names the extra, before anything is printed."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = plan("--alpha", 0.8, "--cost-ratio", 0.1, "--plot", tmp_path / "curve.png")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "edgespec: --plot needs matplotlib: run `pip install 'edgespec[plot]'`\n"


def test_impossible_values() -> None:
    """A probability is between 0 and 1, a cost not negative, and neither is endless or no number at all."""
    good = {"--alpha": "0.5", "--cost-ratio": "0.1", "--row-cost": "0.1"}
    for name in good:
        for value in ("-1", "nan", "-nan", "inf", "-inf", "1e308", "x", ""):
            args = [text for pair in (good | {name: value}).items() for text in pair]
            result = plan(*args)
            assert (result.exit_code, result.stdout) == (2, ""), args
            assert result.stderr.count("\n") == 1
            assert name in result.stderr
    assert plan("--alpha", 0.5).exit_code == 2


@pytest.mark.parametrize("alpha", [0, 1e-320, 0.5, 1])
@pytest.mark.parametrize("cost_ratio", [0, 1e-320, 1000])
@pytest.mark.parametrize("row_cost", [0, 1000])
def test_the_ends_of_the_ranges_give_numbers(alpha: float, cost_ratio: float, row_cost: float) -> None:
    """No figure of the table, of JSON or of the remarks is endless or no number."""
    args = ("--alpha", alpha, "--cost-ratio", cost_ratio, "--row-cost", row_cost)
    for result in (plan(*args), plan(*args, "--json")):
        assert result.exit_code == 0
        assert not re.search(r"\b(inf|nan|Infinity|NaN)", result.stdout)
