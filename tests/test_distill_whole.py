"""`edgespec distill` from end to end on a tiny random llama: killed, resumed, joined with its target, used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import edgespec
from edgespec.bundle import model_head, read_bundle
from edgespec.cli.export import export_command
from edgespec.errors import ConfigError, ExportError, IncompatibleDraftError
from edgespec.params import SamplingParams, SpecParams
from edgespec.policy import FixedPolicy
from tests.export_models import save_llama, torch_logits

pytestmark = pytest.mark.export

# The smallest budget that leaves texts to train and to validate on.
OPTIONS = ["--layers", "1", "--width", "64", "--head-size", "120", "--tokens", "30000", "--train-tokens", "250000"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model folder. Read only."""
    return save_llama(tmp_path_factory.mktemp("distill") / "tiny", max_position_embeddings=64)


def start(llama: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "edgespec", "distill", str(llama), "-o", str(out), *OPTIONS, *options]
    environment = os.environ | {"PYTHONPATH": str(Path(edgespec.__file__).parent.parent), "OMP_NUM_THREADS": "2"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def kill_when(process: subprocess.Popen[str], folder: Path, pattern: str) -> None:
    """End a process at once as soon as a file of this pattern is there."""
    deadline = time.monotonic() + 90
    while not list(folder.glob(pattern)):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, pattern
        time.sleep(0.02)
    process.kill()
    process.communicate()


@pytest.fixture(scope="module")
def made(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str, str]:
    """A draft made in one go, one of a run that was killed twice, and what the latter's last run said."""
    folder = tmp_path_factory.mktemp("drafts")
    process = start(llama, folder / "whole")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    killed = folder / "killed"
    work = folder / "killed.work"
    kill_when(start(llama, killed), work, "data/written-00000.npz")
    kill_when(start(llama, killed), work, "training-*/checkpoint.safetensors")
    assert not killed.exists()
    process = start(llama, killed)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return folder / "whole", killed, out, err


def test_a_killed_run_goes_on(made: tuple[Path, Path, str, str]) -> None:
    """Killed while writing and while training, it ends with the very weights of a run that was not."""
    whole, killed, _, _ = made
    for name in ("model.safetensors", "head_ids.npy", "config.json"):
        assert (whole / name).read_bytes() == (killed / name).read_bytes(), name
    curves = [json.loads((folder / "training.json").read_text(encoding="utf-8")) for folder in (whole, killed)]
    assert curves[0] == curves[1]


def test_it_says_how_it_goes(made: tuple[Path, Path, str, str]) -> None:
    """The predicted cost comes before the training, acceptance by depth and the baselines with it."""
    _, _, out, err = made
    assert err.index("predicted to cost") < err.index("training")
    assert "prompt lookup alone" in err
    assert "acceptance by depth: greedy" in out
    assert "killed: " in out.splitlines()[-1]


def test_the_card_tells_what_was_done(made: tuple[Path, Path, str, str]) -> None:
    """Data, steps, cost, acceptance, baselines and the packages whose documentation was read."""
    card = (made[1] / "README.md").read_text(encoding="utf-8")
    parts = (
        "# A draft for tiny",
        "written",
        "hidden states",
        "steps",
        "Predicted cost",
        "| greedy |",
        "bigram",
        "(MIT",
    )
    for part in parts:
        assert part in card, part


@pytest.fixture(scope="module")
def bundle(made: tuple[Path, Path, str, str], llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Target and draft joined by the export."""
    out = tmp_path_factory.mktemp("bundle") / "pair"
    arguments = [
        str(llama),
        "--draft",
        str(made[0]),
        "-o",
        str(out),
        "--precision",
        "fp32",
        "--draft-precision",
        "int8",
    ]
    result = CliRunner().invoke(export_command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return out


def test_the_export_joins_it(bundle: Path, made: tuple[Path, Path, str, str]) -> None:
    """The bundle's draft has fewer columns than tokens, and its manifest says which token each is."""
    opened = read_bundle(bundle)
    draft = opened.manifest.draft
    assert draft is not None
    assert draft.cache == "none"
    assert opened.manifest.target.hidden_layers == (1,)
    assert draft.vocab_size == opened.manifest.target.vocab_size
    head = model_head(opened, draft)
    assert head is not None
    np.testing.assert_array_equal(head.ids, np.load(made[0] / "head_ids.npy"))
    assert 0 < opened.manifest.check["pair_overlap"] < 1


def test_it_drafts(bundle: Path, llama: Path) -> None:
    """Greedy text with it is torch's own."""
    with edgespec.load(bundle, spec=SpecParams(drafter="model", num_draft_tokens=2)) as engine:
        check_text(engine, llama)


def check_text(engine: edgespec.Engine, llama: Path) -> None:
    """Greedy text is torch's own, and drafts took part in it."""
    prompt = np.random.default_rng(3).integers(3, 259, 12)
    stream = engine.generate(prompt.tolist(), SamplingParams(max_new_tokens=30, ignore_eos=True))
    stream.text()
    tokens = prompt
    for _ in range(30):
        tokens = np.append(tokens, torch_logits(llama, tokens)[-1].argmax())
    assert list(stream.token_ids) == tokens[12:].tolist()
    assert stream.stats.drafted > 0


def test_it_drafts_for_a_draft(made: tuple[Path, Path, str, str], llama: Path, tmp_path: Path) -> None:
    """The model in 8 bits drafts for itself, and is drafted for by what was distilled; both go on from `hidden`."""
    out = tmp_path / "three"
    arguments = [str(llama), "-o", str(out), "--precision", "fp32", "--draft", str(llama), "--draft-precision", "int8"]
    result = CliRunner().invoke(export_command, [*arguments, "--inner-draft", str(made[0])], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "inner draft: int8 in blocks of 128" in result.output
    manifest = read_bundle(out).manifest
    assert [model.cache for model in manifest.models.values()] == ["shared", "shared", "none"]
    assert [model.hidden_layers for model in manifest.models.values()] == [(1,), (1,), None]
    assert 0 < manifest.check["inner_overlap"] < manifest.check["pair_overlap"] < 1
    with edgespec.load(out, spec=SpecParams(drafter="model")) as engine:
        engine.policy = FixedPolicy(5)
        check_text(engine, llama)
        assert len(engine.providers) == 3


def test_an_inner_draft_that_cannot_be(made: tuple[Path, Path, str, str], llama: Path, tmp_path: Path) -> None:
    """Nothing to draft for, or a draft that reads no text, or no such draft: said before anything is converted."""
    from edgespec.export import export_bundle

    def export(**options: str) -> None:
        export_bundle(str(llama), tmp_path / "bundle", **options)  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match="name a draft"):
        export(inner_draft=str(made[0]))
    with pytest.raises(ConfigError, match="this draft was distilled"):
        export(draft=str(made[0]), inner_draft=str(made[0]))
    with pytest.raises(ConfigError, match="inner_draft is 'nothing'"):
        export(draft=str(llama), inner_draft="nothing")
    assert list(tmp_path.iterdir()) == []


def test_a_draft_of_another_target_is_refused(made: tuple[Path, Path, str, str], tmp_path: Path) -> None:
    """Another width, or other tokens: it is said which model it belongs to."""
    from edgespec.export import export_bundle

    other = save_llama(tmp_path / "other", hidden_size=32, max_position_embeddings=64)
    with pytest.raises(IncompatibleDraftError, match="embedding"):
        export_bundle(str(other), tmp_path / "bundle", draft=str(made[0]))
    tokenizer = other / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text(encoding="utf-8").replace('"<|im_end|>"', '"<|other|>"'), encoding="utf-8")
    with pytest.raises(IncompatibleDraftError, match="whose tokens"):
        export_bundle(str(other), tmp_path / "bundle", draft=str(made[0]))


def test_what_is_no_draft_is_left_alone(llama: Path, made: tuple[Path, Path, str, str], tmp_path: Path) -> None:
    """A folder with something else is never replaced, and a draft only with --force."""
    from edgespec.distill import distill

    (tmp_path / "thing").write_text("mine", encoding="utf-8")
    with pytest.raises(ExportError, match="left alone"):
        distill(str(llama), tmp_path)
    with pytest.raises(ExportError, match="--force"):
        distill(str(llama), made[0])


def test_a_draft_is_trained_further(made: tuple[Path, Path, str, str], llama: Path, tmp_path: Path) -> None:
    """A few steps from a draft are much better than a few from the target's weights; one without attention gets it."""
    from edgespec.distill import Settings, distill

    work = made[0].with_name("whole.work")
    few = Settings(layers=1, width=64, head_size=120, tokens=30000, train_tokens=2048, learning_rate=1e-5)
    anew = distill(str(llama), tmp_path / "anew", replace(few, attention=False), work=work)
    further = distill(str(llama), tmp_path / "further", replace(few, start=made[0]), work=work)
    again = distill(str(llama), tmp_path / "again", replace(few, start=tmp_path / "anew"), work=work)
    reached = json.loads((made[0] / "training.json").read_text(encoding="utf-8"))[-1]
    assert abs(further.acceptance.score - reached["score"]) < 0.02
    assert anew.acceptance.score < reached["score"] - 0.05
    assert (anew.layers.attended, again.layers.attended) == (None, further.layers.attended)
    assert "went on from `whole`" in (tmp_path / "further" / "README.md").read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match="no distilled draft"):
        distill(str(llama), tmp_path / "no", replace(few, start=llama), work=work)


def test_the_time_left_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal, a line every half minute, reckoned from where this run took a step up."""
    from edgespec.cli import distill as command

    now = [100.0]
    monkeypatch.setattr(command.time, "monotonic", lambda: now[0])
    with command.DistillProgress() as progress:
        progress.step("training")
        for fraction in (0.5, 0.55, 0.6, 0.7):
            progress.advance(fraction)
            now[0] += 20
    lines = capsys.readouterr().err.splitlines()
    # From 0.5 to 0.6 in 40 s: the other 0.4 take 160 s.
    assert lines == ["training ...", "  training: 60%, about 3 min left"]


def test_the_last_point_of_the_curve_is_the_result(made: tuple[Path, Path, str, str]) -> None:
    """What the closing lines say is what the card's curve ends with."""
    _, killed, out, _ = made
    last = json.loads((killed / "training.json").read_text(encoding="utf-8"))[-1]
    assert "/".join(f"{value:.3f}" for value in last["greedy"]) in out
    assert f"| {last['tokens']:,} |" in (killed / "README.md").read_text(encoding="utf-8")
