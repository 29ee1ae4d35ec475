"""`edgespec verify` on a tiny bundle: tables, JSON, the figure, and how it ends."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from edgespec import rounds
from edgespec.cli import main
from edgespec.proof import Proof
from tests.proof_faults import FAULTS


@pytest.fixture(autouse=True)
def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many samples each time, however fast the machine is: the budget is never used up."""
    monkeypatch.setattr("edgespec.cli.verify.Proof", partial(Proof, max_samples=80))


def verify(*args: object) -> Result:
    return CliRunner().invoke(main, ["verify", *map(str, args)])


def error_line(result: Result, code: int) -> str:
    assert (result.exit_code, result.stdout) == (code, "")
    (line,) = result.stderr.splitlines()
    return line


def test_a_right_pair_passes(tiny_pair: Path) -> None:
    """All four parts are shown, the verdict last, the progress on stderr; the exit code is 0."""
    result = verify(tiny_pair, "--budget", "10m", "--temperature", 60, "--top-k", 8)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("tiny: standard rule, 2 draft tokens a round")
    for part in ("rows a call", "largest error", "differing texts", "corrected"):
        assert part in result.stdout
    assert sum("temperature 60.0, top-k 8" in line for line in lines) == 2 + 2
    assert "would have been found with 99%" in lines[-4]
    assert lines[-1].startswith("PASSED in ")
    assert "FAILED" not in result.stdout
    assert result.stderr.splitlines()[0] == "loading ..."


def test_a_wrong_rule_fails(tiny_pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code is 1, and the last line says what failed."""
    FAULTS["accept what is the arg max"](monkeypatch)
    result = verify(tiny_pair, "--budget", "10m", "--temperature", 60, "--top-k", 8, "--drafter", "model")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1].startswith("FAILED in ")
    assert "corrected token (temperature 60.0, top-k 8, model, corrected p" in result.stdout.splitlines()[-1]


def test_a_drafter_that_changes_greedy_text_fails(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that are never refused give other texts, which are listed."""
    right = rounds.verify_greedy
    monkeypatch.setattr(
        rounds,
        "verify_greedy",
        lambda rows, draft: right(rows, draft) if not len(draft) else rounds.Verdict(len(draft), 7),
    )
    result = verify(tiny_bundle, "--budget", "10m", "--temperature", 0)
    assert result.exit_code == 1
    assert "temperature 0.0, ngram, exact: text 1, token" in result.stdout
    assert "FAILED" in result.stdout.splitlines()[-1]


def test_json(tiny_bundle: Path, tmp_path: Path) -> None:
    """One document and nothing else on stdout; without sampling options the usual settings are tested."""
    result = verify(tiny_bundle, "--budget", "10m", "--json", "--seed", 3, "--num-draft-tokens", 3)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["passed"], document["seed"], document["num_draft_tokens"]) == (True, 3, 3)
    settings = {fit["setting"] for fit in document["fits"]}
    assert settings >= {"T 1", "T 0.7, top-p 0.9", "T 1, top-k 40, min-p 0.05, repetition 1.1", "all"}
    assert {fit["drafter"] for fit in document["fits"]} == {"ngram", "all"}


def test_coupled(tiny_pair: Path) -> None:
    """The other rule is tested, sampled texts included."""
    result = verify(tiny_pair, "--budget", "10m", "--verifier", "coupled", "--temperature", 60)
    assert result.exit_code == 0, result.output
    assert "tiny: coupled rule" in result.stdout
    assert sum("temperature 60.0" in line and "exact" in line for line in result.stdout.splitlines()) == 2


def test_a_schema_of_ones_own(tiny_pair: Path, tmp_path: Path) -> None:
    """With --json-schema the masked distribution is what is tested."""
    pytest.importorskip("llguidance")
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": ["string", "integer", "boolean"]}', encoding="utf-8")
    result = verify(tiny_pair, "--budget", "10m", "--temperature", 60, "--json-schema", schema)
    assert result.exit_code == 0, result.output
    assert "json-schema schema.json" in result.stdout


def test_the_figure(tiny_bundle: Path, tmp_path: Path) -> None:
    """--plot writes a picture; without matplotlib one line says so before anything is done."""
    pytest.importorskip("matplotlib")
    result = verify(tiny_bundle, "--budget", "10m", "--temperature", 60, "--plot", tmp_path / "proof.svg")
    assert result.exit_code == 0, result.output
    assert "<svg" in (tmp_path / "proof.svg").read_text(encoding="utf-8")


def test_without_matplotlib(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One line that names the extra."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    line = error_line(verify(tiny_bundle, "--plot", tmp_path / "proof.png"), 1)
    assert line == "edgespec: --plot needs matplotlib: run `pip install 'edgespec[plot]'`"


def test_mistakes(tiny_bundle: Path, tmp_path: Path) -> None:
    """A time that is none, a draft model that is not there, a folder that is no bundle, options without a meaning."""
    assert "'soon' is no time; write 60s or 2m" in error_line(verify(tiny_bundle, "--budget", "soon"), 2)
    assert "the bundle has no draft model" in error_line(verify(tiny_bundle, "--drafter", "model"), 2)
    assert str(tmp_path) in error_line(verify(tmp_path), 1)
    assert "No such option" in error_line(verify(tiny_bundle, "--stop", "x"), 2)
