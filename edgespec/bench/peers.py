"""`Peer`: another engine in a process of its own, asked over pipes. Knows none of them from the inside.

The process runs `peer_worker.py` with a Python that the user names, so that nothing of what the other engine needs has
to be installed beside edgespec. One JSON object a line goes each way.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, get_args

from edgespec.contracts import Tokens
from edgespec.errors import EdgespecError
from edgespec.params import SamplingParams

PeerName = Literal["onnxruntime-genai", "transformers", "openvino", "llama-cpp"]
PEERS: tuple[PeerName, ...] = get_args(PeerName)

_WORKER = Path(__file__).parent / "peer_worker.py"


class PeerError(EdgespecError):
    """Another engine cannot be run: not installed, or not with this model."""


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """What the other engine measured of itself.

    Attributes:
        token_ids: of the answer.
        seconds, first_token_s: from the request to the end, and to the first token.
        target_passes, drafted, accepted: `None` where it does not say.
    """

    token_ids: list[int]
    seconds: float
    first_token_s: float
    target_passes: int | None
    drafted: int | None
    accepted: int | None


class Peer:
    """A running process of another engine. A context manager.

    Args:
        name: of the engine.
        python: that has it installed.
        model: in the format of that engine.
        draft: of its draft model, if it is to have one.
        threads: `None` is its own default.

    Attributes:
        modes: its ways of decoding, plain first.
        version: of the engine.

    Raises:
        PeerError: it cannot be started.
    """

    def __init__(self, name: PeerName, python: str, model: Path, draft: Path | None, threads: int | None) -> None:
        self.name = name
        pipe = subprocess.PIPE
        # -I: neither the folder of the script nor variables that are meant for our Python are to be found there.
        command = [python, "-I", str(_WORKER), name]
        try:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, encoding="utf-8"
            )
        except OSError as error:
            raise PeerError(f"{name}: {python} cannot be run: {error.strerror}") from error
        try:
            ready = self._ask({"model": str(model), "draft": None if draft is None else str(draft), "threads": threads})
        except PeerError:
            self.close()
            raise
        self.modes: list[str] = ready["modes"]
        self.version: str = ready["version"]

    def answer(self, mode: str, prompt: Tokens, params: SamplingParams) -> PeerAnswer:
        """Answer a prompt.

        Raises:
            PeerError: the engine failed.
        """
        job = {"mode": mode, "prompt": prompt.tolist(), "max_new_tokens": params.max_new_tokens}
        job |= {"temperature": params.temperature, "top_p": params.top_p, "seed": params.seed}
        found = self._ask(job)
        counts = (found.get(name) for name in ("target_passes", "drafted", "accepted"))
        return PeerAnswer(found["token_ids"], found["seconds"], found["first_token_s"], *counts)

    def peak_bytes(self) -> int | None:
        """Most memory that the process has held with all its modes."""
        peak: int | None = self._ask({"mode": "peak"})["peak_bytes"]
        return peak

    def close(self) -> None:
        """End the process."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, job: dict[str, Any]) -> dict[str, Any]:
        to, back = self._process.stdin, self._process.stdout
        assert to is not None
        assert back is not None
        try:
            to.write(json.dumps(job) + "\n")
            to.flush()
            found = _next_object(back)
        except OSError:
            found = None
        if found is None:
            raise PeerError(f"{self.name}: its process ended without a word")
        if "error" in found:
            raise PeerError(f"{self.name}: {found['error']}")
        return found


def _next_object(stream: IO[str]) -> dict[str, Any] | None:
    """The next line that is a JSON object; the libraries of the other side may print what they like."""
    for line in stream:
        if line.startswith("{"):
            try:
                found: dict[str, Any] = json.loads(line)
            except ValueError:
                continue
            return found
    return None
