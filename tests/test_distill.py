"""A draft in training: loss, acceptance by depth, a step, the head, against definitions written out."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the libraries' own imports
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from edgespec.distill.cost import predict_cost_ratio
    from edgespec.distill.loss import HeadMap, agreement, distance, survival
    from edgespec.distill.options import Settings
    from edgespec.distill.places import Places
    from edgespec.distill.search import candidates, induction_scores
    from edgespec.distill.store import TEMPLATE, Layers, Seen, Texts
    from edgespec.distill.student import HiddenDraft, Memory, draft_shape, make_student
    from edgespec.distill.teacher import Teacher
    from edgespec.distill.train import Trainer
    from edgespec.distill.turns import take_apart
    from edgespec.distill.validate import baselines, measure

from edgespec.errors import ConfigError
from edgespec.export.source import Source
from edgespec.lookup import find_hints
from tests.tiny import NUM_TOKENS, tiny_tokenizer
from tests.tiny_distill import CPU, SMALL, make_source, make_teacher, random_texts, rotated

pytestmark = pytest.mark.export

_ONE = Layers((1,))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Read only."""
    return make_source(tmp_path_factory.mktemp("distill"))


@pytest.fixture(scope="module")
def teacher(source: Source) -> Teacher:
    """It in torch."""
    return make_teacher(source)


def test_the_loss_is_its_definition() -> None:
    """Divergence and lost acceptance, written out over whole distributions with the rest as one token."""
    texts, p = random_texts()
    head = np.sort(np.random.default_rng(4).choice(40, 25, replace=False))
    flat = p[:, :-1].reshape(-1, 40)
    follows, chosen = texts.tokens[:, 1:].reshape(-1), texts.chosen[:, :-1].reshape(-1)
    ids, logps = (array[:, :-1].reshape(-1, 8) for array in (texts.ids, texts.logps))
    wanted = HeadMap(head, 40).wanted(ids, logps, follows, chosen, "cpu")
    logits = np.random.default_rng(5).normal(size=(3 * 11, 25)).astype(np.float32)
    q = np.zeros((3 * 11, 40))
    q[:, head] = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    divergence, lost = np.zeros(33), np.zeros(33)
    for i, row in enumerate(flat):
        kept = [t for t in np.argsort(-row)[:8] if t in head]
        rest_p, rest_q = 1 - row[kept].sum(), 1 - q[i, kept].sum()
        divergence[i] = (row[kept] * np.log(row[kept] / q[i, kept])).sum() + rest_p * np.log(rest_p / rest_q)
        lost[i] = 1 - np.minimum(row[kept], q[i, kept]).sum()
    for share, expected in ((0.0, divergence), (1.0, lost)):
        np.testing.assert_allclose(distance(torch.from_numpy(logits), wanted, share), expected, atol=5e-3)
    first, overlap = agreement(torch.from_numpy(logits), wanted)
    np.testing.assert_array_equal(first.numpy(), flat.argmax(-1) == q.argmax(-1))
    np.testing.assert_allclose(overlap.numpy(), 1 - lost, atol=2e-3)
    rates = np.minimum(1, q[np.arange(33), follows] / flat[np.arange(33), follows])
    np.testing.assert_allclose(survival(torch.from_numpy(logits), wanted), rates, atol=2e-3)


