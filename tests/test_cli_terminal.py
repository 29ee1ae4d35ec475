"""The chat on a real pseudo-terminal: by keyboard, with Markdown, tints, history; and where no colours are wanted."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

import edgespec
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
