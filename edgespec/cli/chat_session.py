"""The state of a chat in the terminal: its conversation, its settings, the figures of its answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, get_args

from edgespec.cli import terminal
from edgespec.cli.answer_view import Look, show
from edgespec.cli.documents import Document, compose
from edgespec.cli.errors import say
from edgespec.errors import ConfigError, EdgespecError
from edgespec.params import Overflow, RequestParams, SamplingParams
from edgespec.stats import GenerationStats

if TYPE_CHECKING:
    from edgespec import Conversation, TextStream

_COUNTERS = ("new_tokens", "target_passes", "rounds_drafted", "drafted", "accepted", "decode_s")
# Settings that nobody types at a prompt.
_NOT_SET = ("logits_processor", "grammar", "logprobs", "logit_bias", "banned_tokens", "ignore_eos")


class ChatSession:
    """One chat.

    Args:
        conversation: keeps the history and asks.
        params: how answers are sampled.
        request: what happens where the conversation outgrows the context.
        look: how answers are shown.
        documents: go with the first question.
    """

    def __init__(
        self,
        conversation: Conversation,
        params: SamplingParams | None = None,
        request: RequestParams | None = None,
        look: Look | None = None,
        documents: Sequence[Document] = (),
    ) -> None:
        self.conversation = conversation
        self.params = params or SamplingParams()
        self.request = request or RequestParams(overflow="drop_oldest")
        self.look = look or Look()
        self.documents = list(documents)
        self.stats: list[GenerationStats] = []
        self.files: set[str] = set()  # written or read by this chat, so it may write them again

    def ask(self, question: str) -> None:
        """Answer a question. One that gets no answer is taken back, and the chat goes on."""
        text = compose(question, self.documents)
        if self._answer(lambda request: self.conversation.ask(text, self.params, request)):
            self.documents.clear()

    def retry(self) -> None:
        """Answer the last question again; what is there stays if nothing comes of it."""
        chat = self.conversation
        before = [dict(message) for message in chat.messages]
        index = next((i for i in reversed(range(len(before))) if before[i]["role"] == "user"), None)
        if index is None:
            raise ConfigError("nothing has been asked yet")
        if self.params.is_greedy or self.params.seed is not None:
            remedy = "temperature 0.8" if self.params.is_greedy else "seed none"
            terminal.note(f"so set, the answer comes out the same: try `/set {remedy}`")
        chat.edit(index, before[index]["content"])
        if not self._answer(lambda request: chat.reply(self.params, request)):
            chat.messages[:] = before

    def total(self) -> GenerationStats:
        """The figures of all answers together."""
        total = GenerationStats()
        for stats in self.stats:
            for name in _COUNTERS:
                setattr(total, name, getattr(total, name) + getattr(stats, name))
        return total

    def settings(self) -> dict[str, Any]:
        """What `set` changes, by name."""
        names = [field.name for field in fields(SamplingParams) if field.name not in _NOT_SET]
        more = {"overflow": self.request.overflow, "markdown": self.look.markdown, "drafts": self.look.drafts}
        return {name: getattr(self.params, name) for name in names} | more

    def set(self, name: str, text: str) -> None:
        """Change a setting.

        Raises:
            ConfigError: there is no such setting, or it cannot be this.
        """
        settings = self.settings()
        if name not in settings:
            raise ConfigError(f"there is no setting {name}; /set lists them")
        value = _value(text)
        if name == "overflow":
            self.request = replace(self.request, overflow=_one_of(name, text, get_args(Overflow)))
        elif name in ("markdown", "drafts"):
            setattr(self.look, name, _one_of(name, text, ("on", "off")) == "on")
        elif name == "stop":
            texts = value if isinstance(value, list) else [text] if value is not None else []
            self.params = replace(self.params, stop=tuple(texts))
        else:
            self.params = replace(self.params, **{name: value})

    def _answer(self, make: Callable[[RequestParams], TextStream]) -> bool:
        """Show an answer and its figures; whether it became part of the history."""
        length = len(self.conversation.messages)
        try:
            stream = show(make, self.request, self.look)
        except EdgespecError as error:
            is_kept = len(self.conversation.messages) > length
            say(f"{error}; " + ("what was said is kept" if is_kept else "the question was taken back"))
            return is_kept
        self.stats.append(stream.stats)
        if stream.dropped:
            terminal.note(f"the context is full: the oldest {len(stream.dropped)} messages were left out of the prompt")
        terminal.note(terminal.footer(stream.stats, stream.finish_reason))
        if not stream.text_so_far:
            terminal.note("no text came, so the question was taken back")
        return bool(stream.text_so_far)


def _value(text: str) -> Any:
    """What somebody means who types this: JSON where it is, else text."""
    if text in ("none", "off", "null"):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text


def _one_of(name: str, text: str, choices: Sequence[str]) -> Any:
    if text not in choices:
        raise ConfigError(f"{name} is {text!r}; it must be one of " + ", ".join(choices))
    return text