class _Known:
    """A draft that knows the place it is at, and says there what a table says: shape (rows, length, vocab)."""

    def __init__(self, logits: np.ndarray, texts: Texts) -> None:
        self.logits, self.texts = logits, texts

    def parameters(self) -> object:
        return iter([torch.zeros(1)])

    def eval(self) -> None: ...

    def train(self) -> None: ...

    def read(self, hidden: object) -> object:
        return hidden

    def __call__(self, state: torch.Tensor, tokens: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        row, t = state.long().numpy().T
        np.testing.assert_array_equal(tokens, self.texts.tokens[row, t + 1])
        return state + torch.tensor([0.0, 1.0]), torch.from_numpy(self.logits[row, t + 1])


def known_places(texts: Texts, depth: int) -> Places:
    """Places whose hidden states are row and position, as are the keys; values are 100 more."""
    rows, columns = np.indices(texts.tokens.shape)
    hidden = np.stack([rows, columns], -1).astype(np.float16)
    keys = np.stack([hidden, hidden + 100], 2)[:, :, :, None]
    return Places([texts], [Seen(hidden, keys)], depth)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_acceptance_by_depth(temperature: float) -> None:
    """A draft that is the target is accepted at every depth; of another one each depth is the ratio of how many drafts
    get there, counted place by place."""
    texts, p = random_texts(num_rows=6, length=30)
    texts.temperatures[:] = temperature
    heads, places = HeadMap(np.arange(40), 40), known_places(texts, 3)
    perfect = measure(_Known(np.log(p).astype(np.float32), texts), places, heads, CPU.autocast())
    np.testing.assert_allclose(perfect.greedy if temperature == 0 else perfect.sampled, 1, atol=1e-3)
    logits = np.log(p) + np.random.default_rng(1).normal(size=p.shape)
    q = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    survived = np.zeros(4)
    for row in range(6):
        for t in range(30 - 2 - 3 + 1):
            rate = 1.0
            for depth in range(4):
                survived[depth] += rate
                at, after = t + 1 + depth, texts.tokens[row, min(t + 2 + depth, 29)]
                is_first = p[row, min(at, 29)].argmax() == q[row, min(at, 29)].argmax()
                taken = min(1, q[row, min(at, 29), after] / p[row, min(at, 29), after])
                rate *= is_first if temperature == 0 else taken
    found = measure(_Known(logits.astype(np.float32), texts), places, heads, CPU.autocast())
    expected = survived[1:] / survived[:-1]
    np.testing.assert_allclose(found.greedy if temperature == 0 else found.sampled, expected, atol=5e-3)


def test_places_are_all_that_somebody_chose() -> None:
    """Every position whose second next token was chosen is a place, as far as enough tokens follow; a batch has what
    belongs to each, in the order asked for."""
    texts, _ = random_texts(num_rows=2, length=9)
    texts.kinds[0, 4] = TEMPLATE
    texts.tokens[:, 2:4] = texts.tokens[:, :1]  # said before, so that there are hints
    places = known_places(texts, 2)
    expected = [(row, t) for row in range(2) for t in range(9 - 1 - 2) if (row, t + 2) != (0, 4)]
    assert [(row, t) for _, row, t in places.index.tolist()] == expected
    numbers = np.array([[7, 7, 9], [0, 2, 1]])
    heads = HeadMap(np.arange(1, 40), 40)
    batch = places.batch(numbers, heads, "cpu")
    for i, number in enumerate(numbers.ravel()):
        row, t = expected[number]
        assert batch.hidden[i].tolist() == [row, t]
        np.testing.assert_array_equal(batch.tokens[i], texts.tokens[row, t + 1 : t + 3])
        for depth in range(2):
            np.testing.assert_array_equal(
                batch.wanted[depth].columns[i], np.maximum(texts.ids[row, t + 1 + depth] - 1.0, 0)
            )
            assert batch.wanted[depth].next_columns[i] == max(texts.tokens[row, t + 2 + depth] - 1, 0)
            assert batch.counts[i, depth] == (texts.kinds[row, t + 2 + depth] != TEMPLATE)
            token, kind = find_hints(texts.tokens[row].tolist())[t + 1 + depth]
            column, found = batch.hints[i, depth].tolist()
            assert found == (kind if token in heads.head_ids else 0)
            assert not found or heads.head_ids[column] == token
    assert (batch.hints[..., 1] > 0).any()
    memory = batch.memory
    assert memory is not None
    assert memory.positions.tolist() == [[expected[n][1] for n in line] for line in numbers]
    length = int(memory.positions.max()) + 1
    for line, row in enumerate((1, 0)):
        assert memory.keys[line, 0].tolist() == [[row, t] for t in range(length)]
        assert memory.values[line, 0].tolist() == [[row + 100, t + 100] for t in range(length)]
    first = memory.first(1)
    assert (first.keys.shape[0], first.positions.shape[0]) == (1, 1)


def test_drawn_places_share_their_row() -> None:
    """Each line of a draw is of one row of a text, every place can come, and rows come as often as they have places."""
    texts, _ = random_texts(num_rows=3, length=20)
    texts.kinds[0, 5:] = TEMPLATE
    places = known_places(texts, 2)
    drawn = places.draw(np.random.default_rng(0), 3000, 4)
    rows = places.index[drawn][..., 1]
    assert (rows == rows[:, :1]).all()
    assert set(drawn.ravel()) == set(range(len(places)))
    shares = np.bincount(places.index[:, 1]) / len(places)
    np.testing.assert_allclose(np.bincount(rows[:, 0]) / 3000, shares, atol=0.03)
    lines = places.by_row(np.array([0, 2, len(places) - 1]))
    assert [line.tolist() for line in lines] == [[0, 2], [], [len(places) - 1]]


def test_cheap_drafters_are_no_match(teacher: Teacher, source: Source) -> None:
    """A table of bigrams agrees with some of a random model's text, and not with most of it."""
    turns = take_apart(source, tiny_tokenizer())
    texts = teacher.write(turns, [[70, 71, 72], None] * 3, 96, seed=[0, 0])
    assert 0 < baselines(texts, teacher.write(turns, [[70], None] * 3, 96, seed=[0, 1]))["bigram"] < 0.7


def make_draft(teacher: Teacher, head_ids: np.ndarray, width: int = 96, layers: Layers = _ONE) -> HiddenDraft:
    torch.manual_seed(0)
    shape = draft_shape(teacher.model.config, layers, 1, width, len(head_ids))
    return make_student(teacher.model, shape, head_ids)


@pytest.mark.parametrize("attended", [None, 0])
def test_a_step_is_its_definition(teacher: Teacher, attended: int | None) -> None:
    """Two steps from two places of one text, written out in NumPy one by one; the embedding is the target's and no part
    of what is stored."""
    head = np.array([3, 5, 200])
    draft = make_draft(teacher, head, 40, Layers((1,), attended))
    with torch.no_grad():
        draft.blocks[0].down_proj.weight.normal_()
        draft.hints.weight.normal_()
    w = {name.removesuffix(".weight"): value.double().numpy() for name, value in draft.state_dict().items()}
    embedding = teacher.model.get_input_embeddings().weight.double().numpy()
    np.testing.assert_array_equal(w["head"], embedding[head])  # tied
    assert not any("embed" in name for name in w)
    eps = teacher.model.config.rms_norm_eps

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean() + eps) * w[name]

    def attend(z: np.ndarray, keys: list[np.ndarray], values: list[np.ndarray]) -> np.ndarray:
        y, at = norm(z, "attention.norm"), len(keys)
        query, key, value = ((w[f"attention.{name}"] @ y).reshape(-1, 16) for name in ("q_proj", "k_proj", "v_proj"))
        keys.append(rotated(key, np.array(at)))
        values.append(value)
        mixed = []
        for number, line in enumerate(rotated(query, np.array(at))):
            scores = np.array([line @ each[number // 2] for each in keys]) / 4
            weights = np.exp(scores - scores.max())
            mixed.append(sum(weights[i] * values[i][number // 2] for i in range(at + 1)) / weights.sum())
        return z + w["attention.o_proj"] @ np.concatenate(mixed)

    def step(
        state: np.ndarray, token: int, hint: tuple[int, int], keys: list[np.ndarray], values: list[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        both = [norm(state, "norm_state"), norm(embedding[token], "norm_token")]
        z = w["mix"] @ np.concatenate(both)
        if attended is not None:
            z = attend(z, keys, values)
        y = norm(z, "blocks.0.norm")
        gate = w["blocks.0.gate_proj"] @ y
        z = z + w["blocks.0.down_proj"] @ (gate / (1 + np.exp(-gate)) * (w["blocks.0.up_proj"] @ y))
        logits = w["head"] @ norm(z, "norm")
        column, kind = hint
        logits[column] += (kind > 0) * w["hints"][kind] @ norm(z, "norm")
        return z, logits

    rng = np.random.default_rng(0)
    hidden, cache = rng.normal(size=(2, draft.shape.num_features)), rng.normal(size=(2, 1, 2, 9, 16))
    places, hints = np.array([4, 8]), (((2, 3), (0, 0)), ((1, 8), (1, 1)))  # of each place, of each step
    keys, values = (torch.from_numpy(part).float() for part in cache)
    memory = Memory(keys, values, torch.from_numpy(places[None]))
    with torch.no_grad():
        states = draft.read(torch.from_numpy(hidden).float())
        found = []
        for tokens, given in zip(((7, 11), (9, 13)), zip(*hints, strict=True), strict=True):
            states, logits = draft(states, torch.tensor(tokens), torch.tensor(given), memory)
            found.append(logits)
    for i, place in enumerate(places):
        own = [list(part[0, :, : place + 1].transpose(1, 0, 2)) for part in cache]
        state = w["fc"] @ hidden[i]
        for logits, token, hint in zip(found, ((7, 9), (11, 13))[i], hints[i], strict=True):
            state, expected = step(state, token, hint, *own)
            np.testing.assert_allclose(logits[i], expected, rtol=1e-3, atol=1e-4)


def test_attention_starts_where_the_target_is(teacher: Teacher) -> None:
    """Its products are the attended layer's, as far as shapes agree; what it adds is a share of what the layer adds."""
    draft = make_draft(teacher, np.array([3, 5]), layers=Layers((1,), 1))
    layer = teacher.model.model.layers[1]
    assert draft.attention is not None
    for name in ("q_proj", "k_proj", "v_proj"):
        assert torch.equal(getattr(draft.attention, name).weight, getattr(layer.self_attn, name).weight)
    ratio = draft.attention.o_proj.weight / layer.self_attn.o_proj.weight
    np.testing.assert_allclose(ratio.detach(), ratio[0, 0].item(), rtol=1e-4)
    torch.testing.assert_close(draft.attention.norm.weight, layer.input_layernorm.weight)


def test_every_layer_is_scored(teacher: Teacher) -> None:
    """Low where weights are random; the model goes on with the attention that it had."""
    usual = teacher.model.config._attn_implementation
    scores = induction_scores(teacher.model, NUM_TOKENS, 0)
    assert set(scores) == {0, 1}
    assert all(0 <= score < 0.3 for score in scores.values())  # weights are random
    assert teacher.model.config._attn_implementation == usual


def test_of_layers_the_one_that_copies_scores() -> None:
    """One head of layer 1 looks, at a token's second time, at what followed its first; layer 2 does, too, but has a
    window; layer 0 looks at the token itself."""

    class Known:
        config = SimpleNamespace(
            _attn_implementation="sdpa", layer_types=["full_attention", "full_attention", "sliding_attention"]
        )
        device = "cpu"

        def set_attn_implementation(self, name: str) -> None: ...

        def __call__(self, tokens: torch.Tensor, **_: object) -> SimpleNamespace:
            rows, length = tokens.shape
            assert (tokens[:, : length // 2] == tokens[:, length // 2 :]).all()
            same = torch.eye(length).expand(rows, 1, length, length)
            copies = same.roll(1 - length // 2, -1)
            return SimpleNamespace(attentions=(torch.cat([same, same], 1), torch.cat([same, copies], 1), copies))

    assert induction_scores(Known(), 50, 0) == {0: 0, 1: 1}


def test_training_raises_acceptance(teacher: Teacher, tmp_path: Path) -> None:
    """Some steps on texts of the target agree with it better than none; a resumed run ends with the same weights."""
    tokens = np.random.default_rng(0).integers(0, NUM_TOKENS, (40, 48))
    layers = Layers((1,), 1)
    texts, seen = teacher.read(tokens), teacher.see(tokens, layers)
    assert seen.keys is not None
    heads = HeadMap(np.arange(NUM_TOKENS), NUM_TOKENS)
    settings = Settings(batch_tokens=256, validate_every=10, checkpoint_every=5, learning_rate=3e-3, depth=2)
    train = Places([texts.rows(slice(8, None))], [Seen(seen.hidden[8:], seen.keys[8:])], 2)
    check = Places([texts.rows(slice(0, 8))], [Seen(seen.hidden[:8], seen.keys[:8])], 2)

    def trainer(file: Path | None) -> Trainer:
        draft = make_draft(teacher, heads.head_ids, layers=layers)
        return Trainer(draft, heads, train, check, settings, CPU, file, 60 * 256)

    whole = trainer(None)
    before = whole.validate().read
    whole.run(lambda state, loss: None)
    after = whole.validate().read
    assert before is not None
    assert after is not None
    assert after > 1.2 * before
    assert [point["tokens"] for point in whole.state.curve][:2] == [10 * 256, 20 * 256]

    class Killed(Exception):
        pass

    def kill(state: object, loss: float) -> None:
        if getattr(state, "step", 0) == 23:
            raise Killed

    file = tmp_path / "checkpoint.safetensors"
    with pytest.raises(Killed):
        trainer(file).run(kill)
    resumed = trainer(file)
    assert resumed.state.step == 20
    resumed.run(lambda state, loss: None)
    for name, weight in whole.model.state_dict().items():
        np.testing.assert_array_equal(weight, resumed.model.state_dict()[name], err_msg=name)
    assert resumed.state.curve == whole.state.curve


def test_a_damaged_checkpoint_is_refused(teacher: Teacher, tmp_path: Path) -> None:
    """What is no checkpoint of this training is named, with what to do."""
    file = tmp_path / "checkpoint.safetensors"
    file.write_bytes(b"nothing")
    texts, _ = random_texts()
    heads, places = HeadMap(np.arange(50), NUM_TOKENS), known_places(texts, 2)
    with pytest.raises(ConfigError, match="delete it"):
        Trainer(make_draft(teacher, heads.head_ids), heads, places, places, SMALL, CPU, file, 100)


def test_candidates_are_distinct() -> None:
    """Every choice is a lower and a higher layer that the model has; a model with too few has one to read."""
    found = candidates(30)
    assert len(set(found)) == len(found) == 4
    assert all(0 < low < high < 30 for low, high in found)
    assert candidates(2) == [(1,)]
    assert candidates(1) == [(0,)]


def test_cost_ratio_follows_the_sizes(teacher: Teacher) -> None:
    """More blocks, wider ones, a larger head, more layers to read and attention cost more."""
    config = teacher.model.config
    none, one, attending = Layers(()), Layers((1,)), Layers((1,), 0)
    shapes = [(none, 1, 40, 50), (one, 1, 40, 50), (one, 1, 96, 50), (one, 2, 96, 50), (one, 2, 96, 150)]
    shapes.append((attending, 2, 96, 150))
    ratios = [predict_cost_ratio(config, draft_shape(config, *shape)) for shape in shapes]
    assert ratios == sorted(set(ratios))


@pytest.mark.parametrize("values", [{"layers": 0}, {"head_size": 3}, {"width": 2}, {"tokens": 10}])
def test_settings_are_checked(values: dict[str, int]) -> None:
    """A value that cannot work is named."""
    with pytest.raises(ConfigError, match=next(iter(values))):
        Settings(**values)  # type: ignore[arg-type]
