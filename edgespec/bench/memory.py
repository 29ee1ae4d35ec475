"""Peak memory of a setting, measured in a process of its own: `python -m edgespec.bench.memory`, JSON in and out."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edgespec.contracts import Tokens
from edgespec.params import RuntimeParams, SamplingParams, SpecParams


def peak_bytes(
    bundle: Path, spec: SpecParams, runtime: RuntimeParams, prompt: Tokens, max_new_tokens: int
) -> int | None:
    """Most memory that a fresh process holds which loads a bundle and answers one prompt. `None` if it fails."""
    job = {"bundle": str(bundle), "spec": asdict(spec), "runtime": asdict(runtime), "prompt": prompt.tolist()}
    done = subprocess.run(
        [sys.executable, "-m", "edgespec.bench.memory"],
        input=json.dumps(job | {"max_new_tokens": max_new_tokens}),
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    peak: int | None = json.loads(done.stdout)["peak_bytes"] if done.returncode == 0 else None
    return peak


def _measure(job: dict[str, Any]) -> int | None:
    from edgespec.engine import load
    from edgespec.memory import peak_memory_bytes

    spec, runtime = SpecParams(**job["spec"]), RuntimeParams(**job["runtime"])
    with load(job["bundle"], spec=spec, runtime=runtime) as engine:
        engine.generate(job["prompt"], SamplingParams(max_new_tokens=job["max_new_tokens"])).text()
        return peak_memory_bytes()


if __name__ == "__main__":
    sys.stdout.write(json.dumps({"peak_bytes": _measure(json.load(sys.stdin))}))
