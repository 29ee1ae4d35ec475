"""Heads over a part of the vocabulary: the file, the spreading, and a session that uses them."""

from __future__ import annotations

import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import edgespec
from edgespec.bundle import list_files, model_head, read_bundle, write_manifest
from edgespec.decoder import SpeculativeDecoder
from edgespec.drafters import ModelDrafter
from edgespec.errors import BundleError, SessionError
from edgespec.head import Head, Spreader, read_head
from edgespec.noise import Noise
from edgespec.params import RuntimeParams, SamplingParams, SpecParams
from edgespec.proof.identity import proposal
from edgespec.session import DecoderSession
from edgespec.shaper import Shaper
from edgespec.stats import GenerationStats
from edgespec.testing import TableScorer
from tests.naive import naive_adjust, naive_shape


def save(file: Path, ids: object, dtype: type = np.int32) -> Path:
    np.save(file, np.asarray(ids, dtype))
    return file


def test_rows_are_spread() -> None:
    """Each column lands on its token, everything else is impossible, and what a caller overwrote does not stay."""
    spread = Spreader(Head(np.array([1, 4]), 6))
    rows = spread(np.array([[0.5, 2.0], [3.0, -1.0]], np.float32))
    nothing = -np.inf
    np.testing.assert_array_equal(
        rows, [[nothing, 0.5, nothing, nothing, 2, nothing], [nothing, 3, nothing, nothing, -1, nothing]]
    )
    rows[:] = 7
    np.testing.assert_array_equal(spread(np.zeros((1, 2), np.float32)), [[nothing, 0, nothing, nothing, 0, nothing]])


def test_a_head_is_read(tmp_path: Path) -> None:
    """Ids come back as they were written."""
    head = read_head(save(tmp_path / "ids.npy", [0, 3, 9]), 10)
    assert head.ids.tolist() == [0, 3, 9]
    assert head.vocab_size == 10


@pytest.mark.parametrize("ids", [[3, 2], [2, 2], [0, 10], [-1, 2], [], [[1, 2]], list(range(4000))])
def test_a_wrong_head_is_refused(ids: object, tmp_path: Path) -> None:
    """Ids that do not ascend, are outside the vocabulary, or are too many are refused by the file's name."""
    with pytest.raises(BundleError, match=r"ids\.npy"):
        read_head(save(tmp_path / "ids.npy", ids), 10)


def test_another_file_is_no_head(tmp_path: Path) -> None:
    """Neither other types, nor pickles, nor other files."""
    save(tmp_path / "ids.npy", [1.0, 2.0], float)
    np.save(tmp_path / "pickle.npy", np.array([{}], object))
    (tmp_path / "text.npy").write_text("no", encoding="utf-8")
    for name in ("ids", "pickle", "text", "missing"):
        with pytest.raises(BundleError):
            read_head(tmp_path / f"{name}.npy", 10)


