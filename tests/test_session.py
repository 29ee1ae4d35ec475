"""The ONNX Runtime session with a tiny decoder whose logits depend on every cached token."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import numpy as np
import onnx
import pytest

from edgespec import ort as ort_module
from edgespec.errors import ConfigError, ContextOverflowError, MissingExtraError, SessionError
from edgespec.invariance import measure_row_invariance
from edgespec.kv import find_cache_tensors
from edgespec.ort import import_onnxruntime
from edgespec.params import RuntimeParams
from edgespec.session import DecoderSession, padding
from tests.tiny import VOCAB, reference_logits, save_graph, tiny_model

MODEL = tiny_model()
SMALL = RuntimeParams(initial_capacity=8, prefill_chunk=4)


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[bool, bool], Path]:
    """Graphs by (shared cache, has the `keep` input)."""
    folder = tmp_path_factory.mktemp("graphs")
    kinds = [(shared, keep) for shared in (True, False) for keep in (True, False)]
    return {kind: save_graph(MODEL, folder / f"{i}.onnx", shared=kind[0], keep=kind[1]) for i, kind in enumerate(kinds)}


@pytest.fixture(params=[(True, True), (True, False), (False, True), (False, False)], ids=str)
def graph(request: pytest.FixtureRequest, graphs: dict[tuple[bool, bool], Path]) -> Path:
    return graphs[request.param]


def in_halves(path: Path, to: Path) -> Path:
    """The same graph with cache and logits in float16. Its numbers are small and whole, so nothing is rounded."""
    model = onnx.load(str(path))
    half, single = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT
    made, cast = onnx.helper.make_node, []
    for value in model.graph.input:
        if value.name.startswith("past_key_values"):
            for node in model.graph.node:
                node.input[:] = [f"{n}.single" if n == value.name else n for n in node.input]
            cast.append(made("Cast", [value.name], [f"{value.name}.single"], to=single))
            value.type.tensor_type.elem_type = half
    for value in model.graph.output:
        for node in model.graph.node:
            node.output[:] = [f"{n}.single" if n == value.name else n for n in node.output]
            node.input[:] = [f"{n}.single" if n == value.name else n for n in node.input]
        model.graph.node.append(made("Cast", [f"{value.name}.single"], [value.name], to=half))
        value.type.tensor_type.elem_type = half
    nodes = [*cast, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, str(to))
    return to


def test_a_graph_in_half_precision_has_a_cache_in_half_precision(graph: Path, tmp_path: Path) -> None:
    """Types are read off the graph; what the loop sees is float32 as ever, with rows that stand for their prefix."""
    session = DecoderSession(in_halves(graph, tmp_path / "half.onnx"), context_length=200, runtime=SMALL)
    assert set(session.cache_types().values()) == {"float16"}
    text = np.arange(60) * 7 % VOCAB
    for end in (5, 6, 11, 8, 40):  # 8 rewinds
        logits = session.forward(session.sync(text[:end]), 1)
        assert logits.dtype == np.float32
        assert np.array_equal(logits[0], reference_logits(MODEL, text[:end]))
    assert {a.dtype for a in session.read_cache().values()} == {np.dtype(np.float16)}


def test_a_cache_of_integers_is_refused(graph: Path, tmp_path: Path) -> None:
    """A quantised cache is none that we know how to grow or rewind."""
    model = onnx.load(str(in_halves(graph, tmp_path / "m.onnx")))
    for value in model.graph.input:
        if value.name.startswith("past_key_values"):
            value.type.tensor_type.elem_type = onnx.TensorProto.INT8
    for value in model.graph.output:
        if value.name.startswith("present"):
            value.type.tensor_type.elem_type = onnx.TensorProto.INT8
    for node in model.graph.node:
        if node.op_type == "Cast" and node.output[0].startswith("present"):
            node.attribute[0].i = onnx.TensorProto.INT8
    onnx.save(model, str(tmp_path / "m.onnx"))
    with pytest.raises(SessionError, match="only float32 and float16 are known"):
        DecoderSession(tmp_path / "m.onnx", context_length=20, runtime=SMALL)


@pytest.mark.parametrize("rule", [None, ">=2", "even"])
def test_every_row_stands_for_its_whole_prefix(graph: Path, rule: None) -> None:
    """Random edits of a text: after any mix of rewinding, growing and chunking, rows equal the definition."""
    session = DecoderSession(graph, context_length=200, runtime=SMALL, row_rule=rule)
    rng = np.random.default_rng(0)
    text = rng.integers(0, VOCAB, 100)
    for _ in range(60):
        context = text[: rng.integers(1, 100)].copy()
        if rng.random() < 0.5:
            context[rng.integers(len(context))] = rng.integers(VOCAB)
        pending = session.sync(context)
        rows = int(rng.integers(1, len(pending) + 1))
        logits = session.forward(pending, rows)
        assert logits.shape == (rows, VOCAB)
        for i, row in enumerate(logits):
            assert np.array_equal(row, reference_logits(MODEL, context[: len(context) - rows + i + 1]))
        assert np.array_equal(session.tokens, context)


def test_sync_returns_what_is_still_to_feed(graph: Path) -> None:
    """Only the tail behind the common prefix is fed again, and always at least the last token."""
    session = DecoderSession(graph, context_length=200, runtime=SMALL)
    assert session.sync(np.array([5, 6, 7])).tolist() == [5, 6, 7]
    session.forward(np.array([5, 6, 7]), 1)
    assert session.sync(np.array([5, 6, 7])).tolist() == [7]
    session.forward(np.array([7]), 1)
    assert session.sync(np.array([5, 9, 7, 8])).tolist() == [9, 7, 8]
    assert session.sync(np.array([4])).tolist() == [4]
    assert len(session.tokens) == 0


def test_the_cache_grows_by_doubling(graphs: dict[tuple[bool, bool], Path]) -> None:
    """Memory follows the text, not the model's longest context."""
    session = DecoderSession(graphs[True, True], context_length=100_000, runtime=SMALL)
    assert session._cache.capacity == 8
    session.forward(np.arange(9), 1)
    assert session._cache.capacity == 16
    session.forward(np.arange(60), 1)
    assert session._cache.capacity == 128


