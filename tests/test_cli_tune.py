"""`edgespec tune` on tiny bundles: tables, the sentence, JSON and the figure."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from edgespec.cli import main
from edgespec.cli.tune import verdict
from edgespec.tuning import BreakEven
from tests.tiny import rewrite_manifest

pytestmark = pytest.mark.usefixtures("empty_cache")


def tune(*args: object) -> Result:
    return CliRunner().invoke(main, ["tune", *map(str, args)])


def error_line(result: Result, code: int) -> str:
    assert (result.exit_code, result.stdout) == (code, "")
    return result.stderr.splitlines()[-1]


def test_the_report(tiny_pair: Path) -> None:
    """Threads and spinning, the curve, from where on drafts pay, the sentence and what is used from now on."""
    result = tune(tiny_pair, "--budget", "0.3s")
    assert result.exit_code == 0, result.output
    for part in ("both models", "best alone", "best for both", "a step of the draft model", "model, 16 cached"):
        assert part in result.stdout
    lines = result.stdout.splitlines()
    assert lines[0] == f"{tiny_pair}: target fp32, draft fp32"
    bars = [line.split() for line in lines if "##" in line]
    assert [int(bar[0]) for bar in bars] == list(range(1, 18))
    assert any(line.startswith(("drafting can win here: lookups", "drafting cannot win")) for line in lines)
    assert any(line.startswith("best, and used from now on: ") for line in lines)


def test_what_cannot_be_stored_is_not_promised(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the cache folder cannot be written, the report says so, where, and what to do."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "file"))
    result = tune(tiny_bundle, "--budget", "0.2s")
    assert result.exit_code == 0, result.output
    assert "from now on" not in result.stdout
    assert "\nbest: " in result.stdout
    assert "could not be stored in" in result.stderr
    assert str(tmp_path / "file") in " ".join(result.stderr.split())
    assert not json.loads(tune(tiny_bundle, "--budget", "0.2s", "--json").stdout)["bundles"][0]["is_stored"]


def test_json_of_several(tiny_bundle: Path, tmp_path: Path) -> None:
    """One document; the bundle that says most of what the original says in a second is recommended."""
    worse = tmp_path / "worse"
    shutil.copytree(tiny_bundle, worse)
    good = tmp_path / "good"
    shutil.copytree(tiny_bundle, good)
    rewrite_manifest(worse, check={"target": {"top1": 0.01}})
    rewrite_manifest(good, check={"target": {"top1": 0.99}})
    result = tune(worse, good, "--budget", "0.2s", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["recommended"] == str(good)
    first = document["bundles"][0]
    assert (first["agreement"], first["pair"], first["draft"]) == (0.01, None, None)
    assert first["single"].keys() == {"threads", "spinning"}
    assert len(first["target"]["seconds"][0]) == 17
    assert first["verdict"].startswith("drafting can")
    assert all(candidate["single_s"] > 0 for candidate in first["candidates"])


def test_a_comparison_without_agreement(tiny_bundle: Path, tiny_pair: Path) -> None:
    """Speed alone decides, and the report says that."""
    result = tune(tiny_bundle, tiny_pair, "--budget", "0.2s")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1].startswith("use ")
    assert "was not measured at its export" in result.stdout


def test_the_figure(tiny_pair: Path, tmp_path: Path) -> None:
    """--plot writes a picture."""
    pytest.importorskip("matplotlib")
    result = tune(tiny_pair, "--budget", "0.2s", "--plot", tmp_path / "curve.png")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_verdicts() -> None:
    """The sentence names the acceptance that is needed, or says that none is enough."""

    def even(past: int, gamma: int, lookup: float | None, model: float | None = None) -> BreakEven:
        return BreakEven(past, gamma, lookup, model)

    both = [even(16, 1, 0.2, 0.7), even(16, 2, 0.3, None), even(1024, 1, 0.9, 0.9)]
    assert verdict(both, 0.62, has_model=True) == (
        "drafting can win here: lookups above an acceptance of 20% with drafts of 1, 30% with drafts of 2, "
        "the draft model above an acceptance of 70% with drafts of 1 (the export measured 62% for this pair)"
    )
    assert verdict([even(16, 1, None)], None, has_model=False) == (
        "drafting cannot win here: lookups lose at any acceptance"
    )
    assert verdict([even(16, 1, 0.5)], None, has_model=True).endswith("the draft model loses at any acceptance")


def test_mistakes(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A time that is none, a folder that is no bundle, a provider that is not there, a figure without matplotlib."""
    assert "'soon' is no time" in error_line(tune(tiny_bundle, "--budget", "soon"), 2)
    assert str(tmp_path) in error_line(tune(tmp_path), 1)
    assert "provider 'quantum' is not in" in error_line(tune(tiny_bundle, "--provider", "quantum"), 2)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "edgespec[plot]" in error_line(tune(tiny_bundle, "--plot", tmp_path / "x.png"), 1)
