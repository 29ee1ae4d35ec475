"""The GPU path: on a GPU where there is one, and as far as a CPU can go where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from edgespec.export import export_bundle
from edgespec.ort import available_providers
from edgespec.params import RuntimeParams
from edgespec.session import DecoderSession
from tests.export_models import save_llama, total_variation

SMOKE = Path(__file__).parent.parent / "benchmarks" / "gpu_smoke.py"


@pytest.mark.export
def test_the_smoke_script_runs_dry() -> None:
    """Tiny models on the CPU go through every part of it."""
    run = subprocess.run([sys.executable, str(SMOKE), "--dry-run"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    lines = {line["what"]: line for line in map(json.loads, run.stdout.splitlines())}
    assert lines["done"]["failures"] == []
    for role in ("target", "draft"):
        assert lines[f"{role} against the CPU"] == {"what": f"{role} against the CPU", "parity": 0.0, "rollback": 0.0}
        for words in ("", ", rows in pinned memory"):
            assert set(lines[f"{role} ms by rows of a call{words}"]) == {"what", "1", "2", "5", "9"}
    for where in ("drafter model", "draft on the CPU", "target on the CPU"):
        assert set(lines[f"answer, {where}"]) == {"what", "tokens_per_s", "accepted"}


@pytest.mark.gpu
@pytest.mark.export
@pytest.mark.skipif("CUDAExecutionProvider" not in available_providers(), reason="no CUDA provider")
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int4"])
def test_cuda_computes_what_the_cpu_computes(precision: str, tmp_path: Path) -> None:
    """Reading, growing the cache beyond its first capacity, rolling back and verifying, on the device."""
    llama = save_llama(tmp_path / "llama")
    report = export_bundle(str(llama), tmp_path / "out", precision=precision)  # type: ignore[arg-type]
    tokens = np.random.default_rng(2).integers(0, 259, 60)
    rows = []
    for provider in ("cpu", "cuda"):
        runtime = RuntimeParams(provider=provider, initial_capacity=16)
        path = report.path / report.manifest.target.path
        with closing(DecoderSession(path, context_length=512, runtime=runtime)) as session:
            found = [session.forward(tokens[:40], 40).copy()]
            session.forward(tokens[:5], 5)
            session.rewind(40)
            found += [session.forward(tokens[at : at + 5], 5).copy() for at in range(40, 60, 5)]
            rows.append(np.concatenate(found))
    assert total_variation(*rows).mean() < (0.15 if precision == "int4" else 0.01)
