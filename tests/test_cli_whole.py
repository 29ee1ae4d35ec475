"""The command line as a whole: `info`, help, errors, signals, and real processes."""

from __future__ import annotations

import importlib.metadata
import io
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec import ort
from edgespec.bundle import cache_dir
from edgespec.cli import terminal
from edgespec.cli.errors import one_line
from edgespec.cli.interrupt import stop_on_interrupt
from tests.test_cli import cli, error_line, expected
from tests.tiny import make_tiny_bundle, rewrite_manifest


def test_info_shows_versions_and_the_bundle(tiny_pair: Path) -> None:
    """`info --json` has versions, providers, cores and the manifest as it is written."""
    document = json.loads(cli("info", tiny_pair, "--json").stdout)
    assert document["versions"]["edgespec"] == edgespec.__version__
    assert document["versions"]["onnxruntime"]
    assert document["providers"] == ort.available_providers()
    assert document["cpu_cores"] >= 1
    assert document["bundle"]["path"] == str(tiny_pair)
    assert document["bundle"]["manifest"] == json.loads((tiny_pair / "edgespec.json").read_text(encoding="utf-8"))
    text = cli("info", tiny_pair).stdout
    assert "CPUExecutionProvider" in text
    assert "row invariance >=2" in text


def test_info_shows_what_the_export_measured(tiny_bundle: Path, tmp_path: Path) -> None:
    """The figures that people read, in few short lines; all of them are in the JSON."""
    bundle = Path(shutil.copytree(tiny_bundle, tmp_path / "copy"))
    figures = {"mean_tv": 0.0523270, "max_tv": 0.16, "top1": 0.92381, "perplexity": 18.848, "rows": 60}
    check = {"target": figures | {"original_perplexity": 18.321}, "target_probe": {"rows": [[[30, 0.04]] * 500]}}
    check |= {"draft": {"top1": "x", "mean_tv": float("nan"), "perplexity": 10**400}, "draft_unfused": "no attention"}
    rewrite_manifest(bundle, check=check | {"pair_overlap": 0.62107, "target_steps": {"ms": {"1": 9.0}}})
    assert cli("info", bundle).stdout.splitlines()[-3:] == [
        "checked    target: total variation to the original 0.052 on average, 0.16 at most, same first choice 92.4%, "
        "perplexity 18.85, of the original 18.32",
        "checked    draft: not fused: no attention",
        "checked    pair: they agree on 62.1% of the probability",
    ]
    assert json.loads(cli("info", bundle, "--json").stdout)["bundle"]["manifest"]["check"]["target_probe"]
    rewrite_manifest(bundle, check={"target": 1, "draft": [], "pair_overlap": "much", "target_unfused": 2})
    assert cli("info", bundle).stdout.splitlines()[-1] == "draft      none"


def test_info_without_a_bundle(tiny_bundle: Path, empty_cache: Path) -> None:
    """Without BUNDLE `info` shows the default one if it is there, and null if it is not."""
    assert json.loads(cli("info", "--json").stdout)["bundle"] is None
    assert "none yet" in cli("info").stdout
    shutil.copytree(tiny_bundle, empty_cache)
    assert json.loads(cli("info", "--json").stdout)["bundle"]["path"] == str(empty_cache)


