"""What ONNX Runtime is asked for: to stop, to share its weights, to keep quiet."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgespec.contracts import Interrupted
from edgespec.errors import SessionError
from edgespec.ort import Interrupt, OrtDevice
from edgespec.params import RuntimeParams
from edgespec.session import DecoderSession
from tests.tiny import reference_logits, save_graph, tiny_model

MODEL = tiny_model()
SMALL = RuntimeParams(initial_capacity=8, prefill_chunk=4)


@pytest.fixture(params=[True, False], ids=["shared", "growing"])
def session(request: pytest.FixtureRequest, tmp_path: Path) -> DecoderSession:
    path = save_graph(MODEL, tmp_path / "model.onnx", shared=request.param)
    return DecoderSession(path, context_length=200, runtime=SMALL)


def is_right(session: DecoderSession, tokens: np.ndarray) -> bool:
    row = session.forward(session.sync(tokens), 1)[0]
    return np.array_equal(row, reference_logits(MODEL, tokens))


def test_an_interrupted_call_never_was(session: DecoderSession) -> None:
    """The cache is as before, further calls are refused, and without the flag all goes on."""
    session.forward(np.array([1, 2, 3]), 1)
    session.interrupt = Interrupt()
    session.forward(np.array([4]), 1)
    session.interrupt.set()
    for _ in range(2):
        with pytest.raises(Interrupted):
            session.forward(np.array([5, 6, 7]), 1)
        assert session.tokens.tolist() == [1, 2, 3, 4]
    session.interrupt = None
    assert is_right(session, np.array([1, 2, 3, 4, 9]))


def test_a_fork_has_a_cache_of_its_own(session: DecoderSession) -> None:
    """One set of weights, two texts, fed in turn; closing one leaves the other."""
    fork = session.fork()
    assert fork.session is session.session
    a, b = np.arange(10, 60), np.arange(100, 150)
    for end in range(1, 50, 7):
        assert is_right(session, a[:end])
        assert is_right(fork, b[:end])
    session.close()
    assert is_right(fork, b)


@pytest.mark.parametrize("count", [0, 1, 5, 100])
def test_a_cache_can_be_moved(session: DecoderSession, count: int) -> None:
    """What is read out of one session and written into another stands for the same text, and is a copy."""
    tokens = np.arange(3, 3 + count)
    other = session.fork()
    is_right(other, np.arange(50, 90))
    if count:
        session.forward(tokens, 1)
    arrays = session.read_cache()
    assert {name: array.shape for name, array in arrays.items()} == session.cache_shapes(count)
    other.write_cache(session.tokens, arrays)
    session.rewind(0)
    session.forward(np.full(20, 7), 1)
    assert np.array_equal(other.tokens, tokens)
    assert is_right(other, np.append(tokens, [8, 9]))
    assert is_right(other, np.append(tokens[: count // 2], [8, 9]))


def test_importing_leaves_no_mark(tmp_path: Path) -> None:
    """No identifier of the device appears in the user's folders, and the environment is as before."""
    code = (
        "import os; from edgespec.ort import import_onnxruntime as f; before = dict(os.environ); f(); f();"
        "assert before == os.environ"
    )
    home = {name: str(tmp_path) for name in ("HOME", "USERPROFILE", "TMPDIR", "TEMP", "TMP", "XDG_CACHE_HOME")}
    environment = {k: v for k, v in os.environ.items() if k != "ORT_DISABLE_TELEMETRY"} | home
    environment["PYTHONPATH"] = str(Path(__file__).parent.parent)
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


class Driver:
    """CUDA's driver as far as it is called: what was called, and which call fails."""

    def __init__(self, failing: str = "") -> None:
        self.calls: list[tuple[str, tuple[object, ...]]] = []
        self.failing = failing

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: object) -> int:
            self.calls.append((name, arguments))
            return 712 if name == self.failing else 0

        return call

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


BEFORE = ["cuInit", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2"]
AFTER = ["cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRelease_v2"]


def test_pinned_memory_is_released_with_its_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is told the array's own memory, once for all views, and that it ends before it is freed."""
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    array = OrtDevice("CUDAExecutionProvider", pinned=True).host_array((3, 5), "float16")
    assert (array.shape, array.dtype) == ((3, 5), np.float16)
    assert driver.names == [*BEFORE, "cuMemHostRegister_v2", *AFTER]
    address, size, flags = driver.calls[3][1]
    assert (address.value, size.value, flags) == (array.ctypes.data, 30, 1)
    view = array[None, :2]
    del array
    gc.collect()
    assert len(driver.calls) == 6
    del view
    gc.collect()
    assert driver.names[6:] == [*BEFORE, "cuMemHostUnregister", *AFTER]
    assert driver.calls[9][1][0].value == address.value


@pytest.mark.parametrize("failing", ["cuInit", "cuMemHostRegister_v2"])
def test_memory_that_cannot_be_pinned_is_an_error(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left half done, and nothing is silently slower."""
    driver = Driver(failing)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    with pytest.raises(SessionError, match=rf"{failing} gave 712.*leave out `pinned_logits`"):
        OrtDevice("CUDAExecutionProvider", pinned=True).host_array((2, 2), "float32")
    assert driver.names == ([failing] if failing == "cuInit" else [*BEFORE, failing, *AFTER])


def test_without_a_driver_pinning_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a device."""

    def missing(name: str) -> None:
        raise OSError(f"{name}: no such file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(SessionError, match="no such file"):
        OrtDevice("CUDAExecutionProvider", pinned=True).host_array((2, 2), "float32")


@pytest.mark.parametrize("provider", ["CPUExecutionProvider", "DmlExecutionProvider", "CUDAExecutionProvider"])
def test_nothing_else_is_pinned(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other providers have nothing to pin; CUDA only where it is asked for, and nothing where there are no bytes."""
    monkeypatch.setattr(ctypes, "CDLL", None)
    asked = provider != "CUDAExecutionProvider"
    assert OrtDevice(provider, pinned=asked).host_array((2, 3), "float32").shape == (2, 3)
    assert OrtDevice("CUDAExecutionProvider", pinned=True).host_array((0, 3), "float32").shape == (0, 3)


def test_rows_of_logits_are_pinned_where_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session takes the array for them from its device, and reads out of it what the graph wrote."""
    made: list[np.ndarray] = []

    def host_array(self: OrtDevice, shape: tuple[int, int], dtype: str) -> np.ndarray:
        made.append(np.empty(shape, dtype))
        return made[-1]

    monkeypatch.setattr(OrtDevice, "host_array", host_array)
    path = save_graph(MODEL, tmp_path / "model.onnx")
    session = DecoderSession(path, context_length=200, runtime=SMALL)
    tokens = np.arange(5, 12)
    rows = session.forward(tokens, 3)
    assert np.shares_memory(rows, made[-1])
    assert np.array_equal(rows[-1], reference_logits(MODEL, tokens))
