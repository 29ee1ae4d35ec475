"""Drafts without a cache: rows of `hidden` by position, the session, whole answers. Everything in whole numbers."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import onnx
import pytest

import edgespec
from edgespec.bundle import Bundle, read_bundle
from edgespec.contracts import Interrupted
from edgespec.costs import CostCurve
from edgespec.errors import BundleError, SessionError
from edgespec.head import Head
from edgespec.models import open_draft, open_target
from edgespec.ort import Interrupt
from edgespec.params import RuntimeParams, SamplingParams, SpecParams
from edgespec.probe import measure_pair
from edgespec.proof import Proof, Setting
from edgespec.proof.replay import RecurrentReplay
from edgespec.proof.subject import open_subject
from edgespec.recurrent import RecurrentSession
from edgespec.session import DecoderSession
from tests.tiny import VOCAB, half_right, make_tiny_bundle, rewrite_manifest, tiny_model
from tests.tiny_hidden import EOS_BONUS, HEAD_IDS, draft_logits, make_hidden_bundle, target_hidden

MODEL = tiny_model(eos_bonus=EOS_BONUS)
TABLE = half_right(MODEL).table
TEXT = np.random.default_rng(1).integers(0, VOCAB, 40)
SPEC = SpecParams(drafter="model", num_draft_tokens=3)
GREEDY = SamplingParams(max_new_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module", params=[True, False], ids=["shared", "growing"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Target and draft. Read only."""
    return read_bundle(make_hidden_bundle(tmp_path_factory.mktemp("hidden") / "pair", shared=request.param))


@pytest.fixture
def pair(bundle: Bundle) -> Iterator[tuple[DecoderSession, RecurrentSession]]:
    runtime = RuntimeParams(prefill_chunk=16)
    with closing(open_target(bundle, runtime)) as target, closing(open_draft(bundle, runtime, target)) as draft:
        assert isinstance(draft, RecurrentSession)
        yield target, draft