def test_info_tells_what_is_wrong_with_onnxruntime(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With both onnxruntime packages `info` still works and shows the problem; `run` ends with it."""
    real = importlib.metadata.version

    def version(name: str) -> str:
        return "1.32.0" if name in ("onnxruntime", "onnxruntime-gpu") else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    document = json.loads(cli("info", "--json").stdout)
    assert document["providers"] == []
    assert "both installed" in document["problem"]


def test_both_onnxruntime_packages_end_a_run(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`run` with both onnxruntime packages installed is one line with the remedy."""
    monkeypatch.setattr(ort, "_is_installed", lambda name: True)
    assert "pip uninstall onnxruntime" in error_line(cli("run", tiny_bundle, "-p", "x"), 1)


def test_help_version_and_unknown_command() -> None:
    """The group itself: help without arguments, the version, a line for a command that is not there."""
    assert "Commands:" in cli().stdout
    assert cli("--version").stdout == f"edgespec {edgespec.__version__}\n"
    assert "No such command 'runn'" in error_line(cli("runn"), 2)
    for command in ("run", "info"):
        assert "Usage: edgespec" in cli(command, "--help").stdout


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    """With --debug the traceback comes before the message, and the exit code is the same."""
    result = cli("--debug", "info", tmp_path / "absent")
    lines = result.stderr.splitlines()
    assert (result.exit_code, lines[0]) == (1, "Traceback (most recent call last):")
    assert lines[-1].startswith("edgespec.errors.BundleError: ")
    assert "is not a folder" in error_line(cli("info", tmp_path / "absent"), 1)


def test_a_cache_folder_of_ones_own_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the cache folder cannot be, and a variable names it, the message says so; elsewhere it does not."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "file"))
    inside = NotADirectoryError(20, "Not a directory", str(tmp_path / "file" / "bundles"))
    assert one_line(inside) == f"{inside.filename}: Not a directory; the variable EDGESPEC_CACHE names the cache folder"
    assert one_line(FileNotFoundError(2, "No such file", str(tmp_path))) == f"{tmp_path}: No such file"
    assert one_line(OSError(28, "Disk full")) == "the system: Disk full"
    monkeypatch.setenv("EDGESPEC_CACHE", "")
    assert "EDGESPEC_CACHE" not in one_line(NotADirectoryError(20, "Not a directory", str(cache_dir() / "bundles")))


def test_a_bug_is_told_as_one(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception that is nobody's message is called a bug, in one line."""
    monkeypatch.setattr(edgespec, "load", lambda *_, **__: 1 // 0)
    assert "this is a bug: ZeroDivisionError" in error_line(cli("run", tiny_bundle, "-p", "x"), 1)


def test_interrupt_before_the_answer_is_quiet(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while loading ends the command with 130 and no message."""

    def load(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(edgespec, "load", load)
    result = cli("run", tiny_bundle, "-p", "x")
    assert (result.exit_code, result.output.strip()) == (130, "")


@pytest.mark.parametrize("package", ["numpy", "click", "edgespec.cli", "edgespec.errors"])
@pytest.mark.parametrize("start", ["runpy.run_module('edgespec', run_name='__main__')", "import edgespec.__main__"])
def test_an_interrupted_import_ends_with_130(package: str, start: str) -> None:
    """Ctrl-C in the first moments, by `python -m` and by the command: nothing is imported before somebody listens."""
    code = f"""
import importlib.abc, runpy, sys
class Interrupting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {package!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
{start}
"""
    where = Path(edgespec.__file__).parent.parent
    result = subprocess.run([sys.executable, "-c", code], cwd=where, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_interrupt_cancels_first_and_raises_the_second_time() -> None:
    """The first Ctrl-C calls cancel; a second one is Python's own again; afterwards all is as before."""
    before, calls = signal.getsignal(signal.SIGINT), []
    with pytest.raises(KeyboardInterrupt), stop_on_interrupt(lambda: calls.append(1)):
        signal.raise_signal(signal.SIGINT)
        assert calls == [1]
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_interrupted_answer_ends_with_130(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the one answer of a prompt shows what there is of it, and says by the exit code that it was cut."""
    bundle = make_tiny_bundle(tmp_path / "b", context_length=4096, eos_bonus=-1000)
    written: list[str] = []

    def write(text: str) -> None:
        written.append(text)
        if len(written) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(terminal, "write", write)
    result = cli("run", bundle, "-p", "x", "--drafter", "none", "--max-new-tokens", 4000)
    assert result.exit_code == 130
    assert len(written) <= 5
    assert result.stderr.endswith(", stopped\n")


def test_a_terminal_gets_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """What moves the cursor or retitles the window is taken out of an answer for a terminal, and only there."""
    for is_terminal, expected_text in ((True, "a[31mb\n\tc"), (False, "a\x1b[31mb\x07\n\tc\x9b")):
        out = io.StringIO()
        monkeypatch.setattr(out, "isatty", lambda is_terminal=is_terminal: is_terminal)
        monkeypatch.setattr(sys, "stdout", out)
        terminal.write("a\x1b[31mb\x07\n\tc\x9b")
        assert out.getvalue() == expected_text


def process(*args: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "edgespec", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=120, **options)


def test_an_open_stdin_does_not_hold_the_answer(tiny_bundle: Path) -> None:
    """A program that starts us with a pipe and never writes into it gets its answer, and we end."""
    code = (
        "import sys\nfrom edgespec.cli import documents, main\n"
        "documents._PATIENCE = documents._LONG_PATIENCE = 0.1\nmain(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, "run", str(tiny_bundle), "-p", "hello"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as child:
        assert child.wait(60) == 0
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.read() == expected(tiny_bundle, "hello").text() + "\n"
        assert "going on without it" in child.stderr.read()


def test_as_a_process(tiny_bundle: Path) -> None:
    """The real thing: `python -m edgespec` answers, and fails, with the right streams and codes."""
    done = process("run", tiny_bundle, "-p", "hello", "--max-new-tokens", 8)
    assert (done.returncode, done.stdout) == (0, expected(tiny_bundle, "hello", max_new_tokens=8).text() + "\n")
    failed = process("run", tiny_bundle / "absent", input="x")
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr.count("\n") == 1


def test_help_and_run_import_nothing_heavy(tiny_bundle: Path) -> None:
    """Neither help nor an answer loads what only an export needs, and help does not even load onnxruntime."""
    code = (
        "import sys\nfrom edgespec.cli import main\ntry: main({args!r})\nexcept SystemExit: pass\n"
        "names = ('torch', 'transformers', 'optimum', 'onnx', 'onnx_ir', 'onnxruntime', 'edgespec.export')\n"
        "print([n for n in names if n in sys.modules])"
    )

    def loaded(*args: str) -> str:
        script = code.format(args=list(args))
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
        return done.stdout.splitlines()[-1]

    assert loaded("--help") == "[]"
    assert loaded("run", str(tiny_bundle), "-p", "x", "--max-new-tokens", "2") == "['onnxruntime']"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows reports a closed pipe in another way")
def test_closed_pipe_is_quiet(tmp_path: Path) -> None:
    """A reader that goes away ends the command without a word."""
    bundle = make_tiny_bundle(tmp_path / "b", context_length=4096, eos_bonus=-1000)
    command = [sys.executable, "-m", "edgespec", "run", str(bundle), "-p", "x", "--max-new-tokens", "4000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.read(1)
        child.stdout.close()
        assert child.stderr.read() == b""
    assert child.returncode == 1