def test_a_failed_call_leaves_the_cache_as_it_was(graph: Path) -> None:
    """When the runtime raises, the tokens do not count as cached and the session goes on."""
    session = DecoderSession(graph, context_length=200, runtime=SMALL)
    session.forward(np.array([1, 2, 3]), 1)
    with pytest.raises(SessionError, match="ONNX Runtime failed"):
        session.forward(np.array([VOCAB + 1000]), 1)
    assert session.tokens.tolist() == [1, 2, 3]
    assert np.array_equal(session.forward(np.array([4]), 1)[0], reference_logits(MODEL, np.array([1, 2, 3, 4])))


def test_a_borrower_continues_what_the_lender_has_read(graphs: dict[tuple[bool, bool], Path]) -> None:
    """It feeds only what the lender has not; the buffers may grow under either; the lender stays as it was."""
    lender = DecoderSession(graphs[True, True], context_length=200, runtime=SMALL)
    borrower = DecoderSession(graphs[True, False], context_length=200, runtime=SMALL, lender=lender)
    text = np.random.default_rng(0).integers(0, VOCAB, 90)
    for end in (5, 30, 6, 90):
        lender.forward(lender.sync(text[:end]), 1)
        more = np.concatenate([text[:end], text[:40]])
        pending = borrower.sync(more)
        assert len(pending) == 40
        assert np.array_equal(borrower.forward(pending, 2)[1], reference_logits(MODEL, more))
        assert np.array_equal(lender.tokens, text[:end])
        assert np.array_equal(lender.forward(np.array([3]), 1)[0], reference_logits(MODEL, np.append(text[:end], 3)))


def test_a_cache_of_another_shape_is_not_borrowed(graphs: dict[tuple[bool, bool], Path]) -> None:
    """Growing caches are never shared."""
    lender = DecoderSession(graphs[False, True], context_length=200, runtime=SMALL)
    with pytest.raises(SessionError, match="tensors are not the same"):
        DecoderSession(graphs[True, True], context_length=200, runtime=SMALL, lender=lender)


def test_the_context_has_an_end(graph: Path) -> None:
    """A call past the context is refused before it runs; exact mode keeps a place for its dummy row."""
    session = DecoderSession(graph, context_length=10, runtime=SMALL)
    session.forward(np.arange(10), 1)
    with pytest.raises(ContextOverflowError, match="11 tokens do not fit the context of 10"):
        session.forward(np.array([1]), 1)
    assert DecoderSession(graph, context_length=10, runtime=SMALL, row_rule=">=2").context_length == 9


