"""`RecurrentSession`: a draft without a cache that goes on from what its target computed at the last token.

Its first token comes from the target's row of `hidden`, later ones from its own state. So it never has anything to
read, whatever happened to the text. Source of the idea: EAGLE (Li et al. 2024), Hydra (Ankner et al. 2024). It may
look back at the text through the target's cache of one layer: GLIDE (Du et al. 2024). It may be told what prompt
lookup would propose.

Knows nothing of text or sampling.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.bundle import MAX_VOCAB, ModelInfo
from edgespec.contracts import Interrupted, Rows, Tokens
from edgespec.errors import BundleError, ContextOverflowError, SessionError
from edgespec.head import Head
from edgespec.kv import CacheTensor, SharedCache, find_cache_tensors, float_type
from edgespec.lookup import HintIndex, common_prefix
from edgespec.ort import Interrupt, OrtDevice, one_line, open_session
from edgespec.params import RuntimeParams
from edgespec.session import DecoderSession

_INPUTS = {"input_ids", "hidden", "state"}
_OUTPUTS = {"logits", "next_state"}
_HINT = "hint"
_OWN_CAPACITY = 16  # tokens, at first, of a cache that holds drafted ones only


class RecurrentSession:
    """A `Scorer` for a draft of cache kind `none`: one token a call, everything bound once.

    The graph: inputs `input_ids` int64 [1, 1], `hidden` [1, 1, F], `state` [1, 1, H]; outputs `logits` [1, 1, h] and
    `next_state` [1, 1, H]. `state` is 0 at the first token after `sync`, `hidden` at all others.

    A graph with attention has, besides, `past_len` int64 [1], the past and the present of one layer's keys and values.
    It sees what the target has cached of the text and writes its own entries behind that, where the target overwrites
    them. Where the target's cache cannot be used (it grows, or has other elements, or another provider runs it), the
    draft sees nothing but what it drafted, in a cache of its own, which costs acceptance and nothing else.

    A graph with `hint` int64 [1, 2] is told, at each token, what `HintIndex` finds in the text up to that token: column
    and kind. Both are 0 where there is no hint or the head does not have its token, and after `rewind`, when nobody
    knows the text.

    Args:
        path: of the graph.
        target: whose rows of `hidden` it starts from. Where there is none for the text, it starts from zeros, which
            costs acceptance and nothing else.
        context_length: most tokens of a text.
        runtime: provider, threads, spinning.
        head: the tokens of the graph's head where it has not all of them.
        session: ONNX Runtime's own, when the graph is loaded already.
        reads: let the target read what it has not, so that a row of logits is a function of the text alone. For
            tests: in use the target has read the text when a draft is asked for.

    Attributes:
        interrupt: of the answer that is being made, or `None`.

    Raises:
        SessionError: the graph or the provider cannot be used, or the target is not the graph's.
        ConfigError: the provider is not installed.
    """

    row_rule = None
    owns_cache = False  # it has none

    def __init__(
        self,
        path: Path,
        *,
        target: DecoderSession,
        context_length: int,
        runtime: RuntimeParams,
        head: Head | None = None,
        session: Any = None,
        reads: bool = False,
    ) -> None:
        self.interrupt: Interrupt | None = None
        self.target, self.head, self.reads = target, head, reads
        self.context_length = context_length
        self._path, self._runtime = path, runtime
        self.session = open_session(path, runtime) if session is None else session
        self.provider: str = self.session.get_providers()[0]
        values = (*self.session.get_inputs(), *self.session.get_outputs())
        shapes, types = {v.name: v.shape for v in values}, {v.name: v.type for v in values}
        tensors = _find_attention(path, self.session, shapes, types)
        _check_graph(path, self.session, shapes, target, head, tensors)
        self.vocab_size = int(shapes["logits"][-1])
        target.keep_hidden()
        self._ids = np.zeros((1, 1), np.int64)
        self._hidden = np.zeros(shapes["hidden"], float_type("hidden", types))
        self._state = np.zeros(shapes["state"], float_type("state", types))
        self._logits = np.zeros(shapes["logits"], float_type("logits", types))
        self._binding = self.session.io_binding()
        self._bind()
        self._attention = _Attention(tensors, target, self.provider, self._binding) if tensors else None
        self._hint = _Hint(head, self.vocab_size, self._binding) if _HINT in shapes else None
        self._num_fed = 0  # since the start
        self._context: Tokens | None = None  # the text to start from, until the first token is fed

    @property
    def borrows(self) -> bool:
        """Whether it looks at the target's cache: a call then costs more the longer the text is."""
        return self._attention is not None and self._attention.is_borrowed

    def sync(self, context: Tokens) -> Tokens:
        """Start anew after `context`. What is to feed is always its last token.

        With attention the target is synced, too, when that is fed: it forgets what is not of this text.
        """
        self._context = context
        return context[-1:]

    def forward(self, tokens: Tokens, rows: int) -> Rows:
        """As `Scorer.forward`: one call of the graph for each of `tokens`."""
        assert 1 <= rows <= len(tokens), (rows, len(tokens))
        if len(tokens) == 1:
            return self._step(tokens[0])
        found = np.empty((rows, self.vocab_size), np.float32)
        for i, token in enumerate(tokens, rows - len(tokens)):
            row = self._step(token)
            if i >= 0:
                found[i] = row[0]
        return found

    def rewind(self, length: int) -> None:
        """Start anew from zeros: states before the last are not kept. With attention, after `length` tokens."""
        self._start(None, length)

    def pretend(self, length: int) -> None:
        """As `DecoderSession.pretend`. Without attention a call costs the same after any text."""
        self._start(None, length)

    def close(self) -> None:
        """Release the session. Nothing may be called afterwards."""
        if self._attention is not None:
            self._attention.cache.detach(self._binding)
        del self._binding, self._attention, self.session

    def fork(self, target: DecoderSession) -> RecurrentSession:
        """A session on the same loaded weights for another target. Both may run at once."""
        return RecurrentSession(
            self._path,
            target=target,
            context_length=self.context_length,
            runtime=self._runtime,
            head=self.head,
            session=self.session,
            reads=self.reads,
        )

    def check(self, info: ModelInfo) -> None:
        """Compare what a manifest says of the graph with the graph.

        Raises:
            BundleError: they differ.
        """
        found = self.vocab_size if self.head is None else self.head.vocab_size
        if info.cache != "none" or info.vocab_size != found:
            raise BundleError(
                f"{self._path}: the manifest says cache {info.cache} and vocab_size {info.vocab_size}, but the graph "
                f"has none and {found}; export or copy the bundle again"
            )

    def _start(self, row: NDArray[np.float32] | None, length: int, before: Tokens | None = None) -> None:
        """Start anew: after `length` tokens of the target, and with hints for the text that begins with `before`."""
        self._hidden[...] = 0 if row is None else row
        self._state.fill(0)
        self._num_fed, self._context = 0, None
        if self._attention is not None:
            self._attention.start(length)
        if self._hint is not None:
            self._hint.start(before)

    def _row(self, context: Tokens) -> NDArray[np.float32] | None:
        """What the target computed before the last token of `context`."""
        before, target = context[:-1], self.target
        if self.borrows:
            target.sync(context)  # which compares the text, so that the row need not
            row = target.last_hidden() if len(target.tokens) == len(before) else None
        else:
            row = target.hidden_after(before)
        if row is None and self.reads and len(before):
            target.forward(target.sync(before), 1)
            row = target.hidden_after(before)
        return row

    def _step(self, token: Any) -> Rows:
        if self._context is not None:
            context = self._context
            self._start(self._row(context), len(self.target.tokens), context[:-1])
        elif self._num_fed == 1:
            self._hidden.fill(0)
        self._ids[0, 0] = token
        if self._attention is not None:
            self._attention.prepare(self.context_length)
        if self._hint is not None:
            self._hint.follow(token)
        try:
            self.session.run_with_iobinding(self._binding, self.interrupt and self.interrupt.options)
        except Exception as error:
            self._start(None, 0)
            if self.interrupt is not None and self.interrupt.is_set():
                raise Interrupted from error
            raise SessionError(f"ONNX Runtime failed in a call of the draft: {one_line(error)}") from error
        self._num_fed += 1
        if self._attention is not None:
            self._attention.past_len += 1
        found: Rows = self._logits[0].astype(np.float32, copy=False)
        return found

    def _bind(self) -> None:
        host = OrtDevice("CPUExecutionProvider")
        # One buffer for both: the graph has read the state long before it writes the next.
        state = host.put(self._state)
        self._binding.bind_ortvalue_input("input_ids", host.put(self._ids))
        self._binding.bind_ortvalue_input("hidden", host.put(self._hidden))
        self._binding.bind_ortvalue_input("state", state)
        self._binding.bind_ortvalue_output("next_state", state)
        self._binding.bind_ortvalue_output("logits", host.put(self._logits))


