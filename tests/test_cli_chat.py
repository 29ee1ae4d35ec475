"""The chat of `edgespec run`: turns, commands and Ctrl-C, in the process and on a pseudo-terminal."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import edgespec
from edgespec.chat import Conversation
from edgespec.cli.chat_loop import chat_loop
from edgespec.errors import ConfigError
from edgespec.params import SamplingParams
from tests.tiny import make_tiny_bundle, rewrite_manifest

PARAMS = SamplingParams(max_new_tokens=12)


class Lines:
    """Somebody who types these lines and then ends the input; a callable among them is called instead."""

    def __init__(self, *lines: str) -> None:
        self._lines = iter(lines)

    def __call__(self, prompt: str) -> str:
        assert prompt == "> "
        try:
            return next(self._lines)
        except StopIteration:
            raise EOFError from None


@pytest.fixture
def engine(tiny_bundle: Path) -> Iterator[edgespec.Engine]:
    with edgespec.load(tiny_bundle) as engine:
        yield engine


def test_history_is_kept_and_reset(engine: edgespec.Engine, capsys: pytest.CaptureFixture[str]) -> None:
    """Each question is answered with all that was said before it, until /reset."""
    chat = Conversation()
    assert chat_loop(engine, chat, PARAMS, Lines("one", "", "two")) == 0
    answers = capsys.readouterr().out
    assert [m["content"] for m in chat.turns[::2]] == ["one", "two"]
    by_hand = Conversation()
    for question in ("one", "two"):
        by_hand.ask(question)
        by_hand.answer(engine.chat(by_hand.messages(), PARAMS).text())
    assert chat == by_hand
    assert answers == "".join(m["content"] + "\n" for m in by_hand.turns[1::2]) + "\n"
    assert chat_loop(engine, chat, PARAMS, Lines("/reset", "one", "/exit", "never asked")) == 0
    assert chat.turns == by_hand.turns[:2]


def test_second_turn_reads_only_what_is_new(engine: edgespec.Engine, capsys: pytest.CaptureFixture[str]) -> None:
    """The cache goes on across turns, and /stats shows it."""
    chat_loop(engine, Conversation(), PARAMS, Lines("one", "/stats", "two", "/stats"))
    cached = [int(n) for n in re.findall(r"cached_tokens +(\d+)", capsys.readouterr().err)]
    assert cached[0] == 0
    assert cached[1] > len("user\none\n")


def test_commands(engine: edgespec.Engine, capsys: pytest.CaptureFixture[str]) -> None:
    """Help, system prompt, figures and a line for a command that is not there; none of it is asked of the model."""
    chat = Conversation()
    lines = ["/help", "/stats", "/system", "/system  Be brief. ", "/nonsense x", "hi", "/stats", "/exit"]
    chat_loop(engine, chat, PARAMS, Lines(*lines))
    err = capsys.readouterr().err
    for text in ("forget the conversation", "nothing has been answered", "the default of the template"):
        assert text in err
    for text in ("system prompt: Be brief.", "no command /nonsense", "target_passes", "whole chat: 1 answers"):
        assert text in err
    assert [m["content"] for m in chat.messages()[:2]] == ["Be brief.", "hi"]


def test_error_takes_the_question_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A question that does not fit the context is told in a line, and the chat goes on without it."""
    bundle = make_tiny_bundle(tmp_path / "b", context_length=128)
    chat = Conversation()
    with edgespec.load(bundle) as engine:
        chat_loop(engine, chat, PARAMS, Lines("x" * 200, "ok"))
    err = capsys.readouterr().err
    assert "the question was taken back" in err
    assert [m["content"] for m in chat.turns[::2]] == ["ok"]


