"""`DecoderSession`: one ONNX Runtime session, its cache and the tokens that the cache stands for.

The only file that imports onnxruntime. Knows nothing of text, drafts or sampling.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.contracts import Rows, Tokens
from edgespec.errors import ConfigError, ContextOverflowError, MissingExtraError, SessionError
from edgespec.kv import CacheTensor, GrowingCache, SharedCache, find_cache_tensors
from edgespec.params import RowInvariance, RuntimeParams, Spinning

_SHORT_PROVIDER_NAMES = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
_PACKAGES = ("onnxruntime", "onnxruntime-gpu")


def import_onnxruntime() -> ModuleType:
    """The onnxruntime module, provided by exactly one of its two packages.

    Raises:
        MissingExtraError: neither package is installed, or both are (they overwrite each other's files).
    """
    installed = [name for name in _PACKAGES if _is_installed(name)]
    if len(installed) == 2:
        raise MissingExtraError(
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other's files: "
            "run `pip uninstall onnxruntime onnxruntime-gpu`, then `pip install` the one you want"
        )
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingExtraError(
            "onnxruntime is not installed: run `pip install 'edgespec[cpu]'` or `pip install 'edgespec[gpu]'`"
        ) from error
    onnxruntime.disable_telemetry_events()
    return onnxruntime  # type: ignore[no-any-return]


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def available_providers() -> list[str]:
    """ONNX Runtime's names of the execution providers that the installed package was built with."""
    return list(import_onnxruntime().get_available_providers())


def provider_name(name: str) -> str:
    """ONNX Runtime's name of a provider.

    Raises:
        ConfigError: the installed onnxruntime package does not have it.
    """
    full = _SHORT_PROVIDER_NAMES.get(name.lower(), name)
    available = available_providers()
    if full not in available:
        raise ConfigError(
            f"provider {name!r} is not in the installed onnxruntime package, which has {', '.join(available)}"
        )
    return full


def padding(num_rows: int, rule: RowInvariance | None) -> int:
    """Dummy rows that a call of `num_rows` rows needs so that each row's logits do not depend on the split."""
    if rule == ">=2":
        return int(num_rows == 1)
    if rule == "even":
        return num_rows % 2
    return 0


class OrtDevice:
    """Tensors in the memory of the provider that runs the graph."""

    def __init__(self, provider: str) -> None:
        self._ort = import_onnxruntime()
        self.name = "cuda" if provider == _SHORT_PROVIDER_NAMES["cuda"] else "cpu"

    def empty(self, shape: Sequence[int]) -> Any:
        if self.name == "cpu":
            return self.put(np.empty(shape, np.float32))
        return self._ort.OrtValue.ortvalue_from_shape_and_type(shape, np.float32, self.name, 0)

    def put(self, array: NDArray[Any]) -> Any:
        """On the CPU the tensor *is* the array's memory."""
        return self._ort.OrtValue.ortvalue_from_numpy(array, self.name, 0)


class DecoderSession:
    """A decoder graph with its cache: the ONNX Runtime `Scorer`.

    Everything is bound once; a call changes numbers in place and rebinds `input_ids` and `logits` only where
    their shapes changed.

    Args:
        path: of the graph.
        context_length: most tokens that the cache may hold.
        runtime: provider, threads, spinning, chunk and capacity. `auto` spinning counts as `stop`.
        row_rule: exact mode: every call obeys this rule, by dummy rows that are dropped again.
        lender: a session of the same model in another precision whose cache this one uses instead of its own. What
            the lender has read need not be read again; what this one writes behind it, the lender overwrites.

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
    ) -> None:
        self.row_rule = row_rule
        self._lender = lender
        self._context_length = context_length
        self._chunk = runtime.prefill_chunk
        self.session = _open_session(path, runtime)
        self.provider: str = self.session.get_providers()[0]
        inputs = {i.name: i.shape for i in self.session.get_inputs()}
        outputs = {o.name: o.shape for o in self.session.get_outputs()}
        self._vocab_size = _vocab_size(outputs, path)
        self.is_shared = "past_len" in inputs
        self._has_keep = "keep" in inputs
        self._binding = self.session.io_binding()
        capacity = min(runtime.initial_capacity, context_length + 1)
        self._cache = self._open_cache(find_cache_tensors(inputs, list(outputs)), capacity, path)
        self._host = OrtDevice("CPUExecutionProvider")  # ids, lengths and logits
        self._ids = np.zeros(self._chunk, np.int64)
        self._past_len, self._keep = np.zeros(1, np.int64), np.ones(1, np.int64)
        self._bind_scalars(inputs)
        self._growing_inputs = [n for n in ("attention_mask", "position_ids") if n in inputs]
        self._logits = np.empty((0, self._vocab_size), np.float32)
        self._bound = (0, 0)
        self._tokens = np.empty(capacity, np.int64)
        self._length = 0

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
        length = min(self._length, len(context) - 1)
        differs = self._tokens[:length] != context[:length]
        self.rewind(int(differs.argmax()) if differs.any() else length)
        return context[self._length :]

    def rewind(self, length: int) -> None:
        assert 0 <= length <= self._length, (length, self._length)
        self._length = length

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

    def _open_cache(self, tensors: list[CacheTensor], capacity: int, path: Path) -> SharedCache | GrowingCache:
        if self._lender is None:
            device = OrtDevice(self.provider)
            if self.is_shared:
                return SharedCache(tensors, device, self._binding, capacity)
            return GrowingCache(tensors, device, self._binding)
        cache = self._lender._cache
        if not isinstance(cache, SharedCache) or cache.tensors != tensors or self._lender.provider != self.provider:
            raise SessionError(f"{path}: the cache of another session cannot be used: its tensors are not the same")
        cache.attach(self._binding)
        return cache

    def _borrow(self, context: Tokens) -> None:
        """Take over what the lender has read of `context`. The lender forgets the rest: it may be overwritten."""
        assert self._lender is not None
        self._lender.sync(context)
        self._length = 0
        self._append(self._lender.tokens)

    def _feed(self, tokens: Tokens, rows: int) -> Rows:
        """One call of the graph. The tokens count as cached only after it succeeded."""
        pad = padding(len(tokens), self.row_rule)
        size = len(tokens) + pad
        keep = rows + pad
        keep += padding(keep, self.row_rule)
        total = self._length + size
        self._cache.prepare(self._length, total)
        self._bind(tokens, size, keep, total)
        try:
            self.session.run_with_iobinding(self._binding)
        except Exception as error:
            raise SessionError(f"ONNX Runtime failed in a call of {size} tokens: {_one_line(error)}") from error
        self._cache.commit(total)
        self._append(tokens)
        end = (keep if self._has_keep else size) - pad
        return self._logits[end - rows : end]

    def _bind(self, tokens: Tokens, size: int, keep: int, total: int) -> None:
        if size > len(self._ids):
            self._ids = np.zeros(size, np.int64)
            self._bound = (0, 0)
        self._ids[: len(tokens)] = tokens
        self._ids[len(tokens) : size] = tokens[-1]
        self._past_len[0], self._keep[0] = self._length, keep
        if self._growing_inputs:
            self._bind_growing(size, total)
        num_rows = keep if self._has_keep else size
        if (size, num_rows) == self._bound:
            return
        if num_rows > len(self._logits):
            self._logits = np.empty((num_rows, self._vocab_size), np.float32)
        self._binding.bind_ortvalue_input("input_ids", self._host.put(self._ids[None, :size]))
        self._binding.bind_ortvalue_output("logits", self._host.put(self._logits[None, :num_rows]))
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


def _open_session(path: Path, runtime: RuntimeParams) -> Any:
    ort = import_onnxruntime()
    provider = provider_name(runtime.provider)
    options = ort.SessionOptions()
    options.log_severity_level = 3  # errors are raised; warnings are for those who debug graphs
    if runtime.threads is not None:
        options.intra_op_num_threads = runtime.threads
    for key, value in _SPINNING[runtime.spinning].items():
        options.add_session_config_entry(key, value)
    try:
        session = ort.InferenceSession(str(path), options, providers=[provider])
    except Exception as error:
        raise SessionError(f"{path}: ONNX Runtime cannot load the graph: {_one_line(error)}") from error
    session.disable_fallback()
    if session.get_providers()[0] != provider:
        raise SessionError(
            f"provider {runtime.provider!r} cannot be used on this machine (its libraries or its device are missing): "
            "install them, or choose `cpu`"
        )
    return session


_SPINNING: dict[Spinning, dict[str, str]] = {
    "on": {},
    "off": {"session.intra_op.allow_spinning": "0"},
    "stop": {"session.force_spinning_stop": "1"},
    "auto": {"session.force_spinning_stop": "1"},
}


def _vocab_size(outputs: dict[str, Any], path: Path) -> int:
    shape = outputs.get("logits")
    if not shape or not isinstance(shape[-1], int):
        raise SessionError(f"{path}: the graph has no output `logits` with a fixed vocabulary: {shape}")
    return int(shape[-1])


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
