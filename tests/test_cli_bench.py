"""`edgespec bench` on tiny bundles: tables, JSON, files, figures, other engines, and how it ends."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from edgespec.bench import peers
from edgespec.bench.journal import read_journal
from edgespec.cli import main

# Another engine: twice as many tokens as asked for, the first after a tenth of the time.
FAKE = """
import json, sys
print("loading, please wait")
for line in sys.stdin:
    job = json.loads(line)
    if "model" in job:
        found = {"modes": ["plain", "fast"], "version": job["model"]}
        if job["model"].endswith("broken"):
            found = {"error": "RuntimeError: no such model"}
    elif job["mode"] == "peak":
        found = {"peak_bytes": 7 << 20}
    elif job["mode"] == "fast" and job["temperature"] > 0:
        found = {"error": "RuntimeError: cannot sample"}
    else:
        seconds = 100.0 if job["mode"] == "plain" else 50.0
        found = {"token_ids": [1] * job["max_new_tokens"], "seconds": seconds, "first_token_s": seconds / 10}
    print(json.dumps(found), flush=True)
"""


def bench(*args: object) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, args)])


def error_line(result: Result, code: int) -> str:
    assert (result.exit_code, result.stdout) == (code, "")
    return result.stderr.splitlines()[-1]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Two families of two short prompts each."""
    folder = tmp_path / "prompts"
    folder.mkdir()
    texts = {"copy": ["abcabcabcabc", "xyzxyzxyz"], "talk": ["How are you?", "Where?"]}
    for family, lines in texts.items():
        items = [json.dumps({"id": f"{family}-{i}", "prompt": text}) for i, text in enumerate(lines)]
        (folder / f"{family}.jsonl").write_text("\n".join(items), encoding="utf-8")
    return folder


@pytest.fixture
def fake_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In the place of the script that runs other engines."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE, encoding="utf-8")
    monkeypatch.setattr(peers, "_WORKER", script)
    return tmp_path


