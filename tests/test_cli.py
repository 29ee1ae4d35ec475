"""The command line on a tiny bundle: what it prints where, and how it ends."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import edgespec
from edgespec.cli import documents, main
from edgespec.errors import ExportError, MissingExtraError
from tests.tiny import make_tiny_bundle, rewrite_manifest


def cli(*args: object, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(main, [str(a) for a in args], input=stdin)


def words(text: str) -> list[str]:
    return text.split()


def error_line(result: Result, code: int) -> str:
    """The one line of a failed command, with nothing on stdout and no traceback."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("edgespec: ")
    return line


def expected(bundle: Path, prompt: str, **params: Any) -> edgespec.TextStream:
    """The finished answer of the library, which the command must print."""
    with edgespec.load(bundle) as engine:
        stream = engine.chat([{"role": "user", "content": prompt}], edgespec.SamplingParams(**params))
        stream.text()
        return stream


def answer_to(bundle: Path, prompt: str) -> str:
    """What is printed where this is asked."""
    return expected(bundle, prompt).text() + "\n"


def test_prompt_prints_the_answer_and_then_the_figures(tiny_bundle: Path) -> None:
    """The answer, one line end behind it, is all of stdout; the measured figures are on stderr."""
    result = cli("run", tiny_bundle, "--prompt", "hello", "--max-new-tokens", 20)
    assert result.exit_code == 0
    assert result.stdout == expected(tiny_bundle, "hello", max_new_tokens=20).text() + "\n"
    assert "tokens per target pass" in result.stderr
    assert "edgespec:" not in result.stderr


def test_piped_stdin_is_the_prompt(tiny_bundle: Path) -> None:
    """Text piped in, with or without a byte order mark and a line end, is answered like a --prompt."""
    plain = cli("run", tiny_bundle, "-p", "héllo")
    assert cli("run", tiny_bundle, stdin="héllo\n").stdout == plain.stdout
    assert cli("run", tiny_bundle, stdin="\ufeffhéllo\r\n").stdout == plain.stdout
    assert cli("run", tiny_bundle, stdin="other").stdout != plain.stdout


def test_piped_stdin_is_a_document_beside_the_prompt(tiny_bundle: Path) -> None:
    """With a --prompt, what is piped in stands before it as a document; nothing is no document."""
    text = "<document>\nSome notes.\n</document>\n\nSummarise"
    assert cli("run", tiny_bundle, "-p", "Summarise", stdin="Some notes.\n").stdout == answer_to(tiny_bundle, text)
    assert cli("run", tiny_bundle, "-p", "Summarise", stdin="").stdout == answer_to(tiny_bundle, "Summarise")


