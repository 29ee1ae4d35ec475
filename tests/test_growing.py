"""A model that cannot be fused, from the export to speculation on its growing cache."""

from __future__ import annotations

from pathlib import Path

import pytest

import edgespec
from edgespec import RuntimeParams, SamplingParams, SpecParams
from edgespec.export import ExportReport, export_bundle
from tests.export_models import save_llama

pytestmark = pytest.mark.export

PROMPT = "one two three one two three one two"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> ExportReport:
    """Heads of 20 channels, which the fused operator cannot have, and an int4 draft of the same weights."""
    folder = tmp_path_factory.mktemp("growing")
    source = str(save_llama(folder / "odd", head_dim=20))
    return export_bundle(source, folder / "out", draft=source, precision="fp32", draft_precision="int4")


def answer(bundle: Path, drafter: str, exact: bool) -> tuple[list[int], int]:
    """Token ids of a greedy answer, and how many drafted tokens were accepted."""
    spec, runtime = SpecParams(drafter=drafter, num_draft_tokens=4), RuntimeParams(exact=exact)  # type: ignore[arg-type]
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    with edgespec.load(bundle, spec=spec, runtime=runtime) as engine, engine.generate(PROMPT, params) as stream:
        stream.text()
        return list(stream.token_ids), stream.stats.accepted


def test_the_manifest_says_why_and_what_a_step_costs(report: ExportReport) -> None:
    """Reason and measured milliseconds of one and of five rows, for both models."""
    manifest = report.manifest
    assert manifest.draft is not None
    assert (manifest.target.cache, manifest.draft.cache) == ("growing", "growing")
    for role in ("target", "draft"):
        assert "head size 20 is not a multiple of 8" in manifest.check[f"{role}_unfused"]
        assert set(manifest.check[f"{role}_steps"]["ms"]) == {"1", "5"}
        assert all(ms > 0 for ms in manifest.check[f"{role}_steps"]["ms"].values())
    assert manifest.check["target"]["rollback_tv"] < 1e-5


@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_speculation_on_a_growing_cache_changes_nothing(report: ExportReport, drafter: str) -> None:
    """Drafts are accepted and rejected, and greedy text is that of plain decoding, bit by bit in exact mode."""
    exact = report.manifest.target.row_invariance != "none"
    plain, _ = answer(report.path, "none", exact)
    drafted, accepted = answer(report.path, drafter, exact)
    assert drafted == plain
    assert len(plain) == 60
    assert 0 < accepted < 60 or drafter == "ngram"