def drafted(draft: RecurrentSession, context: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Rows of a draft: after the context, then after each of the tokens."""
    pending = draft.sync(context)
    assert len(pending) == 1
    rows = [draft.forward(pending, 1)[0].copy()]
    return np.stack([*rows, *(draft.forward(tokens[i : i + 1], 1)[0].copy() for i in range(len(tokens)))])


def expected_rows(start: np.ndarray, context: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    fed = np.concatenate([context[-1:], tokens])
    return np.stack([draft_logits(MODEL, TABLE, start, fed[: i + 1]) for i in range(len(fed))])


def test_it_goes_on_from_the_target(pair: tuple[DecoderSession, RecurrentSession]) -> None:
    """The first row starts from what the target computed before the last token, the others from its own state."""
    target, draft = pair
    target.forward(TEXT[:29], 2)
    for length in (29, 30):
        context = TEXT[:length]
        found = drafted(draft, context, TEXT[length : length + 3])
        start = target_hidden(MODEL, context[:-1])
        np.testing.assert_array_equal(found, expected_rows(start, context, TEXT[length : length + 3]))
    np.testing.assert_array_equal(draft.head.ids if draft.head else None, HEAD_IDS)


def test_without_a_row_it_starts_from_zeros(pair: tuple[DecoderSession, RecurrentSession]) -> None:
    """A target that has read something else, or keeps the row no more, or nothing at all."""
    target, draft = pair
    nothing = np.zeros(2)
    np.testing.assert_array_equal(drafted(draft, TEXT[:1], TEXT[1:2]), expected_rows(nothing, TEXT[:1], TEXT[1:2]))
    target.forward(TEXT[:20], 1)
    other = TEXT[:21].copy()
    other[3] += 1
    for context in (other, TEXT[:11], TEXT[:30]):
        np.testing.assert_array_equal(drafted(draft, context, TEXT[:2]), expected_rows(nothing, context, TEXT[:2]))


@pytest.mark.parametrize("rule", [None, "even"])
def test_a_row_is_never_another_texts(bundle: Bundle, rule: str | None) -> None:
    """Over a walk of reading, rewinding, other texts and failing calls, each row is what reading it all again gives."""
    rng = np.random.default_rng(7)
    runtime = RuntimeParams(prefill_chunk=8, initial_capacity=8)
    with closing(open_target(bundle, runtime)) as target:
        target.row_rule = rule  # type: ignore[assignment]
        target.keep_hidden()
        text, num_found = TEXT[:6], 0
        for _ in range(300):
            keep = int(rng.integers(1, len(text) + 1))
            text = np.concatenate([text[:keep], rng.integers(0, 3, rng.integers(0, 12))])[:60]
            pending = target.sync(text)
            if rng.random() < 0.2:
                target.interrupt = Interrupt()
                target.interrupt.set()
                with pytest.raises(Interrupted):
                    target.forward(pending, len(pending))
                target.interrupt = None
            elif rng.random() < 0.9:
                rows = int(rng.integers(1, len(pending) + 1))
                target.forward(pending, rows)
                for back in range(min(rows, 8)):
                    assert target.hidden_after(text[: len(text) - back]) is not None
            if rng.random() < 0.2:
                target.rewind(int(rng.integers(0, len(target.tokens) + 1)))
            for length in range(len(text) + 1):
                row = target.hidden_after(text[:length])
                if row is not None:
                    num_found += 1
                    np.testing.assert_array_equal(row, target_hidden(MODEL, text[:length]))
                    assert np.array_equal(target.tokens[:length], text[:length])
        assert num_found > 500


def test_several_tokens_at_once(pair: tuple[DecoderSession, RecurrentSession]) -> None:
    """A call with more tokens goes through them one by one and gives the last rows."""
    target, draft = pair
    target.forward(TEXT[:20], 1)
    rows = drafted(draft, TEXT[:21], TEXT[21:24])
    draft.sync(TEXT[:21])
    np.testing.assert_array_equal(draft.forward(TEXT[20:24], 2), rows[2:])


def test_an_interrupted_draft_starts_anew(pair: tuple[DecoderSession, RecurrentSession]) -> None:
    """A call that was ended leaves nothing behind that the next one would go on from."""
    target, draft = pair
    target.forward(TEXT[:20], 1)
    rows = drafted(draft, TEXT[:21], TEXT[21:24])
    draft.interrupt = Interrupt()
    draft.interrupt.set()
    draft.sync(TEXT[:21])
    with pytest.raises(Interrupted):
        draft.forward(TEXT[20:21], 1)
    draft.interrupt = None
    np.testing.assert_array_equal(drafted(draft, TEXT[:21], TEXT[21:24]), rows)


def answer(engine: edgespec.Engine, prompt: str, params: SamplingParams = GREEDY) -> list[int]:
    stream = engine.generate(prompt, params)
    stream.text()
    return list(stream.token_ids)


PROMPTS = ("The sea", "one two", "a", "def f(x):", "Monday: rain")


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(max_new_tokens=60, temperature=50, seed=3)])
@pytest.mark.parametrize("runtime", [RuntimeParams(), RuntimeParams(exact=True), RuntimeParams(prefill_chunk=4)])
def test_answers_are_the_plain_ones(bundle: Bundle, params: SamplingParams, runtime: RuntimeParams) -> None:
    """Greedy and coupled texts are those without drafts, over many rounds with rejections; about half is accepted."""
    check_answers(bundle.path, params, runtime)


def check_answers(path: Path, params: SamplingParams, runtime: RuntimeParams) -> None:
    """Coupled answers of a bundle with its draft are those without, and some of its drafts are accepted, not all."""
    coupled = SpecParams(drafter="model", num_draft_tokens=3, verifier="coupled")
    with (
        edgespec.load(path, spec=SpecParams(drafter="none", verifier="coupled"), runtime=runtime) as plain,
        edgespec.load(path, spec=coupled, runtime=runtime) as fast,
    ):
        counts = np.zeros(2)
        for prompt in PROMPTS:
            stream = fast.generate(prompt, params)
            stream.text()
            assert list(stream.token_ids) == answer(plain, prompt, params)
            counts += stream.stats.drafted, stream.stats.accepted
        assert 0.2 * counts[0] < counts[1] < 0.9 * counts[0]


def test_the_law_is_the_targets(bundle: Bundle) -> None:
    """The whole losslessness test, which knows where each of the draft's rows started."""
    check_law(bundle.path)


def check_law(path: Path) -> None:
    """A bundle's draft changes nothing of the target's law, and no row of logits."""
    with open_subject(path, RuntimeParams(), with_draft=True) as subject:
        assert isinstance(subject.draft, RecurrentSession)
        settings = [Setting("T 40", SamplingParams(temperature=40)), Setting("greedy", SamplingParams())]
        report = Proof(subject, settings, drafters=["model"], budget=1000, max_samples=600).run()
    assert report.passed, report
    assert report.rows_changed == 0
    assert report.identities[0].result.acceptance > 0.2


def test_remembered_rows_know_their_start(pair: tuple[DecoderSession, RecurrentSession]) -> None:
    """The same text drafted from two places gives two rows, and each is remembered."""
    draft = pair[1]
    draft.reads = True
    replay = RecurrentReplay(draft, recheck_every=3)
    for _ in range(8):
        for start in (20, 21, 22):
            context, tokens = TEXT[:start], TEXT[start:24]
            pending, rows = replay.sync(context), []
            for i in range(len(tokens) + 1):
                rows.append(replay.forward(pending, 1)[0].copy())
                pending = tokens[i : i + 1]
            before = target_hidden(MODEL, context[:-1])
            np.testing.assert_array_equal(np.stack(rows), expected_rows(before, context, tokens))
    assert replay.num_changed == 0
    assert replay.num_rechecked > 0
    assert replay.num_calls < 8 * 12


def test_forks_and_saved_conversations(bundle: Bundle, tmp_path: Path) -> None:
    """Two engines on the same weights do not disturb each other, and a cache file brings the target's text only."""
    with edgespec.load(bundle.path, spec=SPEC) as engine, engine.fork() as fork:
        expected = [answer(engine, prompt) for prompt in PROMPTS]
        streams = [engine.generate(PROMPTS[0], GREEDY), fork.generate(PROMPTS[1], GREEDY)]
        for _ in itertools.zip_longest(*streams):
            pass
        assert [list(stream.token_ids) for stream in streams] == expected[:2]
        engine.save_caches(tmp_path / "caches.npz")
        fork.load_caches(tmp_path / "caches.npz")
        with np.load(tmp_path / "caches.npz") as found:
            assert not [name for name in found.files if name.startswith("draft")]
        stream = fork.generate(PROMPTS[0], GREEDY)
        stream.text()
        assert list(stream.token_ids) == expected[0]
        assert stream.stats.cached_tokens > 0
        assert stream.stats.accepted > 0


def test_closing_releases_the_weights(bundle: Bundle) -> None:
    """Nothing of a closed engine holds ONNX Runtime's sessions, though the engine itself is still there."""
    engine = edgespec.load(bundle.path, spec=SPEC)
    answer(engine, PROMPTS[0])
    assert engine._draft is not None
    bindings = [weakref.ref(session._binding) for session in (engine._target, engine._draft)]
    engine.close()
    gc.collect()
    assert [binding() for binding in bindings] == [None, None]


def test_a_step_has_one_price(pair: tuple[DecoderSession, RecurrentSession]) -> None:
    """It is measured for one row after one length of text: it depends on neither."""
    _, table = measure_pair(*pair, 0.01)
    assert table.rows == (1,)
    assert CostCurve(table, 17).seconds(2000)[1] == table.seconds[0][0]
    assert len(table.pasts) == 1


def test_the_adaptive_policy_drafts_with_it(bundle: Bundle) -> None:
    """Loaded without further options, costs are measured and answers come out the same."""
    with edgespec.load(bundle.path, spec=SpecParams(drafter="model")) as engine:
        found = [answer(engine, prompt) for prompt in PROMPTS]
    with edgespec.load(bundle.path, spec=SpecParams(drafter="none")) as engine:
        assert found == [answer(engine, prompt) for prompt in PROMPTS]


def test_what_does_not_fit_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    """A manifest or a graph that cannot be such a pair: one line."""
    folder = make_hidden_bundle(tmp_path / "pair")
    for change, message in (
        ({"cache": "shared"}, "draft.num_layers"),
        ({"num_layers": 1}, "draft.num_layers"),
        ({"cache": "some"}, "draft.cache"),
    ):
        draft = {**_draft_of(folder), **change}
        other = make_hidden_bundle(tmp_path / message / next(iter(map(str, change.values()))))
        rewrite_manifest(other, draft=draft)
        with pytest.raises(BundleError, match=message):
            read_bundle(other)
    other = make_hidden_bundle(tmp_path / "target")
    rewrite_manifest(other, target={**_draft_of(folder, "target"), "hidden_layers": None})
    with pytest.raises(BundleError, match="needs a target with hidden_layers"):
        read_bundle(other)


def _draft_of(folder: Path, role: str = "draft") -> dict[str, object]:
    import json

    found: dict[str, object] = json.loads((folder / "edgespec.json").read_text(encoding="utf-8"))[role]
    return found


def test_graphs_that_are_something_else(bundle: Bundle, tmp_path: Path) -> None:
    """A target without `hidden`, a decoder in the draft's place, a head of another size."""
    plain = read_bundle(make_tiny_bundle(tmp_path / "plain"))
    runtime = RuntimeParams()
    path = bundle.path / "draft" / "model.onnx"
    with closing(open_target(plain, runtime)) as target, pytest.raises(SessionError, match="its target gives none"):
        RecurrentSession(path, target=target, context_length=64, runtime=runtime)
    with closing(open_target(bundle, runtime)) as target:
        with pytest.raises(SessionError, match="no draft without a cache"):
            RecurrentSession(plain.path / "target" / "model.onnx", target=target, context_length=64, runtime=runtime)
        with pytest.raises(SessionError, match="and 3 tokens"):
            head = Head(np.arange(3), VOCAB)
            RecurrentSession(path, target=target, context_length=64, runtime=runtime, head=head)


@pytest.mark.parametrize("shape", [[], [1, len(HEAD_IDS)], [1, 1, 1, len(HEAD_IDS)]])
def test_logits_of_another_shape_are_refused(shape: list[int], bundle: Bundle, tmp_path: Path) -> None:
    """Before anything is computed: rows of another rank would be cut along the wrong axis."""
    model = onnx.load(bundle.path / "draft" / "model.onnx")
    last = next(node for node in model.graph.node if node.output[0] == "logits")
    last.output[0] = "row"
    if shape:
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(shape), "shape"))
        model.graph.node.append(onnx.helper.make_node("Reshape", ["row", "shape"], ["logits"]))
    else:
        model.graph.node.append(onnx.helper.make_node("ReduceMax", ["row"], ["logits"], keepdims=0))
    (output,) = (value for value in model.graph.output if value.name == "logits")
    output.CopyFrom(onnx.helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, shape))
    onnx.save(model, tmp_path / "model.onnx")
    runtime = RuntimeParams()
    with closing(open_target(bundle, runtime)) as target, pytest.raises(SessionError, match="no draft without a cache"):
        RecurrentSession(tmp_path / "model.onnx", target=target, context_length=64, runtime=runtime)