def test_endless_input_is_refused(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Piped input that does not end where any context does is not read on; one line, a usage error."""
    monkeypatch.setattr(documents, "_MAX_SIZE", 1 << 20)
    result = CliRunner().invoke(main, ["run", str(tiny_bundle)], input="y\n" * (1 << 20))
    assert result.exit_code == 2
    assert "stdin is larger than 1 MiB: give a part of it" in result.stderr


def test_files_are_documents(tiny_bundle: Path, tmp_path: Path) -> None:
    """Each --file stands before the prompt with its name; piped text comes last and has none."""
    (tmp_path / "a.txt").write_text("A\n", encoding="utf-8-sig")
    (tmp_path / "b.md").write_text("B", encoding="utf-8")
    files = ("--file", tmp_path / "a.txt", "-f", tmp_path / "b.md")
    first = '<document name="a.txt">\nA\n</document>\n\n<document name="b.md">\nB\n</document>\n\n'
    assert cli("run", tiny_bundle, "-p", "Why?", *files).stdout == answer_to(tiny_bundle, first + "Why?")
    piped = cli("run", tiny_bundle, "-p", "Why?", *files, stdin="C").stdout
    assert piped == answer_to(tiny_bundle, first + "<document>\nC\n</document>\n\nWhy?")
    assert cli("run", tiny_bundle, *files, stdin="Why?").stdout == answer_to(tiny_bundle, first + "Why?")


def test_files_that_are_no_documents(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file without text is a mistake, and one without end, which has no size, is not read to it."""
    (tmp_path / "blank").write_text(" \n", encoding="utf-8")
    for name in (tmp_path / "blank", os.devnull):
        assert f"{name} is empty" in error_line(cli("run", tiny_bundle, "-p", "x", "--file", name), 2)
    monkeypatch.setattr(documents, "_MAX_SIZE", 1 << 10)
    (tmp_path / "long").write_text("x" * 1025, encoding="utf-8")
    endless = ["/dev/zero"] if Path("/dev/zero").exists() else []
    for name in (tmp_path / "long", *endless):
        assert f"{name} is larger than" in error_line(cli("run", tiny_bundle, "-p", "x", "--file", name), 2)


@pytest.mark.parametrize("is_needed", [True, False])
def test_a_pipe_into_which_nobody_writes(is_needed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where stdin is open and nothing comes, a line says so; beside a prompt it is not waited for any longer."""
    notes: list[str] = []
    ours, theirs = os.pipe()
    monkeypatch.setattr(documents, "_PATIENCE", 0.01)
    monkeypatch.setattr(documents, "_LONG_PATIENCE", 0.01)
    monkeypatch.setattr(documents.terminal, "note", notes.append)
    monkeypatch.setattr(sys, "stdin", os.fdopen(ours, encoding="utf-8"))
    late = threading.Timer(0.5, lambda: (os.write(theirs, b"late"), os.close(theirs)))
    late.start()
    text = documents.read_stdin(is_needed=is_needed)
    assert text == ("late" if is_needed else None)
    assert "waiting for text on stdin" in notes[0]
    assert notes[1:] == ([] if is_needed else ["nothing came on stdin: going on without it"])
    sys.stdin.close()  # while the reader may still wait: nothing of it may come to light, nor a number be read again
    late.join()
    for thread in threading.enumerate():
        if thread.name == "edgespec-stdin":
            thread.join()


def test_pieces_tell_what_was_drafted(tiny_pair: Path, tmp_path: Path) -> None:
    """With --json --show-drafts the pieces are listed, and are the text; without a terminal there are no tints."""
    bundle = make_tiny_bundle(tmp_path / "b", draft=True, eos_bonus=-1000)
    options = ("--json", "--show-drafts", "--max-new-tokens", 40)
    document = json.loads(cli("run", bundle, "-p", "hello", *options).stdout)
    assert "".join(piece["text"] for piece in document["pieces"]) == document["text"]
    num_drafted = sum(len(piece["text"]) for piece in document["pieces"] if piece["is_drafted"])
    assert num_drafted == document["stats"]["accepted"] > 0
    plain = cli("run", tiny_pair, "-p", "hello", "--show-drafts")
    assert plain.stdout == answer_to(tiny_pair, "hello")
    assert "--show-drafts cannot tint anything there" in plain.stderr


def test_time_and_overflow_reach_the_engine(tmp_path: Path) -> None:
    """--max-time ends an answer, and --overflow refuse a prompt whose answer might not fit."""
    bundle = make_tiny_bundle(tmp_path / "b", context_length=4096, eos_bonus=-1000)
    options = ("--max-new-tokens", 4000, "--json")
    document = json.loads(cli("run", bundle, "-p", "x", "--max-time", 0.01, *options).stdout)
    assert document["finish_reason"] == "time"
    line = error_line(cli("run", bundle, "-p", "x" * 200, "--overflow", "refuse", *options), 1)
    assert "of 4000 new tokens" in line


def test_json_is_one_document_with_the_answer(tmp_path: Path) -> None:
    """--json prints the text, its tokens, how it ended and the figures, and nothing else at all."""
    bundle = make_tiny_bundle(tmp_path / "b", draft=True, eos_bonus=-1000)
    result = cli("run", bundle, "-p", "hello", "--json", "--max-new-tokens", 40, "--drafter", "model")
    assert (result.exit_code, result.stderr) == (0, "")
    document = json.loads(result.stdout)
    stream = expected(bundle, "hello", max_new_tokens=40)
    assert list(document) == ["text", "token_ids", "finish_reason", "stats"]
    assert document["text"] == stream.text()
    assert document["token_ids"] == stream.token_ids
    assert document["finish_reason"] == stream.finish_reason
    wanted = [
        "prompt_tokens",
        "new_tokens",
        "target_passes",
        "drafted",
        "accepted",
        "prefill_s",
        "decode_s",
        "tokens_per_s",
    ]
    assert set(wanted) <= document["stats"].keys()
    assert document["stats"]["new_tokens"] == len(stream.token_ids)
    assert document["stats"]["drafted"] > 0


def test_options_reach_the_engine(tiny_pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option ends up in the field of the same name, and what is not given keeps its default."""
    seen: dict[str, Any] = {}

    class Stop(edgespec.EdgespecError):
        pass

    def load(path: Path, **params: Any) -> Any:
        seen.update(path=path, **params)
        raise Stop("enough")

    monkeypatch.setattr(edgespec, "load", load)
    args = words("--provider cpu --threads 3 --spinning off --exact --drafter ngram --num-draft-tokens 7")
    assert "enough" in error_line(cli("run", tiny_pair, "-p", "x", *args), 1)
    assert seen["path"] == tiny_pair
    assert seen["spec"] == edgespec.SpecParams(drafter="ngram", num_draft_tokens=7)
    assert seen["runtime"] == edgespec.RuntimeParams(provider="cpu", threads=3, spinning="off", exact=True)
    cli("run", tiny_pair, "-p", "x")
    assert (seen["spec"], seen["runtime"]) == (edgespec.SpecParams(), edgespec.RuntimeParams())


def test_sampling_options_change_the_answer_as_in_the_library(tmp_path: Path) -> None:
    """Temperature, top-k, top-p, min-p, seed and stop give the answer that the library gives with them."""
    bundle = make_tiny_bundle(tmp_path / "b", eos_bonus=-1000)
    options = words("--temperature 40 --top-k 50 --top-p 0.9 --min-p 0.001 --seed 7 --max-new-tokens 30")
    params = {"temperature": 40, "top_k": 50, "top_p": 0.9, "min_p": 0.001, "seed": 7, "max_new_tokens": 30}
    text = expected(bundle, "x", **params).text()
    assert cli("run", bundle, "-p", "x", *options).stdout == text + "\n"
    stop = text[3:5]
    document = json.loads(cli("run", bundle, "-p", "x", *options, "--stop", stop, "--json").stdout)
    assert (document["finish_reason"], document["text"]) == ("stop", text[: text.index(stop)])


def test_system_prompt_is_put_before_the_prompt(tiny_bundle: Path) -> None:
    """--system adds a turn, so the prompt is longer by it."""

    def num_tokens(*args: str) -> int:
        result = cli("run", tiny_bundle, "-p", "x", "--json", "--max-new-tokens", 1, *args)
        return int(json.loads(result.stdout)["stats"]["prompt_tokens"])

    # One token per byte, and one for each of the two marks around the turn.
    assert num_tokens("--system", "brief") - num_tokens() == len("system\nbrief\n") + 2


BAD_OPTIONS = [
    (["--temperature", "-1"], "temperature is -1.0; it must be"),
    (["--top-p", "0"], "top_p is 0.0; it must be"),
    (["--top-k", "-2"], "top_k is -2; it must be"),
    (["--min-p", "2"], "min_p is 2.0; it must be"),
    (["--seed", "-1"], "seed is -1; it must be"),
    (["--max-new-tokens", "0"], "max_new_tokens is 0; it must be"),
    (["--stop", ""], "stop is"),
    (["--num-draft-tokens", "-1"], "num_draft_tokens is -1; it must be"),
    (["--threads", "0"], "threads is 0; it must be"),
    (["--threads", "many"], "'many' is not a valid integer"),
    (["--drafter", "magic"], "'magic' is not one of"),
    (["--drafter", "model"], "has no draft model"),
    (["--provider", "abacus"], "'abacus'"),
    (["--no-such-option"], "No such option"),
    (["--max-time", "0"], "max_time is 0.0; it must be"),
    (["--overflow", "burst"], "'burst' is not one of"),
    (["--file", "no-such-file"], "'no-such-file' does not exist"),
    (["extra"], "unexpected extra argument"),
]


@pytest.mark.parametrize(("options", "reason"), BAD_OPTIONS, ids=lambda v: " ".join(v) if isinstance(v, list) else "")
def test_bad_option_is_one_line_and_exit_code_2(tiny_bundle: Path, options: list[str], reason: str) -> None:
    """A value that cannot work is told in one line, and the exit code says that it is the call that is wrong."""
    assert reason in error_line(cli("run", tiny_bundle, "-p", "x", *options), 2)


def test_prompt_that_is_empty_or_not_text_is_refused(tiny_bundle: Path) -> None:
    """Nothing to answer, or bytes that are no text, is a mistake of the call."""
    assert "prompt is empty" in error_line(cli("run", tiny_bundle, stdin="\n"), 2)
    assert "prompt is empty" in error_line(cli("run", tiny_bundle, "-p", "  "), 2)
    assert "not UTF-8 text (byte 1)" in error_line(cli("run", tiny_bundle, stdin=b"a\xff"), 2)


@pytest.mark.parametrize("command", [["run", "-p", "x"], ["info"]])
def test_bad_bundle_is_one_line_and_exit_code_1(tiny_bundle: Path, tmp_path: Path, command: list[str]) -> None:
    """A bundle that is missing, foreign, of another version or tampered is told in one line."""
    name, *rest = command
    assert "is not a folder" in error_line(cli(name, tmp_path / "absent", *rest), 1)
    assert "has no edgespec.json" in error_line(cli(name, tmp_path, *rest), 1)
    bundle = Path(shutil.copytree(tiny_bundle, tmp_path / "copy"))
    rewrite_manifest(bundle, format_version=99)
    assert "format version 99" in error_line(cli(name, bundle, *rest), 1)
    rewrite_manifest(bundle, format_version=1)
    (bundle / "chat_template.jinja").write_text((bundle / "chat_template.jinja").read_text().replace("user", "loser"))
    graph = bundle / "target" / "model.onnx"
    graph.write_bytes(graph.read_bytes()[:-1] + b"!")
    assert "model.onnx was changed" in error_line(cli(name, bundle, *rest), 1)


def test_prompt_longer_than_the_context(tmp_path: Path) -> None:
    """A prompt that does not fit is told in one line."""
    bundle = make_tiny_bundle(tmp_path / "b", context_length=64)
    assert "64" in error_line(cli("run", bundle, "-p", "x" * 100), 1)


def test_bundle_without_template_continues_the_prompt(tiny_bundle: Path, tmp_path: Path) -> None:
    """A base model's bundle continues plain text, and says so; a system prompt has no place there."""
    bundle = Path(shutil.copytree(tiny_bundle, tmp_path / "copy"))
    rewrite_manifest(bundle, chat_template=None)
    result = cli("run", bundle, "-p", "hello", "--max-new-tokens", 5)
    with edgespec.load(bundle) as engine:
        text = engine.generate("hello", edgespec.SamplingParams(max_new_tokens=5)).text()
    assert result.stdout == text + "\n"
    assert "continued as plain text" in result.stderr
    assert "no place for --system" in error_line(cli("run", bundle, "-p", "x", "--system", "y"), 2)


def test_default_bundle_is_made_once(tiny_bundle: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without BUNDLE the default one is exported if it is not there, with its steps on stderr."""
    calls = []

    def export_bundle(source: str, out: Path, *, progress: Any) -> None:
        calls.append((source, out))
        progress.step("converting")
        progress.advance(0.5)
        progress.note("135 M parameters")
        progress.warn("not fused")
        print("noise from a library")  # noqa: T201
        shutil.copytree(tiny_bundle, out)

    monkeypatch.setattr("edgespec.export.export_bundle", export_bundle, raising=False)
    first, second = (cli("run", "-p", "hello", "--json") for _ in range(2))
    assert calls == [("smollm2-135m", empty_cache)]
    assert json.loads(first.stdout)["text"] == json.loads(second.stdout)["text"]
    for text in ("making the default bundle", "converting", "135 M parameters", "warning: not fused", "noise"):
        assert text in first.stderr
    assert second.stderr == ""


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("No module named 'torch'", name="torch"), MissingExtraError("x")]
)
def test_default_bundle_without_the_extra(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, error: ImportError
) -> None:
    """If the default bundle has to be made and can't, the last line says what to install."""

    def export_bundle(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("edgespec.export.export_bundle", export_bundle, raising=False)
    result = cli("run", "-p", "hello")
    assert (result.exit_code, result.stdout) == (1, "")
    wanted = "x" if isinstance(error, MissingExtraError) else "torch is needed to make it: run `pip install 'edgespec"
    assert wanted in result.stderr.splitlines()[-1]


def test_failed_default_export_is_one_line(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No network while the default bundle is made: the export's own line, and exit code 1."""

    def export_bundle(*_: object, **__: object) -> None:
        raise ExportError("the wheel cannot be fetched; connect to the network")

    monkeypatch.setattr("edgespec.export.export_bundle", export_bundle, raising=False)
    result = cli("run", "-p", "hello")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == "edgespec: the wheel cannot be fetched; connect to the network"
