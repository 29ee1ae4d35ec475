"""Text -> tokens, and tokens -> text as it becomes certain: the adapter of the `tokenizers` library.

`StreamDecoder` holds back what a later token may still change: the bytes of an unfinished character, and the
beginning of a stop string. Knows nothing of models or of how tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as _Tokenizer

from edgespec.contracts import Tokens
from edgespec.errors import BundleError, ConfigError

_REPLACEMENT = "\ufffd"
# A UTF-8 character has at most 4 bytes, so it is spread over at most 4 tokens: what is still unreadable after
# more of them is garbage, and decoding it again with every token would cost quadratic time.
_MAX_CHARACTER_TOKENS = 8
# A stop string is looked for with every token of a run of bytes up to this long, then whenever the run has doubled.
_MAX_BYTE_RUN = 64


class Tokenizer:
    """A `tokenizer.json`.

    Raises:
        BundleError: the file is missing or is not a tokenizer.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._inner = _Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain `Exception`
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise BundleError(f"{path} is not a tokenizer.json ({reason}); export the bundle again") from error
        # Training leaves these in some files; a prompt must be neither cut nor filled up.
        self._inner.no_truncation()
        self._inner.no_padding()
        self.vocab_size: int = max(self.vocab().values(), default=-1) + 1
        added = self._inner.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        self._byte_tokens = self._find_byte_tokens()

    def vocab(self) -> dict[str, int]:
        """The token map, added tokens included."""
        vocab: dict[str, int] = self._inner.get_vocab(with_added_tokens=True)
        return vocab

    def encode(self, text: str, *, add_special_tokens: bool) -> Tokens:
        """Token ids, shape (n,), int64.

        Args:
            add_special_tokens: whether to add those that the tokenizer puts around a text (BOS, ...). Not for
                the output of a chat template, which has written them itself.
        Raises:
            ConfigError: the text has lone surrogates and so stands for no characters.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ConfigError(f"the text has a lone surrogate at index {error.start}; pass valid Unicode") from error
        return np.array(self._inner.encode(text, add_special_tokens=add_special_tokens).ids, np.int64)

    def decode(self, tokens: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens; ids that no token has (padding rows of a model) have no text."""
        text: str = self._inner.decode([int(t) for t in tokens], skip_special_tokens=skip_special_tokens)
        return text

    def token_to_id(self, token: str) -> int | None:
        """The id of a token by its name in the vocabulary."""
        found: int | None = self._inner.token_to_id(token)
        return found

    def has_text(self, token: int) -> bool:
        """Whether `decode` looks at the token at all: it has a name and is not special."""
        return token not in self.special_ids and self._inner.id_to_token(token) is not None

    def is_byte(self, token: int) -> bool:
        """Whether the token is one byte of a sentencepiece-like vocabulary.

        A decoder with byte fallback reads a run of these as a whole: one wrong byte makes all of it unreadable.
        """
        return token in self._byte_tokens

    def _find_byte_tokens(self) -> frozenset[int]:
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        decoder = self._inner.decoder
        if decoder is None or decoder.decode(["<0x41>"]) != "A":
            return frozenset()
        return frozenset(i for i in map(self.token_to_id, names) if i is not None)


class StreamDecoder:
    """Turns a stream of tokens into a stream of text that is never taken back.

    What `push` and `flush` return, put together, is `tokenizer.decode` of all tokens (without special ones), up
    to the first stop string. It does not depend on how the tokens are divided among calls.

    How: `_window` is the group of tokens whose text was given last, and `_pending` what came since. The text of
    both together begins with the text of the first (leading spaces that a decoder drops at the start of a text
    are then dropped from both), and the rest is new. Groups end only where no later token can change them.

    Args:
        tokenizer: of the model.
        stop: the text ends before the one of these that is completed first.
        context: tokens that the text continues, if it does. Without them it is decoded as the beginning of a
            text, for which many tokenizers drop a leading space.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), context: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._longest_stop = max(map(len, self._stop), default=0)
        self._window = [int(t) for t in context if tokenizer.has_text(int(t))][-16:]
        self._window_text = tokenizer.decode(self._window)
        self._pending: list[int] = []
        self._next_try = _MAX_CHARACTER_TOKENS
        self._held = ""
        self.stopped = False
        self.num_tokens = 0
        """Tokens pushed so far; up to and including the one that completed a stop string, if one was."""

    def push(self, tokens: Iterable[int]) -> str:
        """Text that has become certain. After a stop string: nothing, and the tokens do not count."""
        text = ""
        for token in tokens:
            if self.stopped:
                break
            self.num_tokens += 1
            text += self._push_one(int(token))
        return text

    def flush(self) -> str:
        """What was held back. To be called once, when no more tokens come."""
        text = self._take(self._new_text()) if self._pending and not self.stopped else ""
        text, self._held = text + self._held, ""
        self._pending.clear()
        return text

    def _push_one(self, token: int) -> str:
        if not self._tokenizer.has_text(token):
            return ""
        self._pending.append(token)
        if not self._is_worth_decoding(token):
            return ""
        new = self._new_text()
        if not self._is_settled(token, new):
            return self._take_if_stopped(new.rstrip(_REPLACEMENT))
        self._window, self._pending = self._pending, []
        self._window_text = self._tokenizer.decode(self._window)
        self._next_try = _MAX_CHARACTER_TOKENS
        return self._take(new)

    def _new_text(self) -> str:
        """The text of `_pending`, in the place where it stands."""
        return self._tokenizer.decode(self._window + self._pending)[len(self._window_text) :]

    def _is_worth_decoding(self, token: int) -> bool:
        """Always, but in a long run of garbage only where it may end, or when the run has doubled."""
        is_searched = bool(self._stop) and self._tokenizer.is_byte(token)
        if len(self._pending) <= (_MAX_BYTE_RUN if is_searched else _MAX_CHARACTER_TOKENS):
            return True
        if len(self._pending) >= 2 * self._next_try:
            self._next_try = len(self._pending)
            return True
        return not self._tokenizer.is_byte(token) and not self._ends_unreadable(self._tokenizer.decode([token]))

    def _is_settled(self, token: int, new: str) -> bool:
        return not self._tokenizer.is_byte(token) and not self._ends_unreadable(new)

    @staticmethod
    def _ends_unreadable(text: str) -> bool:
        return text.endswith(_REPLACEMENT)

    def _take(self, new: str) -> str:
        """Pass on held and new text, but for a tail that may become a stop string."""
        text = self._take_if_stopped(new)
        if self.stopped:
            return text
        text = self._held + new
        length = self._num_to_hold(text)
        self._held = text[len(text) - length :]
        return text[: len(text) - length]

    def _take_if_stopped(self, new: str) -> str:
        """If a stop string is complete with `new`, end the text before it."""
        text = self._held + new
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if not found:
            return ""
        self.stopped = True
        self._held = ""
        self._pending.clear()
        return text[: min(found)[1]]

    def _num_to_hold(self, text: str) -> int:
        """Length of the longest tail of `text` that is the beginning of a stop string."""
        for length in range(min(self._longest_stop - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0
