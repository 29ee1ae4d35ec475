"""`DecoderSession`: one ONNX Runtime session, its cache and the tokens that the cache stands for.

Knows nothing of text, drafts or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.bundle import ModelInfo
from edgespec.contracts import Interrupted, Rows, Tokens
from edgespec.errors import BundleError, ContextOverflowError, SessionError
from edgespec.head import Head
from edgespec.hidden import HIDDEN, HiddenRows
from edgespec.kv import CacheTensor, GrowingCache, SharedCache, find_cache_tensors, float_type
from edgespec.lookup import common_prefix
from edgespec.ort import Interrupt, OrtDevice, one_line, open_session
from edgespec.params import RowInvariance, RuntimeParams

_LEAST_TILE = 16


def padding(num_rows: int, rule: RowInvariance | None) -> int:
    """Dummy rows that a call of `num_rows` rows needs so that each row's logits do not depend on the split."""
    if rule == ">=2":
        # Kernels work in tiles of rows, and a tile of one row takes another path, as a call of one row does: 129 rows
        # are 128 and one (seen with 4-bit weights). Tiles are powers of two of at least this.
        return int(num_rows % _LEAST_TILE == 1)
    if rule == "even":
        return num_rows % 2
    return 0


class DecoderSession:
    """A decoder graph with its cache: the ONNX Runtime `Scorer`.

    Everything is bound once; a call changes numbers in place and rebinds `input_ids` and `logits` only where
    their shapes changed.

    Args:
        path: of the graph.
        context_length: most tokens that the cache may hold.
        runtime: provider, threads, spinning, chunk and capacity. `auto` spinning counts as `off`.
        row_rule: exact mode: every call obeys this rule, by dummy rows that are dropped again.
        lender: a session of the same model in another precision whose cache this one uses instead of its own. What
            the lender has read need not be read again; what this one writes behind it, the lender overwrites.
        session: ONNX Runtime's own, when the graph is loaded already.
        head: the tokens of the graph's head where it has not all of them.

    Attributes:
        hidden_size: width of a row of the graph's output `hidden`, or `None` where it has none.
        interrupt: of the answer that is being made, or `None`.

    Raises:
        SessionError: the graph or the provider cannot be used.
        ConfigError: the provider is not installed.
    """

    def __init__(
        self,
        path: Path,
        *,
        context_length: int,
        runtime: RuntimeParams,
        row_rule: RowInvariance | None = None,
        lender: DecoderSession | None = None,
        session: Any = None,
        head: Head | None = None,
    ) -> None:
        self._row_rule, self._length = row_rule, 0
        self.interrupt: Interrupt | None = None
        self._lender, self._lender_writes = lender, -1
        self._num_writes = 0
        self._path, self._runtime = path, runtime
        self._context_length = context_length
        self._chunk = runtime.prefill_chunk
        self.session = open_session(path, runtime) if session is None else session
        self.provider: str = self.session.get_providers()[0]
        inputs = {i.name: i.shape for i in self.session.get_inputs()}
        outputs = {o.name: o.shape for o in self.session.get_outputs()}
        types = {v.name: v.type for v in (*self.session.get_inputs(), *self.session.get_outputs())}
        self._vocab_size = _vocab_size(outputs, path)
        self.hidden_size = _hidden_size(outputs, path)
        self._hidden: HiddenRows | None = None
        self.head = head
        if head is not None and len(head.ids) != self._vocab_size:
            raise SessionError(
                f"{path} has {self._vocab_size} columns of logits and {len(head.ids)} tokens; export it again"
            )
        self.is_shared = "past_len" in inputs
        self._has_keep = "keep" in inputs
        self._binding = self.session.io_binding()
        capacity = min(runtime.initial_capacity, context_length + 1)
        self._device = OrtDevice(self.provider, pinned=runtime.pinned_logits)
        self._cache = self._open_cache(find_cache_tensors(inputs, list(outputs), types), capacity, path)
        self._host = OrtDevice("CPUExecutionProvider")  # ids, lengths and logits
        self._ids = np.zeros(self._chunk, np.int64)
        self._past_len, self._keep = np.zeros(1, np.int64), np.ones(1, np.int64)
        self._bind_scalars(inputs)
        self._growing_inputs = [n for n in ("attention_mask", "position_ids") if n in inputs]
        self._logit_type = float_type("logits", types)
        self._hidden_type = float_type(HIDDEN, types)
        self._logits: NDArray[Any] = np.empty((0, self._vocab_size), self._logit_type)
        self._id_values: dict[int, Any] = {}  # by number of tokens
        self._logit_values: dict[int, Any] = {}  # by number of rows
        self._bound = (0, 0)
        self._tokens = np.empty(capacity, np.int64)

    @property
    def row_rule(self) -> RowInvariance | None:
        """The rule of exact mode. Changing it empties the cache: what was read under another rule is not the same."""
        return self._row_rule

    @row_rule.setter
    def row_rule(self, rule: RowInvariance | None) -> None:
        if rule != self._row_rule:
            self._row_rule = rule
            self.rewind(0)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def context_length(self) -> int:
        # A dummy row must have a position, too.
        return self._context_length - (self.row_rule is not None)

    @property
    def tokens(self) -> Tokens:
        """What the cache stands for: shape (n,), a view."""
        return self._tokens[: self._length]

    def sync(self, context: Tokens) -> Tokens:
        if self._lender is not None:
            self._borrow(context)
        self.rewind(common_prefix(self.tokens, context[:-1]))
        return context[self._length :]

    def keep_hidden(self) -> None:
        """From now on keep the rows of the graph's output `hidden`, which without this is not even fetched."""
        assert self.hidden_size is not None, self._path
        if self._hidden is None:
            self._hidden = HiddenRows(self.hidden_size, self._hidden_type, self._host, self._binding)
        if self._lender is not None and self._lender.hidden_size == self.hidden_size:
            self._lender.keep_hidden()

    def hidden_after(self, context: Tokens) -> NDArray[np.float32] | None:
        """What the graph computed at the last token of `context`, if the cache stands for all of it.

        Where this session has not computed it, its lender's row, which is the same model's.

        Returns:
            Shape (hidden_size,), valid until the next call; `None` where the cache is of another text, or the row is
            not kept any more (those of the last calls' logits are).
        """
        length = len(context)
        row = self._hidden.row(length - 1) if self._hidden is not None and 0 < length <= self._length else None
        if row is not None and np.array_equal(self._tokens[:length], context):
            return row
        return None if self._lender is None else self._lender.hidden_after(context)

    def last_hidden(self) -> NDArray[np.float32] | None:
        """`hidden_after` of all that is cached, for who knows already what that is."""
        return self._hidden_at(self._length - 1)

    def _hidden_at(self, position: int) -> NDArray[np.float32] | None:
        """Of what a lender has read, its own row: this session has not computed any."""
        row = None if self._hidden is None else self._hidden.row(position)
        return self._lender._hidden_at(position) if row is None and self._lender is not None else row

    def pretend(self, length: int) -> None:
        """Behave as if so many tokens were cached, for measuring what calls cost. To be followed by `rewind(0)`.

        A growing cache has to be filled for that.
        """
        self.rewind(0)
        if self.is_shared:
            self._append(np.zeros(length, np.int64))
        else:
            self.forward(np.zeros(length, np.int64), 1)

    def rewind(self, length: int) -> None:
        assert 0 <= length <= self._length, (length, self._length)
        self._length = length
        if self._hidden is not None:
            self._hidden.rewind(length)

    def forward(self, tokens: Tokens, rows: int) -> Rows:
        assert 1 <= rows <= len(tokens), (rows, len(tokens))
        if self._length + len(tokens) > self.context_length:
            raise ContextOverflowError(
                f"{self._length + len(tokens)} tokens do not fit the context of {self.context_length}: "
                "shorten the conversation"
            )
        while len(tokens) - self._chunk >= rows:
            self._feed(tokens[: self._chunk], 1)
            tokens = tokens[self._chunk :]
        return self._feed(tokens, rows)

    def close(self) -> None:
        """Release the session and the cache. Nothing may be called afterwards."""
        del self._binding, self._cache, self.session
        self._hidden = None  # it holds the binding, and that ONNX Runtime's session

    def fork(self, lender: DecoderSession | None = None) -> DecoderSession:
        """A session on the same loaded weights with a cache of its own, or that of `lender`. Both may run at once."""
        return DecoderSession(
            self._path,
            context_length=self._context_length,
            runtime=self._runtime,
            row_rule=self.row_rule,
            lender=lender,
            session=self.session,
            head=self.head,
        )

    def check(self, info: ModelInfo) -> None:
        """Compare what a manifest says of the graph with the graph.

        Raises:
            BundleError: they differ.
        """
        shapes = list(self.cache_shapes(0).values())
        kind = "shared" if self.is_shared else "growing"
        facts = {"cache": kind, "num_layers": len(shapes) // 2, "num_kv_heads": shapes[0][1], "head_dim": shapes[0][3]}
        if info.hidden_layers is not None:
            facts["has_hidden"] = self.hidden_size is not None
        facts["vocab_size"] = self.vocab_size if self.head is None else self.head.vocab_size
        for name, found in facts.items():
            if getattr(info, name) != found:
                raise BundleError(
                    f"{self._path}: the manifest says {name} {getattr(info, name)} but the graph has {found}; "
                    "export or copy the bundle again"
                )

    @property
    def owns_cache(self) -> bool:
        """Whether the cache is this session's and not that of a lender."""
        return self._lender is None

    def lend(self, tensors: Sequence[CacheTensor], binding: Any, provider: str) -> SharedCache | None:
        """Bind another session's past and present to this one's cache, if that is possible.

        What the borrower writes behind `tokens` is overwritten; before them it must not write.

        Args:
            tensors: of the borrower's graph.
            binding: the borrower's.
            provider: that runs the borrower.
        Returns:
            The cache, to make room in and to detach from, or `None` where it has no such tensors or cannot be shared.
        """
        cache = self._cache
        if not isinstance(cache, SharedCache) or self.provider != provider or not set(tensors) <= set(cache.tensors):
            return None
        cache.attach(binding, tensors)
        return cache

    def cache_shapes(self, length: int) -> dict[str, tuple[int, ...]]:
        """Name in the graph -> shape of every cache tensor for a text of `length` tokens."""
        return {t.past: t.shape(length) for t in self._cache.tensors}

    def cache_types(self) -> dict[str, str]:
        """Name in the graph -> element type of every cache tensor, `float32` or `float16`."""
        return {t.past: t.dtype for t in self._cache.tensors}

    def read_cache(self) -> dict[str, NDArray[Any]]:
        """A copy of what the cache holds of `tokens`, by name, shaped as `cache_shapes` says."""
        arrays = self._cache.read(self._length)
        return {t.past: a for t, a in zip(self._cache.tensors, arrays, strict=True)}

    def write_cache(self, tokens: Tokens, arrays: dict[str, NDArray[Any]]) -> None:
        """Replace the cache by what `read_cache` of another session of the same graph gave for `tokens`."""
        shapes = {name: array.shape for name, array in arrays.items()}
        assert self.owns_cache, "a lender's cache is written through the lender"
        assert shapes == self.cache_shapes(len(tokens)), shapes
        self.rewind(0)
        self._cache.write([arrays[t.past] for t in self._cache.tensors], len(tokens))
        self._append(tokens)

    def _open_cache(self, tensors: list[CacheTensor], capacity: int, path: Path) -> SharedCache | GrowingCache:
        if self._lender is None:
            if self.is_shared:
                return SharedCache(tensors, self._device, self._binding, capacity)
            return GrowingCache(tensors, self._device, self._binding)
        cache = self._lender._cache
        if not isinstance(cache, SharedCache) or cache.tensors != tensors or self._lender.provider != self.provider:
            raise SessionError(f"{path}: the cache of another session cannot be used: its tensors are not the same")
        cache.attach(self._binding)
        return cache

    def _borrow(self, context: Tokens) -> None:
        """Take over what the lender has read of `context`. The lender forgets the rest: it may be overwritten.

        What this session wrote behind that stays as long as the lender has read nothing since.
        """
        lender = self._lender
        assert lender is not None
        lender.sync(context)
        length = lender._length
        is_same = self._length >= length and np.array_equal(self._tokens[:length], lender.tokens)
        if not is_same or self._lender_writes != lender._num_writes:
            self._lender_writes = lender._num_writes
            self.rewind(0)
            self._append(lender.tokens)

    def _feed(self, tokens: Tokens, rows: int) -> Rows:
        """One call of the graph. The tokens count as cached only after it succeeded."""
        pad = padding(len(tokens), self.row_rule)
        size = len(tokens) + pad
        keep = rows + pad
        keep += padding(keep, self.row_rule)
        total = self._length + size
        self._cache.prepare(self._length, total)
        self._bind(tokens, size, keep, total)
        self._num_writes += 1  # also if it fails
        try:
            self.session.run_with_iobinding(self._binding, self.interrupt and self.interrupt.options)
        except Exception as error:
            if self.interrupt is not None and self.interrupt.is_set():
                raise Interrupted from error
            raise SessionError(f"ONNX Runtime failed in a call of {size} tokens: {one_line(error)}") from error
        self._cache.commit(total)
        end = (keep if self._has_keep else size) - pad
        if self._hidden is not None:
            self._hidden.take(end - rows, end, self._length + len(tokens) - rows)
        self._append(tokens)
        return self._logits[end - rows : end].astype(np.float32, copy=False)

    def _bind(self, tokens: Tokens, size: int, keep: int, total: int) -> None:
        if size > len(self._ids):
            self._ids = np.zeros(size, np.int64)
            self._id_values, self._bound = {}, (0, 0)
        self._ids[: len(tokens)] = tokens
        if size > len(tokens):
            self._ids[len(tokens) : size] = tokens[-1]
        self._past_len[0], self._keep[0] = self._length, keep
        if self._growing_inputs:
            self._bind_growing(size, total)
        num_rows = keep if self._has_keep else size
        if self._hidden is not None:
            self._hidden.bind(num_rows)
        if (size, num_rows) == self._bound:
            return
        if num_rows > len(self._logits):
            self._logits = self._device.host_array((num_rows, self._vocab_size), self._logit_type)
            self._logit_values = {}
        # Making an OrtValue takes longer than all the rest here: one for each width is kept.
        if size not in self._id_values:
            self._id_values[size] = self._host.put(self._ids[None, :size])
        if num_rows not in self._logit_values:
            self._logit_values[num_rows] = self._host.put(self._logits[None, :num_rows])
        self._binding.bind_ortvalue_input("input_ids", self._id_values[size])
        self._binding.bind_ortvalue_output("logits", self._logit_values[num_rows])
        self._bound = (size, num_rows)

    def _bind_scalars(self, inputs: dict[str, Any]) -> None:
        for name, array in (("past_len", self._past_len), ("keep", self._keep)):
            if name in inputs:
                self._binding.bind_ortvalue_input(name, self._host.put(array))

    def _bind_growing(self, size: int, total: int) -> None:
        arrays = {
            "attention_mask": np.ones((1, total), np.int64),
            "position_ids": np.arange(self._length, self._length + size, dtype=np.int64)[None],
        }
        for name in self._growing_inputs:
            self._binding.bind_ortvalue_input(name, self._host.put(arrays[name]))

    def _append(self, tokens: Tokens) -> None:
        end = self._length + len(tokens)
        if end > len(self._tokens):
            self._tokens = np.concatenate([self.tokens, np.empty(end, np.int64)])
        self._tokens[self._length : end] = tokens
        self._length = end
        self._num_writes += 1


def _hidden_size(outputs: dict[str, Any], path: Path) -> int | None:
    shape = outputs.get(HIDDEN)
    if shape is not None and not (len(shape) == 3 and isinstance(shape[-1], int)):
        raise SessionError(f"{path}: the graph's output `{HIDDEN}` has the shape {shape}; export it again")
    return None if shape is None else int(shape[-1])


def _vocab_size(outputs: dict[str, Any], path: Path) -> int:
    shape = outputs.get("logits")
    if not shape or not isinstance(shape[-1], int):
        raise SessionError(f"{path}: the graph has no output `logits` with a fixed vocabulary: {shape}")
    return int(shape[-1])
