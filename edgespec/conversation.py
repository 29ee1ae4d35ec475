"""`Conversation`: the history of a chat on an engine; asked, edited, branched, saved. Knows prompts, not models."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.aio import AsyncTextStream
from edgespec.answer import Answer
from edgespec.chat import Message, check_messages
from edgespec.engine import Engine
from edgespec.errors import BusyError, ConfigError
from edgespec.params import RequestParams, SamplingParams
from edgespec.prompts import Known, Prompt
from edgespec.state import bundle_digest, write_atomically
from edgespec.stream import TextStream

_FORMAT, _FORMAT_VERSION = "edgespec-conversation", 1
_MAX_FILE_SIZE = 256 << 20
_MAX_KNOWN = 64  # read texts that are remembered, one an answer


class Conversation:
    """A chat with its history.

    Only what is new is read: the models' caches are the engine's and hold the last prompt and answer, and the tokens
    in which the model wrote its answers are kept. Conversations that share an engine push each other out of its
    caches; give each an `engine.fork()` to keep them.

    Not for several threads at once; the streams are.

    Args:
        engine: answers.
        system: the system prompt; `None` leaves it to the template.
        messages: the history so far, without a system prompt.

    Attributes:
        engine, system: as given; both may be replaced.
        messages: `{"role": "user" | "assistant", "content": text}`, oldest first. Answers are added when their
            stream ends. May be changed in between.
        cache_note: why `load` could not use the caches, or `None`.

    Raises:
        ConfigError: the bundle has no chat template, or a message is malformed.
    """

    def __init__(self, engine: Engine, system: str | None = None, messages: Iterable[Message] = ()) -> None:
        self.engine = engine
        self.system = system
        messages = list(messages)
        if messages:
            check_messages(messages)
        self.messages: list[dict[str, str]] = [dict(m) for m in messages]
        if engine.bundle.manifest.chat_template is None:
            raise ConfigError(f"{engine.bundle.path} has no chat template: use Engine.generate with plain text")
        self.cache_note: str | None = None
        self._known: list[Known] = []
        self._stream: weakref.ref[TextStream] | None = None
        self._is_asked = False

    def ask(self, text: str, params: SamplingParams | None = None, request: RequestParams | None = None) -> TextStream:
        """Answer a question.

        When the stream ends, in whatever way, what there is of the answer becomes part of the history. Where there
        is nothing (an error, or cancelled before the first word), the question is taken back.

        Raises:
            BusyError: the answer before is not finished.
            ConfigError, ContextOverflowError, MissingExtraError: as `Engine.chat`; the history is as before.
        """
        self._ask(text)
        return self._begin_or_take_back(params, request)

    def aask(
        self, text: str, params: SamplingParams | None = None, request: RequestParams | None = None
    ) -> AsyncTextStream:
        """`ask` for an event loop; but for BusyError, the first piece raises."""
        self._ask(text)
        return self._abegin(params, request)

    def reply(self, params: SamplingParams | None = None, request: RequestParams | None = None) -> TextStream:
        """Answer the history as it is, which ends with a question: after `edit`, or to try again."""
        self._check_question()
        return self._begin_or_take_back(params, request)

    def areply(self, params: SamplingParams | None = None, request: RequestParams | None = None) -> AsyncTextStream:
        """`reply` for an event loop."""
        self._check_question()
        return self._abegin(params, request)

    def edit(self, index: int, content: str) -> None:
        """Change a message and forget what came after it. What came before it need not be read again.

        Raises:
            BusyError: the last answer is not finished.
            ConfigError: there is no such message.
        """
        self._settle()
        if not 0 <= index < len(self.messages):
            raise ConfigError(f"there is no message {index}: the conversation has {len(self.messages)}")
        check_messages([{"role": self.messages[index]["role"], "content": content}])
        del self.messages[index + 1 :]
        self.messages[index] = {**self.messages[index], "content": content}

    def branch(self, length: int | None = None, *, engine: Engine | None = None) -> Conversation:
        """Another conversation that begins with the first `length` messages of this one (all by default).

        Args:
            engine: for the new one; by default it shares this one's, and its caches. With `engine.fork()` both keep
                what they have read, and the new one reads the common beginning once.
        """
        other = Conversation(engine or self.engine, self.system, self.messages[:length])
        other._known = list(self._known)
        return other

    def undo(self) -> str | None:
        """Forget the last question and its answer; the question, or `None` where there is none."""
        self._settle()
        for index in range(len(self.messages) - 1, -1, -1):
            if self.messages[index]["role"] == "user":
                question = self.messages[index]["content"]
                del self.messages[index:]
                return question
        return None

    def reset(self) -> None:
        """Forget the messages; the system prompt stays."""
        self._settle()
        self.messages.clear()
        self._known.clear()

    def count_tokens(self) -> int:
        """Tokens that the history takes of the context."""
        return self.engine.count_tokens(self._all()) if self._all() else 0

    def save(self, path: str | os.PathLike[str], *, caches: bool = False) -> None:
        """Write the history as JSON, and (`caches`) what the models have read beside it, in a file ending in .npz.

        Raises:
            BusyError: an answer is being made.
            OSError: a file cannot be written.
        """
        self._settle()
        path = Path(path)
        known = self._known[-1] if caches and self._known else None
        if caches:
            self.engine.save_caches(_cache_path(path))
        document = {
            "format": _FORMAT,
            "format_version": _FORMAT_VERSION,
            "bundle": {"name": self.engine.bundle.manifest.name, "sha256": bundle_digest(self.engine.bundle.manifest)},
            "system": self.system,
            "messages": self.messages,
            "caches": _cache_path(path).name if caches else None,
            "read": known and {"text": known.text, "token_ids": known.tokens.tolist()},
        }
        data = json.dumps(document, ensure_ascii=False, indent=1).encode("utf-8", "surrogatepass")
        write_atomically(path, lambda stream: stream.write(data))

    @classmethod
    def load(cls, path: str | os.PathLike[str], engine: Engine, *, caches: bool = True) -> Conversation:
        """Read what `save` wrote.

        The text may come from a chat with another bundle. Caches that are missing, damaged or of another bundle are
        not used: `cache_note` says why, and the text is read again.

        Args:
            caches: read the caches into the engine, if they were saved.
        Raises:
            ConfigError: the file is no saved conversation.
            BusyError: the engine is making an answer.
            OSError: the file cannot be read.
        """
        path = Path(path)
        data = _read_document(path)
        conversation = cls(engine, data["system"], data["messages"])
        if caches and data["caches"]:
            conversation._load_caches(path, data)
        return conversation

    def _load_caches(self, path: Path, data: dict[str, Any]) -> None:
        try:
            self.engine.load_caches(_cache_path(path))
        except (ConfigError, OSError) as error:
            self.cache_note = f"the text will be read again: {error}"
            return
        read = data["read"]
        if read is not None and max(read["token_ids"], default=0) < self.engine.bundle.manifest.target.vocab_size:
            self._known = [Known(read["text"], np.array(read["token_ids"], np.int64))]

    def _all(self) -> list[dict[str, str]]:
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return first + self.messages

    def _ask(self, text: str) -> None:
        self._settle()
        message = {"role": "user", "content": text}
        check_messages([message])
        self.messages.append(message)
        self._is_asked = True

    def _check_question(self) -> None:
        self._settle()
        if not self.messages or self.messages[-1]["role"] == "assistant":
            raise ConfigError("there is no question to answer: ask one, or edit one")

    def _settle(self) -> None:
        """Before anything else: the last stream must be over. One that was dropped unread never was."""
        stream = None if self._stream is None else self._stream()
        if stream is not None and not stream.is_over:
            raise BusyError("the last answer of this conversation is not finished: cancel or close its stream first")
        self._take_back()
        self._stream = None

    def _take_back(self) -> None:
        if self._is_asked:
            self._is_asked = False
            self.messages.pop()

    def _begin_or_take_back(self, params: SamplingParams | None, request: RequestParams | None) -> TextStream:
        try:
            stream = self.engine.open_stream(self._make_prompt, params, request, self._on_end)
        except BaseException:
            self._take_back()
            raise
        self._stream = weakref.ref(stream)
        return stream

    def _abegin(self, params: SamplingParams | None, request: RequestParams | None) -> AsyncTextStream:
        stream = self.engine.open_stream(self._make_prompt, params, request, self._on_end, is_lazy=True)
        self._stream = weakref.ref(stream)
        return AsyncTextStream(stream)

    def _make_prompt(self, params: SamplingParams, request: RequestParams) -> Prompt:
        return self.engine.prompts.from_messages(self._all(), params, request, self._known)

    def _on_end(self, answer: Answer) -> None:
        text, prompt = answer.text, answer.prompt
        if not text or prompt is None:
            self._take_back()
            return
        self._is_asked = False
        self.messages.append({"role": "assistant", "content": text})
        known = self.engine.prompts.after(prompt, text, answer.token_ids)
        self._known = [*self._known, *([] if known is None else [known])][-_MAX_KNOWN:]


def _cache_path(path: Path) -> Path:
    return path.with_name(path.name + ".npz")


def _read_document(path: Path) -> dict[str, Any]:
    if path.stat().st_size > _MAX_FILE_SIZE:
        raise ConfigError(f"{path} is larger than {_MAX_FILE_SIZE >> 20} MiB: it is no saved conversation")
    try:
        data = json.loads(path.read_bytes().decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: it is no saved conversation") from error
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise ConfigError(f"{path} is no saved conversation: its `format` is not {_FORMAT!r}")
    if data.get("format_version") != _FORMAT_VERSION:
        raise ConfigError(f"{path} was saved by another version of edgespec: its `format_version` is not 1")
    is_right = {
        "system": isinstance(data.get("system"), str | None),
        "messages": isinstance(data.get("messages"), list),
        "caches": isinstance(data.get("caches"), str | None),
        "read": data.get("read") is None or _is_read(data["read"]),
    }
    for name, right in is_right.items():
        if not right:
            raise ConfigError(f"{path}: {name} is malformed: it is no saved conversation")
    return {name: data.get(name) for name in is_right}


def _is_read(value: object) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        return False
    ids: object = value.get("token_ids")
    return isinstance(ids, Sequence) and all(type(i) is int and 0 <= i < 1 << 31 for i in ids)