def test_exact_mode_never_calls_with_one_row(graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls have at least two rows, or an even number of them, and the extra ones leave no trace."""
    for rule, allowed in ((">=2", lambda n: n % 16 != 1), ("even", lambda n: n % 2 == 0)):
        session = DecoderSession(graph, context_length=200, runtime=SMALL, row_rule=rule)
        sizes: list[int] = []
        bind = session._bind

        def spy(tokens: np.ndarray, size: int, keep: int, total: int, bind=bind, sizes=sizes) -> None:
            sizes.extend([size, keep])
            bind(tokens, size, keep, total)

        monkeypatch.setattr(session, "_bind", spy)
        for width in (1, 1, 2, 3, 5, 7):
            session.forward(np.arange(width), 1)
        assert len(sizes) >= 12
        session.rewind(0)
        session._chunk = 64
        for width in (17, 33, 48):
            session.forward(np.arange(width), 1)
        assert all(map(allowed, sizes)), (rule, sizes)
        assert len(session.tokens) == 98


def test_another_rule_empties_the_cache(graph: Path) -> None:
    """What was read under one rule is not what would have been read under another."""
    session = DecoderSession(graph, context_length=200, runtime=SMALL)
    session.forward(np.arange(5), 1)
    session.row_rule = None
    assert len(session.tokens) == 5
    session.row_rule = ">=2"
    assert len(session.tokens) == 0
    assert session.sync(np.arange(5)).tolist() == [0, 1, 2, 3, 4]


def test_padding_obeys_the_rule() -> None:
    """Dummy rows by rule and width."""
    assert [padding(n, None) for n in (1, 2, 3)] == [0, 0, 0]
    assert [padding(n, ">=2") for n in (1, 2, 3)] == [1, 0, 0]
    assert [padding(n, ">=2") for n in (16, 17, 18, 33, 128, 129, 257)] == [0, 1, 0, 1, 0, 1, 1]
    assert [padding(n, "even") for n in (1, 2, 3)] == [1, 0, 1]


def test_a_graph_in_whole_numbers_is_row_invariant(graph: Path) -> None:
    """The measurement finds nothing where there is no rounding, and leaves session and rule as they were."""
    session = DecoderSession(graph, context_length=200, runtime=SMALL)
    assert measure_row_invariance(session) == ">=2"
    assert session.row_rule is None
    assert len(session.tokens) == 0


@pytest.mark.parametrize(("slip", "expected"), [(1, "even"), (2, "none")])
def test_a_graph_that_depends_on_the_width_is_found_out(tmp_path: Path, slip: int, expected: str) -> None:
    """Logits that shift with odd widths need even calls; logits that shift with any width are hopeless."""
    model = onnx.load(str(save_graph(MODEL, tmp_path / "m.onnx")))
    for node in model.graph.node:
        if "logits" in node.output:
            node.output[0] = "honest"
    make = onnx.helper.make_node
    consts = {"modulo": 2 if slip == 1 else 97}
    model.graph.node.extend(
        [
            make("Mod", ["size", "modulo"], ["shift_i"]),
            make("Cast", ["shift_i"], ["shift"], to=onnx.TensorProto.FLOAT),
            make("Add", ["honest", "shift"], ["logits"]),
        ]
    )
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.array(v), k) for k, v in consts.items())
    onnx.save(model, str(tmp_path / "m.onnx"))
    session = DecoderSession(tmp_path / "m.onnx", context_length=200, runtime=SMALL)
    assert measure_row_invariance(session) == expected


def test_an_unknown_provider_is_refused(graph: Path) -> None:
    """No silent fall-back to the CPU."""
    with pytest.raises(ConfigError, match=r"provider 'cuda' is not in the installed onnxruntime package, which has"):
        DecoderSession(graph, context_length=9, runtime=RuntimeParams(provider="cuda"))


def test_a_provider_that_does_not_come_up_is_refused(graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ONNX Runtime quietly takes the CPU instead, we say so."""
    monkeypatch.setattr(ort_module, "provider_name", lambda name: "XnnpackExecutionProvider")
    with (
        pytest.warns(UserWarning, match="Xnnpack"),
        pytest.raises(SessionError, match="cannot be used on this machine"),
    ):
        DecoderSession(graph, context_length=9, runtime=RuntimeParams(provider="xnnpack"))


@pytest.mark.parametrize("content", [b"", b"not a graph"])
def test_a_broken_graph_is_one_line(tmp_path: Path, content: bytes) -> None:
    """Garbage in place of a graph names the file."""
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(SessionError, match=r"model\.onnx: ONNX Runtime cannot load the graph") as caught:
        DecoderSession(tmp_path / "model.onnx", context_length=9, runtime=SMALL)
    assert "\n" not in str(caught.value)


def test_a_graph_without_a_cache_is_refused(tmp_path: Path) -> None:
    """A graph of another kind is not taken for a decoder."""
    info = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["x"], ["logits"])],
        "g",
        [info("x", onnx.TensorProto.FLOAT, [1, "S", 4])],
        [info("logits", onnx.TensorProto.FLOAT, [1, "S", 4])],
    )
    path = tmp_path / "m.onnx"
    opset = onnx.helper.make_opsetid("", 18)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=9), str(path))
    with pytest.raises(SessionError, match="not a decoder with a cache"):
        DecoderSession(path, context_length=9, runtime=SMALL)


@pytest.mark.parametrize(
    ("packages", "message"), [([], "is not installed"), (["onnxruntime", "onnxruntime-gpu"], "are both installed")]
)
def test_exactly_one_onnxruntime_package(packages: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither or both: one line that says what to install or remove."""

    def version(name: str) -> str:
        if name not in packages:
            raise importlib.metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(importlib.metadata, "version", version)
    if not packages:
        monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(MissingExtraError, match=message):
        import_onnxruntime()


@pytest.mark.parametrize("shape", [[1, 1 << 40, "C", 8], [1, 2, "C", 1 << 40], [1, 0, "C", 8], [1, "H", "C", 8]])
def test_a_cache_of_impossible_sizes_is_refused(shape: list[object]) -> None:
    """Before memory is taken for it."""
    with pytest.raises(SessionError, match=r"must be \[1, heads, length, head size\]"):
        find_cache_tensors({"past_key_values.0.key": shape}, ["present.0.key"])
