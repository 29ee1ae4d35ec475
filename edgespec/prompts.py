"""`PromptMaker`: conversations and texts -> the tokens of a prompt that fits. Knows no models."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgespec.bundle import Bundle
from edgespec.chat import ChatTemplate, Message, drop_oldest
from edgespec.contracts import Tokens
from edgespec.errors import BundleError, ConfigError, ContextOverflowError
from edgespec.grammar import GrammarCompiler
from edgespec.params import RequestParams, SamplingParams
from edgespec.shaper import Constraint
from edgespec.tokens import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """What an answer is made from.

    Attributes:
        tokens: shape (n,).
        context: the last of them where the text is to be continued, none where the answer is a text of its own.
        text: what the tokens are, where a template wrote it.
        dropped: messages left out because they did not fit.
        constraint: what the answer must match.
    """

    tokens: Tokens
    context: Tokens
    text: str = ""
    dropped: tuple[Message, ...] = ()
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class Known:
    """A rendered conversation that was read, with the tokens that stand for it.

    The model may have written an answer in other tokens than the tokenizer would choose for its text. Where a new
    prompt begins with the same text, it begins with these tokens, too, so that what is cached is found again.
    """

    text: str
    tokens: Tokens


class PromptMaker:
    """Makes prompts for one bundle.

    Args:
        bundle: its template and its vocabulary.
        tokenizer: of the bundle.

    Raises:
        BundleError: the template cannot be read.
    """

    def __init__(self, bundle: Bundle, tokenizer: Tokenizer) -> None:
        manifest = bundle.manifest
        self._bundle = bundle
        self._tokenizer = tokenizer
        self._template = _read_template(bundle)
        self._grammars = GrammarCompiler(bundle.path / manifest.tokenizer, manifest.eos_token_ids)
        self._context_length = manifest.target.context_length

    def limited(self, context_length: int) -> PromptMaker:
        """The same for a context of this length."""
        other = copy.copy(self)
        other._context_length = context_length
        return other

    def count(self, text: str | Sequence[Message]) -> int:
        """Tokens of a text or a conversation, as the methods below would encode it."""
        if isinstance(text, str):
            return len(self._tokenizer.encode(text, add_special_tokens=True))
        return len(self._encode(self.render(text), ()))

    def render(self, messages: Sequence[Message]) -> str:
        """The text that the template makes of a conversation, with the header of the answer."""
        if self._template is None:
            raise ConfigError(f"{self._bundle.path} has no chat template: use generate() with plain text")
        text = self._template.render(messages, add_generation_prompt=True)
        if not text:
            raise BundleError(f"{self._bundle.path}: the chat template gives no text for this conversation")
        return text

    def from_messages(
        self, messages: Sequence[Message], params: SamplingParams, request: RequestParams, known: Sequence[Known] = ()
    ) -> Prompt:
        """The prompt of a chat. Raises what `Engine.chat` says."""
        dropped: tuple[Message, ...] = ()
        if request.overflow == "drop_oldest":
            reserved = min(params.max_new_tokens, max(1, self._context_length // 4))
            messages, dropped = drop_oldest(messages, self.count, self._context_length - reserved)
        text = self.render(messages)
        tokens = self._encode(text, known)
        self._check_fits(tokens, params, request)
        return Prompt(tokens, tokens[:0], text, dropped, self._constraint(params))

    def from_text(self, text: str | Sequence[int] | Tokens, params: SamplingParams, request: RequestParams) -> Prompt:
        """The prompt of a continuation. Raises what `Engine.generate` says."""
        if request.overflow == "drop_oldest":
            raise ConfigError("plain text has no turns that could be dropped: use chat(), or `refuse` or `stop`")
        is_text = isinstance(text, str)
        tokens = self._tokenizer.encode(str(text), add_special_tokens=True) if is_text else _token_ids(text)
        if not len(tokens):
            raise ConfigError("the prompt is empty: give it at least one token")
        vocab_size = self._bundle.manifest.target.vocab_size
        if tokens.min() < 0 or tokens.max() >= vocab_size:
            raise ConfigError(f"the prompt has token ids outside the vocabulary of {vocab_size}")
        self._check_fits(tokens, params, request)
        return Prompt(tokens, tokens[-16:], constraint=self._constraint(params))

    def after(self, prompt: Prompt, answer: str, token_ids: Sequence[int]) -> Known | None:
        """What is known when an answer was made, or `None` where its tokens do not stand for exactly its text."""
        ids = list(token_ids)
        if ids and ids[-1] in self._bundle.manifest.eos_token_ids:
            ids.pop()
        is_plain = all(map(self._tokenizer.has_text, ids)) and self._tokenizer.decode(ids) == answer
        if not prompt.text or not is_plain:
            return None
        return Known(prompt.text + answer, np.concatenate([prompt.tokens, np.array(ids, np.int64)]))

    def _encode(self, text: str, known: Sequence[Known]) -> Tokens:
        best = max((k for k in known if text.startswith(k.text)), key=lambda k: len(k.text), default=None)
        if best is None:
            return self._tokenizer.encode(text, add_special_tokens=False)
        rest = self._tokenizer.encode(text[len(best.text) :], add_special_tokens=False)
        return np.concatenate([best.tokens, rest])

    def _check_fits(self, tokens: Tokens, params: SamplingParams, request: RequestParams) -> None:
        room = self._context_length - len(tokens)
        if room < 1:
            raise ContextOverflowError(
                f"the prompt has {len(tokens)} tokens and the model's context {self._context_length}: shorten it"
            )
        if request.overflow == "refuse" and room < params.max_new_tokens:
            raise ContextOverflowError(
                f"the prompt has {len(tokens)} tokens and the model's context {self._context_length}, which leaves "
                f"{room} of {params.max_new_tokens} new tokens: shorten it, or ask for less"
            )

    def _constraint(self, params: SamplingParams) -> Constraint | None:
        return None if params.grammar is None else self._grammars.compile(params.grammar)


def _token_ids(ids: object) -> Tokens:
    try:
        tokens = np.asarray(ids)
        is_whole = tokens.ndim == 1 and (np.issubdtype(tokens.dtype, np.integer) or not len(tokens))
    except ValueError:  # lists of different lengths
        is_whole = False
    if not is_whole:
        raise ConfigError(f"the prompt is {type(ids).__name__!r}; it must be a text, or whole numbers in one row")
    return tokens.astype(np.int64)


def _read_template(bundle: Bundle) -> ChatTemplate | None:
    name = bundle.manifest.chat_template
    if name is None:
        return None
    try:
        source = (bundle.path / name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{bundle.path / name} cannot be read as text: {error}") from error
    return ChatTemplate(source, bundle.manifest.special_tokens)
