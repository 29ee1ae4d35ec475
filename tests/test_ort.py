"""What ONNX Runtime is asked for: to stop, to share its weights, to keep quiet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edgespec.contracts import Interrupted
from edgespec.ort import Interrupt
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