class _Attention:
    """Where a draft looks back: the target's cache of a layer, or else one of its own.

    Attributes:
        cache: with the two tensors that are bound.
        is_borrowed: whether it is the target's.
        past_len: tokens before the one that is fed next, shape (1,).
    """

    def __init__(self, tensors: list[CacheTensor], target: DecoderSession, provider: str, binding: Any) -> None:
        found = target.lend(tensors, binding, provider)
        self.is_borrowed = found is not None
        self.cache = SharedCache(tensors, OrtDevice(provider), binding, _OWN_CAPACITY) if found is None else found
        self._target = target
        self.past_len = np.zeros(1, np.int64)
        binding.bind_ortvalue_input("past_len", OrtDevice("CPUExecutionProvider").put(self.past_len))

    def start(self, length: int) -> None:
        """The next token comes after `length` others, of which a cache of its own has none."""
        self.past_len[0] = length if self.is_borrowed else 0

    def prepare(self, context_length: int) -> None:
        """Make room for a token, behind everything that the target counts on, whatever that has read since."""
        past = int(self.past_len[0])
        if self.is_borrowed and past < len(self._target.tokens):
            self.past_len[0] = past = len(self._target.tokens)
        if past >= context_length:
            raise ContextOverflowError(
                f"{past + 1} tokens do not fit the draft's context of {context_length}: shorten the conversation"
            )
        self.cache.prepare(past, past + 1)


