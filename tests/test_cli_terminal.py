"""The chat on a real pseudo-terminal: by keyboard, with Markdown, tints, history; and where no colours are wanted."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

import edgespec
from edgespec.cli import lines
from edgespec.cli import terminal as terminal_module
from tests.pseudo_terminal import Terminal
from tests.test_cli import expected
from tests.tiny import make_tiny_bundle

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals in Python")

ESCAPE = "\x1b"


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose answers go on until they are stopped."""
    return make_tiny_bundle(tmp_path_factory.mktemp("endless"), context_length=30000, eos_bonus=-1000)


def test_a_chat_by_keyboard(endless: Path, tmp_path: Path) -> None:
    """Banner, answer, dimmed figures, Ctrl-C in an answer, help, leaving; what is typed meanwhile is not echoed."""
    with Terminal("run", endless, "--max-new-tokens", 25000, "--drafter", "none", cache=tmp_path) as terminal:
        terminal.wait_for("/help for commands")
        terminal.wait_for_prompt()
        terminal.type("hello\r")
        terminal.wait_for("hello")
        time.sleep(0.3)
        terminal.type("/he")
        time.sleep(0.3)
        os.killpg(terminal.child.pid, signal.SIGINT)
        answer = terminal.wait_for("tokens per target pass")
        assert "\x1b[2m" in answer
        assert "/he" not in answer
        terminal.wait_for("stopped")
        terminal.type("lp\r")
        terminal.wait_for("Ctrl-C stops an answer")
        terminal.type("/exit\r")
        assert terminal.end() == 0


def test_pasted_lines_history_and_alt_enter(tiny_bundle: Path, tmp_path: Path) -> None:
    """Pasted lines are one question, as are lines parted by Alt-Enter; the arrow brings it back, tomorrow as well."""
    saved = tmp_path / "chat.json"
    with Terminal("run", tiny_bundle, "--max-new-tokens", 5, cache=tmp_path / "cache") as terminal:
        terminal.wait_for_prompt()
        terminal.type("\x1b[200~two\rlines\x1b[201~")
        terminal.type("\r")
        terminal.wait_for("per target pass")
        terminal.wait_for_prompt()
        terminal.type("also\x1b\rtwo\r")
        terminal.wait_for("per target pass")
        terminal.type(f"/save {saved}\r")
        terminal.wait_for("saved")
        terminal.wait_for_prompt()
        terminal.type("\x04")
        assert terminal.end() == 0
    with edgespec.load(tiny_bundle) as engine:
        messages = edgespec.Conversation.load(saved, engine).messages
    assert [m["content"] for m in messages if m["role"] == "user"] == ["two\nlines", "also\ntwo"]
    with Terminal("run", tiny_bundle, "--max-new-tokens", 5, cache=tmp_path / "cache") as terminal:
        terminal.wait_for_prompt()
        terminal.type("\x1b[A\x1b[A")  # the command is the last, the question the one before
        terminal.wait_for("also")
        terminal.type("\x03")
        terminal.wait_for("Ctrl-C again leaves")
        terminal.wait_for_prompt()
        terminal.type("/sy\t")
        terminal.wait_for("/system")
        terminal.type("\r")
        terminal.wait_for("system prompt: the default")
    history = tmp_path / "cache" / "chat_history"
    assert history.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(("key", "code"), [("\x04", 0), ("\x03", 130)], ids=["Ctrl-D", "Ctrl-C"])
def test_leaving_at_the_prompt(tiny_bundle: Path, tmp_path: Path, key: str, code: int) -> None:
    """The end of input leaves well, a second Ctrl-C leaves with its own code, and neither shows a traceback."""
    with Terminal("run", tiny_bundle, cache=tmp_path) as terminal:
        terminal.wait_for_prompt()
        terminal.type(key)
        if code:
            terminal.wait_for("Ctrl-C again leaves")
            terminal.wait_for_prompt()
            terminal.type(key)
        assert terminal.end() == code
        assert "Traceback" not in terminal.transcript


def test_interrupt_by_a_signal_at_the_prompt(tiny_bundle: Path, tmp_path: Path) -> None:
    """Ctrl-C that comes as a signal, from `kill` or another program, is Ctrl-C."""
    with Terminal("run", tiny_bundle, cache=tmp_path) as terminal:
        terminal.wait_for_prompt()
        terminal.interrupt(lambda: "Ctrl-C again leaves" in terminal.seen)
        terminal.interrupt(lambda: terminal.child.poll() is not None)
        assert terminal.end() == 130
        assert "Traceback" not in terminal.transcript


def test_a_dumb_terminal_gets_no_sequences(tiny_bundle: Path, tmp_path: Path) -> None:
    """Where the terminal can only print, nothing but text comes, and lines are read all the same."""
    with Terminal("run", tiny_bundle, "--max-new-tokens", 9, cache=tmp_path, term="dumb") as terminal:
        terminal.wait_for("> ")
        terminal.type("hello\n")
        terminal.wait_for(expected(tiny_bundle, "hello", max_new_tokens=9).text())
        terminal.wait_for("per target pass")
        terminal.type("/exit\n")
        assert terminal.end() == 0
        assert ESCAPE not in terminal.transcript


