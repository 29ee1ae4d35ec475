"""Streams that are closed or full, text that would control a terminal, and Ctrl-C before anything is loaded."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.cli import terminal as terminal_module
from edgespec.cli.errors import say
from tests.pseudo_terminal import Terminal
from tests.test_cli import expected
from tests.tiny import rewrite_manifest

posix = pytest.mark.skipif(sys.platform == "win32", reason="Windows has neither such shells nor pseudo-terminals")

EVIL = "\x1b]0;retitled\x07\x1b[2J\x9b31m\rover\nchecked    everything"
ROOT = Path(__file__).parent.parent


def shell(closed: str, *args: object) -> subprocess.CompletedProcess[str]:
    """The command with some of its streams closed before it began, as in `>&-`."""
    command = [sys.executable, "-W", "error", "-m", "edgespec", *map(str, args)]
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", *command]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=120, check=False)


@posix
@pytest.mark.parametrize("args", [["info"], ["--help"], ["plan", "--alpha", "0.8", "--cost-ratio", "0.1"]], ids=str)
def test_a_closed_stdout_is_one_line(args: list[str]) -> None:
    """What cannot be shown is not made: exit code 1 and why, or nothing where that cannot be said either."""
    done = shell(">&-", *args)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("edgespec: stdout is closed")
    assert done.stderr.count("\n") == 1
    quiet = shell(">&- 2>&- <&-", *args)
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (1, "", "")


@posix
def test_a_closed_stderr_is_not_missed(tiny_bundle: Path) -> None:
    """Answers come all the same, and mistakes have their exit code."""
    done = shell("2>&-", "run", tiny_bundle, "-p", "hello", "--max-new-tokens", 8)
    assert (done.returncode, done.stdout) == (0, expected(tiny_bundle, "hello", max_new_tokens=8).text() + "\n")
    assert shell("2>&-", "run", tiny_bundle, "--no-such-option").returncode == 2


@posix
def test_a_closed_stdin_ends_a_chat(tiny_bundle: Path) -> None:
    """As Ctrl-D does; a --prompt does not need it."""
    chat = shell("<&-", "run", tiny_bundle)
    assert (chat.returncode, chat.stdout) == (0, "")
    assert "/exit to leave" in chat.stderr
    assert "edgespec:" not in chat.stderr
    done = shell("<&-", "run", tiny_bundle, "-p", "hello", "--max-new-tokens", 8)
    assert (done.returncode, done.stdout) == (0, expected(tiny_bundle, "hello", max_new_tokens=8).text() + "\n")


@posix
def test_files_do_not_get_the_numbers_of_closed_streams() -> None:
    """What a native library writes to 1 or 2 must not end up in a file of ours."""
    code = (
        "import os, sys; from edgespec.cli.terminal import prepare_streams; prepare_streams()\n"
        "assert os.open(os.devnull, os.O_RDONLY) > 2"
    )
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device")
def test_a_full_disk_is_one_line() -> None:
    """The last flush fails: one line and exit code 1, nothing more at the interpreter's end."""
    command = [sys.executable, "-m", "edgespec", "info"]
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "edgespec: the system: No space left on device\n")


@pytest.fixture
def evil_bundle(tiny_pair: Path, tmp_path: Path) -> Path:
    """A bundle all of whose texts would control a terminal, the errors of its template included."""
    bundle = Path(shutil.copytree(tiny_pair, tmp_path / "evil"))
    template = f"{{{{ raise_exception({EVIL!r}) }}}}".encode()
    (bundle / "chat_template.jinja").write_bytes(template)
    manifest = json.loads((bundle / "edgespec.json").read_text(encoding="utf-8"))
    for role in ("target", "draft"):
        manifest[role] |= {"source": EVIL, "licence": EVIL}
    files = manifest["files"] | {
        "chat_template.jinja": {"size": len(template), "sha256": hashlib.sha256(template).hexdigest()}
    }
    check = {EVIL: EVIL, "target": {"mean_tv": EVIL, "top1": 0.5, EVIL: 1}, "draft_unfused": EVIL}
    texts = {"name": EVIL, "created_by": EVIL, "check": check}
    rewrite_manifest(bundle, target=manifest["target"], draft=manifest["draft"], files=files, **texts)
    return bundle


@posix
@pytest.mark.parametrize(
    "args", [["info"], ["info", "--json"], ["run", "-p", "x"], ["run"], ["--debug", "run", "-p", "x"]], ids=str
)
def test_bundles_do_not_control_the_terminal(evil_bundle: Path, tmp_path: Path, args: list[str]) -> None:
    """No name, licence, figure or message of a bundle brings a control character to a terminal, or its own line."""
    at = args.index("info" if "info" in args else "run") + 1
    with Terminal(*args[:at], evil_bundle, *args[at:], cache=tmp_path) as terminal:
        if args == ["run"]:
            terminal.wait_for_prompt()
            terminal.type("hello\r")
            terminal.wait_for("the question was taken back")
            terminal.wait_for_prompt()
            terminal.type("\x04")
        terminal.end()
    assert "retitled" in terminal.transcript
    for sequence in ("\x1b]0", "\x07", "\x1b[2J", "\x9b", "\rover"):
        assert sequence not in terminal.transcript
    if "--debug" not in args:
        assert "\nchecked    everything" not in terminal.transcript


def test_errors_are_clean_wherever_they_go(capsys: pytest.CaptureFixture[str]) -> None:
    """A log is shown on a terminal sooner or later."""
    say(EVIL)
    assert capsys.readouterr().err == "edgespec: ]0;retitled[2J31m over checked everything\n"


def test_json_is_the_same_document_without_controls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls are escaped as JSON allows, other letters stay, and what is read is what was written."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", out)
    terminal_module.write_json({"text": EVIL + "é\x85"})
    out.flush()
    text = out.buffer.getvalue().decode()  # type: ignore[attr-defined]
    assert json.loads(text) == {"text": EVIL + "é\x85"}
    assert "é" in text
    assert not [c for c in text if c != "\n" and (c < " " or "\x7f" <= c < "\xa0")]
