"""The commands of a chat, typed into it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import edgespec
from edgespec import Conversation, SamplingParams
from edgespec.cli import clipboard, terminal
from edgespec.cli.chat_session import ChatSession
from edgespec.cli.commands import COMMANDS
from tests.test_cli_chat import PARAMS, Chat, chat, engine, questions

__all__ = ["chat", "engine"]  # fixtures

Capture = pytest.CaptureFixture[str]


def test_help_lists_every_command(chat: Chat, capsys: Capture) -> None:
    """Each command is a line of /help; one that is not there is told; neither is asked of the model."""
    session = chat("/help", "/nonsense x", "/ x")
    err = capsys.readouterr().err
    for name in COMMANDS:
        assert re.search(rf"^/{name}\b.* {re.escape(COMMANDS[name].text)}$", err, re.MULTILINE)
    assert "there is no command /nonsense; /help lists them" in err
    assert questions(session) == []


def test_stats_and_system(chat: Chat, capsys: Capture) -> None:
    """Figures are there once there is an answer; the system prompt is shown and set, and reaches the model."""
    session = chat("/stats", "/system", "/system  Be brief. ", "hi", "/stats", "/reset", "/system")
    err = capsys.readouterr().err
    for text in ("nothing has been answered", "the default of the template", "target_passes", "whole chat: 1 answers"):
        assert text in err
    assert err.count("system prompt: Be brief.") == 2
    assert re.search(r"context +\d+ of 512 tokens", err)
    assert re.search(r"^read_tokens +\d+, of the prompt: read by now, cached ones included$", err, re.MULTILINE)
    assert session.stats[0].prompt_tokens > len("Be brief.hi")


def test_set_changes_what_is_sampled(chat: Chat, engine: edgespec.Engine, capsys: Capture) -> None:
    """Settings are shown, changed one by one, and used for the next answer."""
    session = chat("/set temperature 40", "/set seed 3", "/set stop none", "/set max_new_tokens 9", "hi", "/set seed")
    params = SamplingParams(temperature=40, seed=3, max_new_tokens=9)
    assert session.params == params
    messages = session.conversation.messages
    assert messages[1]["content"] == engine.chat(messages[:1], params).text()
    assert re.search(r"^seed +3$", capsys.readouterr().err, re.MULTILINE)
    chat("/set stop END", "/set seed none", "/set markdown off", "/set drafts on", "/set", session=session)
    assert (session.params.stop, session.params.seed) == (("END",), None)
    assert (session.look.markdown, session.look.drafts) == (False, True)
    shown = dict(re.findall(r"^(\w+) +(.+)$", capsys.readouterr().err, re.MULTILINE))
    assert shown["temperature"] == "40"
    assert shown["markdown"] == "off"
    assert shown["seed"] == shown["max_time"] == "none"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("/set temperature -1", "temperature is -1; it must be a number from 0"),
        ("/set temperature warm", "temperature is 'warm'; it must be a number from 0"),
        ("/set top_k 1.5", "top_k is 1.5; it must be"),
        ("/set nonsense 1", "there is no setting nonsense"),
        ("/set nonsense", "there is no setting nonsense"),
        ("/set markdown maybe", "markdown is 'maybe'; it must be one of on, off"),
        ("/set overflow x", "overflow is 'x'; it must be one of stop, refuse, drop_oldest"),
        ("/save", "name a file"),
        ("/load no-such-file", "no-such-file: No such file"),
        ("/retry", "nothing has been asked yet"),
        ("/copy", "nothing has been answered yet"),
        ("/undo", "nothing has been asked yet"),
    ],
)
def test_mistakes_are_a_line(chat: Chat, capsys: Capture, line: str, reason: str) -> None:
    """A command that cannot be obeyed says why in one line; the chat goes on with its settings as they were."""
    session = chat(line)
    assert session.params == PARAMS
    lines = [text for text in capsys.readouterr().err.splitlines() if reason in text]
    assert len(lines) == 1


def test_undo_and_retry(chat: Chat, capsys: Capture) -> None:
    """/undo forgets a question with its answer; /retry answers the last one again, with today's settings."""
    session = chat("one", "two", "/undo")
    assert questions(session) == ["one"]
    assert "forgotten, with its answer: two" in capsys.readouterr().err
    first = [dict(m) for m in session.conversation.messages]
    chat("/retry", session=session)
    assert session.conversation.messages == first
    err = capsys.readouterr().err
    assert "the answer comes out the same: try `/set temperature 0.8`\n" in err
    chat("/set temperature 40", "/retry", session=session)
    assert session.conversation.messages[0] == first[0]
    assert session.conversation.messages[1] != first[1]
    assert "the answer comes out the same" not in capsys.readouterr().err
    chat("/set seed 3", "/retry", session=session)
    assert "the answer comes out the same: try `/set seed none`\n" in capsys.readouterr().err


