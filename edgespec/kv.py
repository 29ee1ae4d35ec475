"""The key/value cache: names and shapes in the graph, growth, truncation, for both cache kinds.

`SharedCache`: past and present are one buffer of a capacity, the graph is told how much of it counts.
`GrowingCache`: the graph concatenates; each call's present is the next call's past.

Knows nothing of tokens. Tensors are made by the device that the session passes in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.bundle import MAX_HEAD_DIM, MAX_KV_HEADS
from edgespec.errors import SessionError

_FLOATS = {"tensor(float)": "float32", "tensor(float16)": "float16"}
_PAST = re.compile(r"past_key_values\.(\d+)\.(key|value)")


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """One key or value tensor: its two names in the graph, and the fixed part of [1, heads, length, head_dim].

    Attributes:
        dtype: `float32`, or `float16` in graphs of half precision.
    """

    past: str
    present: str
    heads: int
    head_dim: int
    dtype: str = "float32"

    def shape(self, length: int) -> tuple[int, int, int, int]:
        return (1, self.heads, length, self.head_dim)


class Device(Protocol):
    """Where tensors live. `Any` below is an OrtValue."""

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        """A tensor whose contents do not matter."""

    def put(self, array: NDArray[Any]) -> Any:
        """A tensor with these contents."""


def find_cache_tensors(
    inputs: dict[str, list[Any]], outputs: Sequence[str], types: Mapping[str, str] | None = None
) -> list[CacheTensor]:
    """Pair every `past_key_values.N.key` input with its `present.N.key` output.

    Args:
        inputs: name -> shape (numbers, or names of dimensions that vary).
        outputs: names.
        types: name -> element type as ONNX Runtime spells it; float32 where it is not said.
    Raises:
        SessionError: there are none, an output is missing, heads and head size are no numbers or larger than in any
            model, or the elements are no floats that are known.
    """
    tensors = []
    for past, dims in inputs.items():
        match = _PAST.fullmatch(past)
        if match is None:
            continue
        present = f"present.{match[1]}.{match[2]}"
        if present not in outputs:
            raise SessionError(f"the graph has the input {past} but not the output {present}")
        if len(dims) != 4 or not (_is_size(dims[1], MAX_KV_HEADS) and _is_size(dims[3], MAX_HEAD_DIM)):
            raise SessionError(f"{past} has the shape {dims}; it must be [1, heads, length, head size]")
        tensors.append(CacheTensor(past, present, dims[1], dims[3], float_type(past, types or {})))
    if not tensors:
        raise SessionError("the graph has no past_key_values inputs: it is not a decoder with a cache")
    return tensors


def _is_size(size: Any, most: int) -> bool:
    return isinstance(size, int) and 1 <= size <= most


def float_type(name: str, types: Mapping[str, str]) -> str:
    """NumPy's name of a tensor's element type.

    Raises:
        SessionError: it is neither float32 nor float16.
    """
    kind = types.get(name, "tensor(float)")
    if kind not in _FLOATS:
        raise SessionError(f"{name} has elements of type {kind}; only float32 and float16 are known")
    return _FLOATS[kind]


class SharedCache:
    """One buffer a tensor, bound once as past and as present; rolling back is telling the graph a smaller length.

    Several sessions may be bound to one cache, or to some of its tensors (`attach`).
    """

    def __init__(self, tensors: list[CacheTensor], device: Device, binding: Any, capacity: int) -> None:
        self.tensors, self._device = tensors, device
        self._bindings: list[tuple[Any, Sequence[CacheTensor]]] = [(binding, tensors)]
        self.capacity = capacity
        self._buffers = [device.empty(t.shape(capacity), t.dtype) for t in tensors]
        self._bind()

    def attach(self, binding: Any, tensors: Sequence[CacheTensor] | None = None) -> None:
        """Bind another session's past and present to these buffers, now and whenever they grow.

        Args:
            tensors: those that the session has, by default all.
        """
        self._bindings.append((binding, self.tensors if tensors is None else tensors))
        self._bind()

    def detach(self, binding: Any) -> None:
        """Let go of a session that was attached."""
        self._bindings = [pair for pair in self._bindings if pair[0] is not binding]

    def prepare(self, used: int, total: int) -> None:
        """Make room for `total` tokens, keeping the first `used`. Doubles, so that growing stays cheap."""
        if total <= self.capacity:
            return
        capacity = self.capacity
        while capacity < total:
            capacity *= 2
        self._buffers = [self._grown(t, b, used, capacity) for t, b in zip(self.tensors, self._buffers, strict=True)]
        self.capacity = capacity
        self._bind()

    def commit(self, total: int) -> None:
        """The buffer already holds what the call wrote."""

    def read(self, length: int) -> list[NDArray[Any]]:
        """Copies of the first `length` tokens of every tensor."""
        return [buffer.numpy()[:, :, :length].copy() for buffer in self._buffers]

    def write(self, arrays: Sequence[NDArray[Any]], length: int) -> None:
        """Replace everything by these, shaped for `length` tokens."""
        while self.capacity < length:
            self.capacity *= 2
        self._buffers = [self._filled(t, a, self.capacity) for t, a in zip(self.tensors, arrays, strict=True)]
        self._bind()

    def _grown(self, tensor: CacheTensor, buffer: Any, used: int, capacity: int) -> Any:
        return self._filled(tensor, buffer.numpy()[:, :, :used], capacity)

    def _filled(self, tensor: CacheTensor, array: NDArray[Any], capacity: int) -> Any:
        larger = np.zeros(tensor.shape(capacity), tensor.dtype)
        larger[:, :, : array.shape[2]] = array
        return self._device.put(larger)

    def _bind(self) -> None:
        buffers = dict(zip(self.tensors, self._buffers, strict=True))
        for binding, tensors in self._bindings:
            for tensor in tensors:
                binding.bind_ortvalue_input(tensor.past, buffers[tensor])
                binding.bind_ortvalue_output(tensor.present, buffers[tensor])


class GrowingCache:
    """Exact-length tensors, replaced by each call; rolling back slices (a copy)."""

    def __init__(self, tensors: list[CacheTensor], device: Device, binding: Any) -> None:
        self.tensors, self._device, self._binding = tensors, device, binding
        self._values = [device.empty(t.shape(0), t.dtype) for t in tensors]
        self._presents = self._values
        self._length = 0

    def prepare(self, used: int, total: int) -> None:
        """Bind the first `used` tokens as past and new tensors for `total` tokens as present."""
        if used < self._length:
            self._values = [self._device.put(v.numpy()[:, :, :used].copy()) for v in self._values]
            self._length = used
        self._presents = [self._device.empty(t.shape(total), t.dtype) for t in self.tensors]
        for tensor, past, present in zip(self.tensors, self._values, self._presents, strict=True):
            self._binding.bind_ortvalue_input(tensor.past, past)
            self._binding.bind_ortvalue_output(tensor.present, present)

    def commit(self, total: int) -> None:
        """Take what the call wrote as the next past. Not called when the call failed: the old past stands."""
        self._values, self._length = self._presents, total

    def read(self, length: int) -> list[NDArray[Any]]:
        """Copies of the first `length` tokens of every tensor."""
        return [value.numpy()[:, :, :length].copy() for value in self._values]

    def write(self, arrays: Sequence[NDArray[Any]], length: int) -> None:
        """Replace everything by these, shaped for `length` tokens."""
        self._values, self._length = [self._device.put(a.copy()) for a in arrays], length