@pytest.mark.parametrize(
    "header",
    ["{'descr': '<i4', 'fortran_order': False, 'shape': (1 << 40,)}", "(" * 3000, "-" * 3000, "(" * 12000],
    ids=["huge", "parentheses", "signs", "long"],
)
def test_a_hostile_header_is_refused(header: str, tmp_path: Path) -> None:
    """One that promises terabytes, or that Python's own parser fails on: one line."""
    text = header.replace("1 << 40", str(1 << 40)).encode() + b"\n"
    (tmp_path / "ids.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(8))
    with pytest.raises(BundleError, match=r"ids\.npy does not say") as caught:
        read_head(tmp_path / "ids.npy", 5000)
    assert "\n" not in str(caught.value)


@pytest.fixture
def reduced(tiny_pair: Path, tmp_path: Path) -> Path:
    """A bundle whose draft has columns for all of its tokens, but shifted by one: token t + 1 in column t."""
    folder = Path(shutil.copytree(tiny_pair, tmp_path / "reduced"))
    manifest = read_bundle(folder).manifest
    assert manifest.draft is not None
    graph = folder / manifest.draft.path
    with closing(DecoderSession(graph, context_length=64, runtime=RuntimeParams())) as session:
        columns = session.vocab_size
    save(graph.with_name("head_ids.npy"), np.arange(1, columns + 1))
    name = f"{Path(manifest.draft.path).parent.as_posix()}/head_ids.npy"
    draft = replace(manifest.draft, head_ids=name, vocab_size=columns + 1)
    write_manifest(replace(manifest, draft=draft, files=list_files(folder)), folder)
    return folder


def test_a_session_says_what_its_columns_mean(reduced: Path) -> None:
    """Rows are the graph's, through a fork, too, and the head comes with them."""
    bundle = read_bundle(reduced)
    draft = bundle.manifest.draft
    assert draft is not None
    head, tokens = model_head(bundle, draft), np.array([3, 5, 4])
    assert head is not None
    path = bundle.path / draft.path
    with closing(DecoderSession(path, context_length=64, runtime=RuntimeParams())) as plain:
        expected = plain.forward(tokens, 2).copy()
    with closing(DecoderSession(path, context_length=64, runtime=RuntimeParams(), head=head)) as session:
        fork = session.fork()
        for found in (session.forward(tokens, 2), fork.forward(tokens, 2)):
            np.testing.assert_array_equal(found, expected)
        assert session.head is head
        assert fork.head is head
        assert session.vocab_size == head.vocab_size - 1
        session.check(draft)


def test_answers_do_not_depend_on_the_head(reduced: Path, tiny_pair: Path) -> None:
    """With a draft that can draft some tokens only, greedy text is that without a draft; sampled text ends well."""
    messages = [{"role": "user", "content": "count"}]
    texts = []
    for drafter in ("model", "ngram"):
        with edgespec.load(reduced, spec=SpecParams(drafter=drafter, num_draft_tokens=3)) as engine:
            stream = engine.chat(messages, SamplingParams(max_new_tokens=40, ignore_eos=True))
            texts.append(stream.text())
            if drafter == "model":
                assert stream.stats.drafted
                assert engine.chat(
                    messages, SamplingParams(temperature=1, max_new_tokens=20, seed=1, ignore_eos=True)
                ).text()
    assert texts[0] == texts[1]


def test_a_head_of_another_size_is_refused(reduced: Path) -> None:
    """Ids and columns must be as many."""
    bundle = read_bundle(reduced)
    draft = bundle.manifest.draft
    assert draft is not None
    with pytest.raises(SessionError, match="columns"):
        DecoderSession(
            bundle.path / draft.path, context_length=64, runtime=RuntimeParams(), head=Head(np.arange(3), 10)
        )


def test_the_file_must_be_listed(reduced: Path) -> None:
    """A head that the manifest's hashes do not cover is refused."""
    manifest = read_bundle(reduced).manifest
    assert manifest.draft is not None
    files = {name: info for name, info in manifest.files.items() if not name.endswith("head_ids.npy")}
    write_manifest(replace(manifest, files=files), reduced)
    with pytest.raises(BundleError, match="head_ids"):
        read_bundle(reduced)


def test_a_target_has_all_tokens(reduced: Path) -> None:
    """A manifest that gives the target a part of a head is refused."""
    manifest = read_bundle(reduced).manifest
    assert manifest.draft is not None
    target = replace(manifest.target, head_ids=manifest.draft.head_ids)
    write_manifest(replace(manifest, target=target), reduced)
    with pytest.raises(BundleError, match="target's head"):
        read_bundle(reduced)


# drafts from such a head: 6 of 12 tokens, one of them (11) no token of the target

IDS, COLUMNS, WIDTH = np.array([0, 2, 3, 7, 9, 11]), 12, 10
P_LOGITS, Q_LOGITS = np.random.default_rng(7).standard_normal((2, COLUMNS, COLUMNS)).astype(np.float32) * 2
CUTS = [
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1, top_p=0.7),
    SamplingParams(temperature=0.9, top_k=3),
    SamplingParams(temperature=1, top_k=7),
    SamplingParams(temperature=1.3, min_p=0.2),
    SamplingParams(temperature=1, typical_p=0.6),
]
BY_ID = [
    SamplingParams(temperature=1, top_p=0.8, logit_bias={3: 2.0, 5: 4.0}),
    SamplingParams(temperature=1, repetition_penalty=1.5),
    SamplingParams(temperature=1, top_k=3, banned_tokens=[2]),
]