def test_answers_go_where_stdout_goes(tiny_bundle: Path, tmp_path: Path) -> None:
    """With stdout in a file the prompt and the figures stay on the terminal; the file has the answers alone."""
    out = tmp_path / "out"
    with Terminal("run", tiny_bundle, "--max-new-tokens", 9, cache=tmp_path, out=out) as terminal:
        terminal.wait_for("> ")
        terminal.type("hello\n")
        terminal.wait_for("per target pass")
        terminal.type("\x04")
        assert terminal.end() == 0
    assert out.read_text(encoding="utf-8") == expected(tiny_bundle, "hello", max_new_tokens=9).text() + "\n"


def test_drafts_are_tinted(tmp_path: Path) -> None:
    """--show-drafts colours what was drafted, which is as much as the figures say, and changes no text."""
    bundle = make_tiny_bundle(tmp_path / "b", draft=True, eos_bonus=-1000)
    args = ("run", bundle, "-p", "hello", "--max-new-tokens", 30)
    with Terminal(*args, "--show-drafts", cache=tmp_path, term="xterm-256color") as terminal:
        assert terminal.end() == 0
    text = terminal.transcript.replace("\r\n", "\n")
    assert expected(bundle, "hello", max_new_tokens=30).text() + "\n" in re.sub(r"\x1b\[\d+m", "", text)
    num_tinted = sum(map(len, re.findall(r"\x1b\[36m(.+?)\x1b\[39m", text)))
    percentage, num_drafted = map(int, re.findall(r"(\d+)% of (\d+) drafted tokens", text)[0])
    assert percentage == round(100 * num_tinted / num_drafted) > 0


def test_a_long_prompt_shows_how_far_it_is_read(endless: Path, tmp_path: Path) -> None:
    """While a document is read a line says how much of it has been; it is gone when the answer comes."""
    (tmp_path / "notes.txt").write_text("x" * 3000, encoding="utf-8")
    args = ("run", endless, "-p", "Why?", "--file", tmp_path / "notes.txt", "--max-new-tokens", 5)
    with Terminal(*args, cache=tmp_path) as terminal:
        assert terminal.end() == 0
    found = re.search(r"reading the prompt: \d+ of 30\d\d tokens(.*)", terminal.transcript, re.DOTALL)
    assert found
    assert "\x1b[2K" in found[1]  # its line is erased


@pytest.mark.parametrize("term", ["xterm-256color", "dumb"])
def test_markdown_is_rendered_where_it_can_be(tmp_path: Path, term: str) -> None:
    """A regular expression makes the tiny model write Markdown: stars become bold, or stay what they are."""
    pytest.importorskip("llguidance")
    bundle = make_tiny_bundle(tmp_path / "b")
    args = ("run", bundle, "-p", "x", "--regex", r"\*\*bold\*\* word\n\n- item\n")
    source = "**bold** word\r\n\r\n- item\r\n"
    with Terminal(*args, cache=tmp_path, term=term) as terminal:
        assert terminal.end() == 0
    if term == "dumb":
        assert terminal.transcript.startswith(source)
    else:
        assert "\x1b[1mbold\x1b[0m word" in terminal.transcript
        assert "• " in terminal.transcript
        assert "**" not in terminal.transcript
    with Terminal(*args, "--plain", cache=tmp_path, term=term) as terminal:
        assert terminal.end() == 0
    assert source in terminal.transcript


class Stream(io.StringIO):
    """A stream that is a terminal, or is not."""

    def __init__(self, is_terminal: bool = True) -> None:
        super().__init__()
        self.isatty = lambda: is_terminal  # type: ignore[method-assign]


def test_where_sequences_may_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """To terminals that understand them: no pipes, even if colours are forced, no dumb ones, no old Windows console."""
    monkeypatch.setenv("TERM", "xterm")
    assert terminal_module.is_capable(Stream())
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert not terminal_module.is_capable(Stream(is_terminal=False))
    monkeypatch.setenv("TERM", "dumb")
    assert not terminal_module.is_capable(Stream())
    monkeypatch.setenv("TERM", "xterm")
    console = terminal_module.console_on(sys.stderr)
    console.legacy_windows = True
    monkeypatch.setattr(terminal_module, "console_on", lambda stream: console)
    assert not terminal_module.is_capable(Stream())


def test_tint_without_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who wants no colours gets a line under what was drafted."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert terminal_module.tint("a") == "\x1b[36ma\x1b[39m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert terminal_module.tint("a") == "\x1b[4ma\x1b[24m"


def test_history_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a history that is too long the newer half stays, beginning with a whole entry."""
    path = tmp_path / "folder" / "chat_history"
    path.parent.mkdir()
    path.write_text("".join(f"\n# 2026-01-0{i}\n+question {i}\n" for i in range(1, 9)), encoding="utf-8")
    monkeypatch.setattr(lines, "_MAX_HISTORY", path.stat().st_size)
    assert lines._own_file(path) == str(path)
    assert path.read_text(encoding="utf-8").count("+question") == 8
    monkeypatch.setattr(lines, "_MAX_HISTORY", 100)
    lines._own_file(path)
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# 2026-01-0")
    assert 1 <= text.count("+question") <= 4
    assert text.endswith("+question 8\n")


def test_a_history_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chat goes on without one, and says so once."""
    notes: list[str] = []
    monkeypatch.setattr(lines.terminal, "note", notes.append)
    monkeypatch.setattr(lines.terminal, "is_capable", lambda stream: True)
    monkeypatch.setattr(sys, "stdin", Stream())
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert callable(lines.reader(tmp_path / "file" / "chat_history", []))
    assert len(notes) == 1
    assert "no history of questions" in notes[0]