def test_a_failed_retry_keeps_the_answer(chat: Chat) -> None:
    """Where nothing comes of another try, what was there stays."""
    session = chat("one")
    before = [dict(m) for m in session.conversation.messages]
    chat("/set max_new_tokens 2000", "/set overflow refuse", "/retry", session=session)
    assert session.conversation.messages == before


def test_save_and_load(chat: Chat, engine: edgespec.Engine, tmp_path: Path, capsys: Capture) -> None:
    """What is saved is loaded, by this chat or another; with caches only what is new is read then."""
    path = tmp_path / "a talk.json"
    session = chat("/system Brief.", "one", f"/save {path}", "two", f"/save {path} caches")
    assert path.exists()
    assert "saved 4 messages" in capsys.readouterr().err
    with edgespec.load(engine.bundle.path) as other:
        loaded = chat(f"/load {path}", "three", session=ChatSession(Conversation(other), PARAMS))
    assert loaded.conversation.messages[:4] == session.conversation.messages
    assert loaded.conversation.system == "Brief."
    assert loaded.stats[0].cached_tokens > 30
    err = capsys.readouterr().err
    assert "loaded 4 messages" in err
    assert f"assistant: {session.conversation.messages[3]['content']}" in err


def test_save_spares_other_files(chat: Chat, tmp_path: Path, capsys: Capture) -> None:
    """A file that is no saved conversation is not overwritten; one that is, by another chat, is."""
    path = tmp_path / "thesis.txt"
    path.write_text("ten years of work", encoding="utf-8")
    chat("one", f"/save {path}")
    assert path.read_text(encoding="utf-8") == "ten years of work"
    assert "is no saved conversation: choose another name" in capsys.readouterr().err
    chat("one", f"/save {tmp_path / 'x'}")
    chat("one", "two", f"/save {tmp_path / 'x'}")
    assert "saved 4 messages" in capsys.readouterr().err


def test_load_of_something_else(chat: Chat, tmp_path: Path, capsys: Capture) -> None:
    """A file that is no conversation is refused, and the chat goes on as it was."""
    (tmp_path / "x").write_text("{}", encoding="utf-8")
    session = chat("one", f"/load {tmp_path / 'x'}")
    assert questions(session) == ["one"]
    assert "is no saved conversation" in capsys.readouterr().err


def test_copy_uses_the_systems_program(
    chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """The last answer is given to the first clipboard program that is there."""
    out = tmp_path / "clipboard"
    script = f"import sys; open({str(out)!r}, 'wb').write(sys.stdin.buffer.read())"
    programs = {"pbcopy": None, "xsel": sys.executable}
    monkeypatch.setattr(clipboard, "_PROGRAMS", (("pbcopy", "utf-8"), ("xsel -c", "utf-8")))
    monkeypatch.setattr(clipboard.shutil, "which", programs.get)
    run = clipboard.subprocess.run
    monkeypatch.setattr(
        clipboard.subprocess, "run", lambda command, **kind: run([*command, script], **kind) if command[1:] else None
    )
    session = chat("one", "/copy")
    answer = session.conversation.messages[1]["content"]
    assert out.read_text(encoding="utf-8") == answer
    assert f"copied {len(answer)} characters by xsel" in capsys.readouterr().err


def test_copy_through_the_terminal_or_not_at_all(chat: Chat, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Without a program a terminal is asked (OSC 52); without one, the message says what helps."""
    monkeypatch.setattr(clipboard.shutil, "which", lambda name: None)
    session = chat("one", "/copy")
    assert "no clipboard was found: install xclip" in capsys.readouterr().err
    monkeypatch.setattr(clipboard.terminal, "is_capable", lambda stream: True)
    written: list[str] = []
    monkeypatch.setattr(terminal, "write_raw", written.append)
    session.conversation.messages[-1]["content"] = "hi é"
    chat("/copy", session=session)
    assert written == ["\x1b]52;c;aGkgw6k=\a"]