def test_interrupt_stops_the_answer_and_keeps_the_chat(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends the answer, what was said stays in the history, and the next question is answered."""
    bundle = make_tiny_bundle(tmp_path / "b", context_length=4096, eos_bonus=-1000)
    written: list[str] = []

    def write(text: str) -> None:
        written.append(text)
        if len(written) == 5:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("edgespec.cli.terminal.write", write)
    chat = Conversation()
    with edgespec.load(bundle, spec=edgespec.SpecParams(drafter="none")) as engine:
        chat_loop(engine, chat, SamplingParams(max_new_tokens=50), Lines("one", "two"))
    assert len(chat.turns) == 4
    assert chat.turns[1]["content"] == "".join(written[:5])
    assert len(chat.turns[3]["content"]) >= 40
    assert ", stopped" in capsys.readouterr().err.splitlines()[1]


def test_interrupt_at_the_prompt_must_be_meant(engine: edgespec.Engine, capsys: pytest.CaptureFixture[str]) -> None:
    """A Ctrl-C that came too late for an answer does not end the chat; two in a row do."""
    chat, events = Conversation(), iter(["one", KeyboardInterrupt(), "two", KeyboardInterrupt(), KeyboardInterrupt()])

    def read(_: str) -> str:
        event = next(events)
        if isinstance(event, KeyboardInterrupt):
            raise event
        return event

    with pytest.raises(KeyboardInterrupt):
        chat_loop(engine, chat, PARAMS, read)
    assert [m["content"] for m in chat.turns[::2]] == ["one", "two"]
    assert capsys.readouterr().err.count("Ctrl-C again leaves") == 2


def test_chat_needs_a_template(tiny_bundle: Path, tmp_path: Path) -> None:
    """A bundle without a template cannot chat, and the message says what can be done with it."""
    bundle = make_tiny_bundle(tmp_path / "b")
    rewrite_manifest(bundle, chat_template=None)
    with edgespec.load(bundle) as engine, pytest.raises(ConfigError, match="no chat template; give a --prompt"):
        chat_loop(engine, Conversation(), PARAMS, Lines("x"))


class Terminal:
    """`edgespec` on a pseudo-terminal."""

    def __init__(self, *args: str) -> None:
        import pty

        self._ours, theirs = pty.openpty()
        env = os.environ | {"TERM": "xterm", "COLUMNS": "200", "INPUTRC": os.devnull}
        command = [sys.executable, "-m", "edgespec", *args]
        self.child = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True
        )
        os.close(theirs)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def wait_for(self, text: str, seconds: float = 30) -> str:
        """Read until `text` is seen; what came up to it."""
        deadline = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < deadline, f"no {text!r} in {self.seen!r}"
            if select.select([self._ours], [], [], 0.1)[0]:
                self.seen += os.read(self._ours, 4096).decode(errors="replace")
        before, _, self.seen = self.seen.partition(text)
        return before

    def interrupt(self, is_noticed: Callable[[], bool], seconds: float = 30) -> None:
        """Ctrl-C, as often as it takes: one between the prompt and the wait for a key is seen at the next key."""
        deadline = time.monotonic() + seconds
        while not is_noticed():
            assert time.monotonic() < deadline, f"no reaction but {self.seen!r}"
            os.killpg(self.child.pid, signal.SIGINT)
            quiet = time.monotonic() + 2
            while not is_noticed() and time.monotonic() < quiet:
                if select.select([self._ours], [], [], 0.05)[0]:
                    with contextlib.suppress(OSError):  # the child has gone
                        self.seen += os.read(self._ours, 4096).decode(errors="replace")

    def close(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
            self.child.wait()
        os.close(self._ours)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals in Python")
def test_on_a_terminal(tmp_path: Path) -> None:
    """A whole chat by keyboard: banner, answer, dimmed figures, Ctrl-C in an answer, help, leaving."""
    bundle = make_tiny_bundle(tmp_path / "b", context_length=30000, eos_bonus=-1000)
    terminal = Terminal("run", str(bundle), "--max-new-tokens", "25000", "--drafter", "none")
    try:
        terminal.wait_for("/help for commands")
        terminal.wait_for("> ")
        terminal.type("hello\n")
        terminal.wait_for("hello")
        time.sleep(0.3)
        os.killpg(terminal.child.pid, signal.SIGINT)
        assert "\x1b[2m" in terminal.wait_for("tokens per target pass")
        terminal.wait_for("stopped")
        terminal.wait_for("> ")
        terminal.type("/help\n")
        terminal.wait_for("Ctrl-C stops an answer")
        terminal.type("/exit\n")
        assert terminal.child.wait(30) == 0
    finally:
        terminal.close()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals in Python")
@pytest.mark.parametrize(("key", "code"), [("\x04", 0), ("\x03", 130)], ids=["Ctrl-D", "Ctrl-C"])
def test_leaving_at_the_prompt(tiny_bundle: Path, key: str, code: int) -> None:
    """The end of input leaves well, a second Ctrl-C leaves with its own code, and neither shows a traceback."""
    terminal = Terminal("run", str(tiny_bundle))
    try:
        terminal.wait_for("> ")
        if code:
            terminal.interrupt(lambda: "Ctrl-C again leaves" in terminal.seen)
            terminal.wait_for("> ")
            terminal.interrupt(lambda: terminal.child.poll() is not None)
        else:
            terminal.type(key)
        assert terminal.child.wait(30) == code
        assert "Traceback" not in terminal.seen
    finally:
        terminal.close()
