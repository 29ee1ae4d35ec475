"""The chat of `edgespec run`, in the process: turns, errors, Ctrl-C. Its commands are in test_cli_commands.py."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import edgespec
from edgespec import Conversation, RequestParams, SamplingParams
from edgespec.cli.chat_loop import chat_loop
from edgespec.cli.chat_session import ChatSession
from edgespec.cli.documents import Document
from tests.test_cli import cli, error_line
from tests.tiny import make_tiny_bundle, rewrite_manifest

PARAMS = SamplingParams(max_new_tokens=12)


class Lines:
    """Somebody who types these lines and then ends the input; an exception among them is raised."""

    def __init__(self, *lines: str | BaseException) -> None:
        self._lines = iter(lines)

    def __call__(self, prompt: str) -> str:
        assert prompt in ("> ", ". ")
        line = next(self._lines, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line


@pytest.fixture
def engine(tiny_bundle: Path) -> Iterator[edgespec.Engine]:
    with edgespec.load(tiny_bundle) as engine:
        yield engine


Chat = Callable[..., ChatSession]


@pytest.fixture
def chat(engine: edgespec.Engine) -> Chat:
    """Types lines into a chat, which goes on with the session given."""

    def run(*lines: str | BaseException, session: ChatSession | None = None) -> ChatSession:
        session = session or ChatSession(Conversation(engine), PARAMS)
        assert chat_loop(session, Lines(*lines)) == 0
        return session

    return run


def questions(session: ChatSession) -> list[str]:
    return [m["content"] for m in session.conversation.messages if m["role"] == "user"]


def test_history_is_kept_and_reset(engine: edgespec.Engine, chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    """Each question is answered with all that was said before it, until /reset."""
    session = chat("one", "", "two")
    answers = capsys.readouterr().out
    messages: list[dict[str, str]] = []
    for question in ("one", "two"):
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": engine.chat(messages, PARAMS).text()})
    assert session.conversation.messages == messages
    assert answers == "".join(m["content"] + "\n" for m in messages[1::2])
    chat("/reset", "one", "/exit", "never asked", session=session)
    assert session.conversation.messages == messages[:2]


def test_second_turn_reads_only_what_is_new(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    """The cache goes on across turns, and /stats shows it."""
    chat("one", "/stats", "two", "/stats")
    cached = [int(n) for n in re.findall(r"cached_tokens +(\d+)", capsys.readouterr().err)]
    assert cached[0] == 0
    assert cached[1] > len("user\none\n")


def test_several_lines_between_quotation_marks(chat: Chat) -> None:
    """Three quotation marks begin and end a question of several lines, on lines of their own or not."""
    session = chat('"""one', "two", 'three"""', '"""', "four", '  """', '"""five"""', "six")
    assert questions(session) == ["one\ntwo\nthree", "four", "five", "six"]


def test_documents_go_with_the_first_question(
    engine: edgespec.Engine, chat: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    """A document is told with its size, stands before the first question that is answered, and before no other."""
    documents = [Document("Some text.", "notes.txt")]
    session = ChatSession(Conversation(engine), PARAMS, documents=documents)
    chat("x" * 600, "one", "three", session=session)
    text = '<document name="notes.txt">\nSome text.\n</document>\n\none'
    assert questions(session) == [text, "three"]
    err = capsys.readouterr().err
    assert "notes.txt goes with the first question: 10 tokens" in err
    assert err.count("the question was taken back") == 1


def test_error_takes_the_question_back(tmp_path: Path, chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    """A question that does not fit the context is told in a line, and the chat goes on without it."""
    bundle = make_tiny_bundle(tmp_path / "b", context_length=64)
    with edgespec.load(bundle) as engine:
        session = ChatSession(Conversation(engine), PARAMS)
        chat("x" * 200, "ok", session=session)
    assert "the question was taken back" in capsys.readouterr().err
    assert questions(session) == ["ok"]


def test_a_chat_goes_on_when_the_context_is_full(
    tmp_path: Path, chat: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    """The oldest turns are left out of the prompt and the chat says so; it can be told to refuse instead."""
    bundle = make_tiny_bundle(tmp_path / "b", context_length=128, eos_bonus=-1000)
    with edgespec.load(bundle) as engine:
        session = ChatSession(Conversation(engine), PARAMS)
        chat(*["a question"] * 4, session=session)
        err = capsys.readouterr().err
        assert re.search(r"the context is full: the oldest [24] messages were left out", err)
        assert len(session.conversation.messages) == 8
        chat("/set overflow refuse", "one more", session=session)
        assert "the question was taken back" in capsys.readouterr().err
        assert session.request == RequestParams(overflow="refuse")


def test_interrupt_stops_the_answer_and_keeps_the_chat(
    tmp_path: Path, chat: Chat, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends the answer, what was said stays in the history, and the next question is answered."""
    bundle = make_tiny_bundle(tmp_path / "b", context_length=4096, eos_bonus=-1000)
    written: list[str] = []

    def write(text: str) -> None:
        written.append(text)
        if len(written) == 5:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("edgespec.cli.terminal.write", write)
    with edgespec.load(bundle, spec=edgespec.SpecParams(drafter="none")) as engine:
        session = ChatSession(Conversation(engine), SamplingParams(max_new_tokens=50))
        chat("one", "two", session=session)
    answers = [m["content"] for m in session.conversation.messages[1::2]]
    assert answers[0] == "".join(written[:5])
    assert len(answers[1]) >= 40
    assert ", stopped" in capsys.readouterr().err.splitlines()[1]


def test_interrupt_at_the_prompt_must_be_meant(
    chat: Chat, engine: edgespec.Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Ctrl-C that came too late for an answer does not end the chat; two in a row do."""
    session = ChatSession(Conversation(engine), PARAMS)
    stop = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        chat("one", stop, "two", stop, stop, session=session)
    assert questions(session) == ["one", "two"]
    assert capsys.readouterr().err.count("Ctrl-C again leaves") == 2


def test_chat_needs_a_template_and_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundle without a template cannot chat, and the message says what can be done with it."""
    bundle = make_tiny_bundle(tmp_path / "b")
    rewrite_manifest(bundle, chat_template=None)
    monkeypatch.setattr("edgespec.cli.run.read_stdin", lambda is_needed: None)
    assert "no chat template; give a --prompt" in error_line(cli("run", bundle), 2)
    assert "--json needs a prompt" in error_line(cli("run", bundle, "--json"), 2)