def drafter(*, is_coupled: bool = False) -> ModelDrafter:
    scorer = TableScorer(lambda context: Q_LOGITS[context[-1], IDS], len(IDS), head=Head(IDS, COLUMNS))
    return ModelDrafter(scorer, WIDTH, is_coupled=is_coupled)


def spread(token: int) -> np.ndarray:
    """The head's logits after a token, over the target's columns, by the definition."""
    row = np.full(WIDTH, -np.inf)
    for other in IDS:
        if other < WIDTH:
            row[other] = Q_LOGITS[token, other]
    return row


@pytest.mark.parametrize("params", [*CUTS, *BY_ID], ids=str)
def test_q_is_what_it_is_over_the_whole_vocabulary(params: SamplingParams) -> None:
    """By the definitions on spread rows; short where nothing goes by token ids; drawn from what it says."""
    context, firsts = np.array([3, 7]), []
    for seed in range(1500):
        draft = drafter().propose(context, 2, Shaper(params, context[:1]), Noise(seed))
        firsts.append(int(draft.tokens[0]))
    text = context.tolist()
    for i, token in enumerate(draft.tokens.tolist()):
        expected = naive_shape(naive_adjust(spread(text[-1]), text, 1, params), params)
        assert np.abs(proposal(draft, i, WIDTH) - expected).max() < 1e-6
        assert draft.q(i) == pytest.approx(expected[token], abs=1e-6)
        text.append(token)
    assert draft.dists.shape[1] == (len(IDS) - 1 if params in CUTS else WIDTH)
    expected = naive_shape(naive_adjust(spread(7), [3, 7], 1, params), params)
    counts, possible = np.bincount(firsts, minlength=WIDTH), expected > 0
    assert counts[~possible].sum() == 0
    assert stats.chisquare(counts[possible], expected[possible] * len(firsts)).pvalue > 1e-4


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(logit_bias={3: 9.0}, banned_tokens=[2])], ids=str)
def test_greedy_drafts_are_the_head_s_arg_max(params: SamplingParams) -> None:
    """As token ids, whether rows stay short or not."""
    draft, text = drafter().propose(np.array([4]), 4, Shaper(params), Noise(0)), [4]
    for token in draft.tokens.tolist():
        assert token == naive_adjust(spread(text[-1]), text, 1, params).argmax()
        text.append(token)
    assert len(draft) == 4


@pytest.mark.parametrize("params", [CUTS[1], BY_ID[0]], ids=str)
def test_text_is_distributed_as_the_target_with_such_a_draft(params: SamplingParams) -> None:
    """Pairs of tokens through the whole loop against the product of the target's rows; coupled, text for text."""
    target = TableScorer(lambda context: P_LOGITS[context[-1], :WIDTH], WIDTH)
    params, trials, pairs = replace(params, max_new_tokens=2), 3000, np.zeros((WIDTH, WIDTH))

    def emit(one: ModelDrafter | None, seed: int, verifier: str) -> list[int]:
        loop = SpeculativeDecoder(target, one, num_draft_tokens=2, eos_token_ids=(), prefill_chunk=4, verifier=verifier)
        rounds = loop.generate(np.array([4]), replace(params, seed=seed), GenerationStats(), draft_first=True)
        return [token for step in rounds for token in step.tokens]

    for seed in range(trials):
        pairs[tuple(emit(drafter(), seed, "standard"))] += 1
    rows = np.stack([naive_shape(naive_adjust(P_LOGITS[t, :WIDTH], [t], 1, params), params) for t in range(WIDTH)])
    expected = (rows[4][:, None] * rows).ravel() * trials
    possible, counts = expected > 0, pairs.ravel()
    assert counts[~possible].sum() == 0
    assert stats.chisquare(counts[possible], expected[possible]).pvalue > 1e-4
    for seed in range(40):
        assert emit(drafter(is_coupled=True), seed, "coupled") == emit(None, seed, "coupled")