def test_json(tiny_pair: Path, prompts: Path, tmp_path: Path) -> None:
    """One document: the speed-up of the default drafter by family, beside all that it depends on."""
    output = tmp_path / "run.jsonl"
    limits = ("--limit", 1, "--repetitions", 2, "--max-new-tokens", 16)
    result = bench(tiny_pair, "--prompts", prompts, *limits, "--against", "none,model", "--output", output, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["default"] == "chain"
    assert set(document["speedup_by_family"]) == {"copy", "talk"}
    assert all(speed > 0 for speed in document["speedup_by_family"].values())
    assert list(document["settings"]) == ["none", "none (as pair)", "chain", "model"]
    assert document["machine"]["versions"]["onnxruntime"]
    assert len(document["bundle"]["digest"]) == 64
    assert all(peak > 10 << 20 for peak in document["peak_bytes"].values())
    assert len(document["trials"]) == 4 * 2 * 2
    assert all(trial["equal"] is True for trial in document["trials"])
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    trials = [line for line in lines if line["kind"] == "trial"]
    assert [t["tokens_per_s"] for t in trials] == [t["tokens_per_s"] for t in document["trials"]]
    for key in ("machine", "bundle", "threads", "spinning", "temperature", "prompt_id", "equal", "first_token_s"):
        assert all(key in trial for trial in trials), key
    assert read_journal(output).memory == document["peak_bytes"]
    # Results are shown to others: of the places on this machine they have none.
    assert str(tiny_pair.parent) not in output.read_text(encoding="utf-8")


def test_tables(tiny_bundle: Path, prompts: Path, empty_cache: Path) -> None:
    """A table for each family, the summary last; the trials are kept in the cache; progress is on stderr."""
    result = bench(tiny_bundle, "--prompts", prompts, "--families", "talk", "--repetitions", 1, "--max-new-tokens", 8)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "talk, 2 prompts"
    assert lines[1].split()[:3] == ["setting", "tokens/s", "speed-up"]
    assert [line.split()[0] for line in lines[2:4]] == ["none", "ngram"]
    assert "2 of 2" in lines[3]
    assert "copy" not in result.stdout
    assert lines[-1].startswith("trials: ")
    (kept,) = (empty_cache.parent.parent / "bench").iterdir()
    assert lines[-1] == f"trials: {kept}"
    assert result.stderr.splitlines()[0] == "loading ..."


def test_sampled(tiny_bundle: Path, prompts: Path) -> None:
    """Sampled texts are not compared, and the file says so."""
    limits = ("--families", "copy", "--limit", 1, "--repetitions", 1, "--max-new-tokens", 8)
    sampling = ("--temperature", 60, "--top-p", 0.9, "--seed", 3)
    document = json.loads(bench(tiny_bundle, "--prompts", prompts, *limits, *sampling, "--json").stdout)
    assert {trial["equal"] for trial in document["trials"]} == {"not comparable"}
    assert (document["temperature"], document["top_p"]) == (60.0, 0.9)
    assert document["rows"][0]["comparable"] == 0


def test_search_and_figures(tiny_bundle: Path, prompts: Path, tmp_path: Path) -> None:
    """The best fixed length stands beside the controller; --plot draws everything."""
    pytest.importorskip("matplotlib")
    picture = tmp_path / "bench.svg"
    limits = ("--families", "copy", "--limit", 1, "--repetitions", 1, "--max-new-tokens", 12)
    result = bench(tiny_bundle, "--prompts", prompts, *limits, "--search", "--plot", picture)
    assert result.exit_code == 0, result.output
    assert "best fixed drafter and length in hindsight" in result.stdout
    assert "<svg" in picture.read_text(encoding="utf-8")


def test_without_matplotlib(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One line that names the extra, before anything is measured."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    line = error_line(bench(tiny_bundle, "--plot", tmp_path / "x.png"), 1)
    assert line == "edgespec: --plot needs matplotlib: run `pip install 'edgespec[plot]'`"


def test_another_engine(tiny_bundle: Path, prompts: Path, fake_engine: Path) -> None:
    """It takes its turns, its ways of decoding are rows, and it is compared with itself."""
    limits = ("--limit", 1, "--repetitions", 1, "--max-new-tokens", 11)
    peer = ("--peers", "onnxruntime-genai", "--peer-model", f"onnxruntime-genai={fake_engine}")
    result = bench(tiny_bundle, "--prompts", prompts, *limits, *peer, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    rows = {(row["setting"], row["family"]): row for row in document["rows"]}
    plain, fast = (rows[f"onnxruntime-genai {mode}", "copy"] for mode in ("plain", "fast"))
    assert (plain["tokens_per_s"], fast["tokens_per_s"]) == (pytest.approx(10 / 90), pytest.approx(10 / 45))
    assert (fast["equal"], fast["comparable"]) == (1, 1)
    over = document["over_peers"]
    assert over["onnxruntime-genai plain"]["copy"] == pytest.approx(2 * over["onnxruntime-genai fast"]["copy"])
    assert document["peers"]["onnxruntime-genai"]["version"] == str(fake_engine)
    assert document["peak_bytes"]["onnxruntime-genai"] == 7 << 20


def test_engines_that_cannot_be_run(tiny_bundle: Path, prompts: Path, fake_engine: Path) -> None:
    """Each is named in one line with the reason, and the rest is measured."""
    limits = ("--families", "copy", "--limit", 1, "--repetitions", 1, "--max-new-tokens", 8)
    models = ("--peers", "onnxruntime-genai,transformers", "--peer-model", f"onnxruntime-genai={fake_engine}/broken")
    result = bench(tiny_bundle, "--prompts", prompts, *limits, *models)
    assert result.exit_code == 0, result.output
    assert "left out: onnxruntime-genai: RuntimeError: no such model" in result.stdout
    assert "left out: transformers: name its model with --peer-model transformers=PATH" in result.stdout
    nowhere = ("--peers", "transformers", "--peer-model", "transformers=x", "--peer-python", fake_engine / "python")
    result = bench(tiny_bundle, "--prompts", prompts, *limits, *nowhere)
    assert f"left out: transformers: {fake_engine / 'python'} cannot be run" in result.stderr


def test_an_engine_that_fails_on_the_way(tiny_bundle: Path, prompts: Path, fake_engine: Path) -> None:
    """What it fails in is given up and named, and all the rest is measured."""
    limits = ("--limit", 2, "--repetitions", 1, "--max-new-tokens", 8, "--temperature", 0.7)
    peer = ("--peers", "onnxruntime-genai", "--peer-model", f"onnxruntime-genai={fake_engine}")
    result = bench(tiny_bundle, "--prompts", prompts, *limits, *peer, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["left_out"] == ["onnxruntime-genai fast: RuntimeError: cannot sample"]
    assert list(document["over_peers"]) == ["onnxruntime-genai plain"]
    assert len([t for t in document["trials"] if t["setting"] == "onnxruntime-genai plain"]) == 4


@pytest.mark.parametrize(
    ("name", "package"),
    [("onnxruntime-genai", "onnxruntime_genai"), ("openvino", "openvino_genai"), ("llama-cpp", "llama_cpp")],
)
def test_an_engine_that_is_not_installed(name: peers.PeerName, package: str) -> None:
    """The script that runs other engines says what is missing where."""
    if importlib.util.find_spec(package) is not None:
        pytest.skip("it is installed here")
    with pytest.raises(peers.PeerError, match=f"{name}: {package} is not installed in"):
        peers.Peer(name, sys.executable, Path("x"), None, None)


def test_mistakes(tiny_bundle: Path, prompts: Path, tmp_path: Path) -> None:
    """Wrong names, folders and numbers end with one line and a code that says whose mistake it was."""
    assert "'fast' is not one of none, ngram, model, chain" in error_line(bench(tiny_bundle, "--against", "fast"), 2)
    assert "no draft model" in error_line(bench(tiny_bundle, "--against", "model"), 2)
    assert "not a folder of prompts" in error_line(bench(tiny_bundle, "--prompts", tmp_path / "x"), 2)
    unknown = error_line(bench(tiny_bundle, "--prompts", prompts, "--families", "copy,law"), 2)
    assert "no family 'law'; it has copy, talk" in unknown
    assert "'vllm' is not one of" in error_line(bench(tiny_bundle, "--peers", "vllm"), 2)
    assert "is not ENGINE=PATH" in error_line(bench(tiny_bundle, "--peer-model", "x"), 2)
    given = error_line(bench(tiny_bundle, "--peer-model", "transformers=x"), 2)
    assert "which is not in --peers" in given
    assert "--against is empty" in error_line(bench(tiny_bundle, "--against", ""), 2)
    assert "0 is not in the range" in error_line(bench(tiny_bundle, "--limit", 0), 2)
    assert str(tmp_path) in error_line(bench(tmp_path), 1)