class _Hint:
    """The input `hint`: what `HintIndex` finds in the text up to the token that is fed.

    Args:
        head: as of the session.
        num_columns: of the graph's logits.
    """

    def __init__(self, head: Head | None, num_columns: int, binding: Any) -> None:
        self._head, self._num_columns = head, num_columns
        self._value = np.zeros((1, 2), np.int64)
        self._index = HintIndex()
        self._known = np.empty(0, np.int64)  # the text that the index begins with
        self._is_known = False
        binding.bind_ortvalue_input(_HINT, OrtDevice("CPUExecutionProvider").put(self._value))

    def start(self, before: Tokens | None) -> None:
        """The next token comes after these; `None` where nobody knows."""
        self._is_known = before is not None
        self._value.fill(0)
        if before is not None:
            self._index.cut(common_prefix(self._known, before))
            for token in before[len(self._index) :].tolist():
                self._index.append(token)
            self._known = before.copy()

    def follow(self, token: int) -> None:
        """Find the hint for what comes after `token`, which is fed next."""
        if not self._is_known:
            return
        self._index.append(int(token))
        found, kind = self._index.find()
        column = self._column(found) if kind else None
        self._value[0, 0], self._value[0, 1] = (0, 0) if column is None else (column, kind)

    def _column(self, token: int) -> int | None:
        if self._head is not None:
            return self._head.column(token)
        return token if token < self._num_columns else None


def _find_attention(path: Path, session: Any, shapes: dict[str, Any], types: dict[str, str]) -> list[CacheTensor]:
    """The key and the value that a draft's attention looks at; none where it has no attention."""
    inputs = {v.name: v.shape for v in session.get_inputs()}
    if not inputs.keys() >= _INPUTS | {"past_len"}:
        return []
    tensors = find_cache_tensors(inputs, [v.name for v in session.get_outputs()], types)
    if len(tensors) != 2 or shapes["past_len"] != [1]:
        raise SessionError(f"{path}: the draft's attention must be of one layer, after one `past_len`; export it again")
    return tensors


def _check_graph(
    path: Path,
    session: Any,
    shapes: dict[str, Any],
    target: DecoderSession,
    head: Head | None,
    tensors: list[CacheTensor],
) -> None:
    inputs, outputs = {v.name for v in session.get_inputs()}, {v.name for v in session.get_outputs()}
    wanted = _INPUTS | {t.past for t in tensors} | ({"past_len"} if tensors else set()) | (inputs & {_HINT})
    is_known = inputs == wanted and outputs == _OUTPUTS | {t.present for t in tensors}
    is_known = is_known and shapes["state"] == shapes["next_state"] and shapes.get(_HINT, [1, 2]) == [1, 2]
    rows = (shapes.get(name, []) for name in ("hidden", "state", "logits"))
    if not is_known or shapes["input_ids"] != [1, 1] or not all(map(_is_row, rows)):
        raise SessionError(f"{path} is no draft without a cache: its inputs and outputs are {shapes}; export it again")
    if shapes["hidden"][-1] != target.hidden_size:
        raise SessionError(
            f"{path} starts from rows of {shapes['hidden'][-1]} numbers and its target gives "
            f"{target.hidden_size or 'none'}; export both together"
        )
    if head is not None and len(head.ids) != shapes["logits"][-1]:
        raise SessionError(
            f"{path} has {shapes['logits'][-1]} columns of logits and {len(head.ids)} tokens; export it again"
        )


def _is_row(shape: list[Any]) -> bool:
    """[1, 1, n], with an n that can be."""
    return len(shape) == 3 and shape[:2] == [1, 1] and isinstance(shape[2], int) and 1 <= shape[2] <= MAX_VOCAB
