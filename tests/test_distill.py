"""The parts of a distillation: texts, loss, acceptance by depth, the head, against definitions written out."""

from __future__ import annotations

import importlib.metadata
import warnings
from pathlib import Path

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the libraries' own imports
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from edgespec.distill.corpus import read_corpus
    from edgespec.distill.cost import predict_cost_ratio
    from edgespec.distill.loss import HeadMap, agreement, distance
    from edgespec.distill.options import Settings
    from edgespec.distill.search import candidates
    from edgespec.distill.store import ANSWER, TEMPLATE, USER, Store, Texts
    from edgespec.distill.student import make_student
    from edgespec.distill.teacher import Machine, Teacher, load_target
    from edgespec.distill.train import Trainer
    from edgespec.distill.turns import Turns, take_apart
    from edgespec.distill.validate import _by_depth, baselines, measure

from edgespec.errors import ConfigError
from edgespec.export.source import Source, read_folder
from tests.export_models import save_llama
from tests.tiny import NUM_TOKENS, tiny_tokenizer

pytestmark = pytest.mark.export

CPU = Machine("cpu", "float32")
SMALL = Settings(
    layers=1, head_size=64, tokens=1000, kept=8, write_rows=6, write_length=96, read_rows=4, read_length=64
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """A tiny random llama. Read only."""
    folder = save_llama(tmp_path_factory.mktemp("distill") / "tiny")
    return read_folder(folder, folder, "tiny")


@pytest.fixture(scope="module")
def teacher(source: Source) -> Teacher:
    """It in torch."""
    return Teacher(load_target(source, CPU), SMALL, NUM_TOKENS, CPU)


def random_texts(num_rows: int = 3, length: int = 12, vocab: int = 40, seed: int = 0) -> tuple[Texts, np.ndarray]:
    """Texts with distributions of which the best 8 are kept, and the whole distributions."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(num_rows, length, vocab)) * 2
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    ids = np.argsort(-logp, -1)[..., :8]
    tokens = rng.integers(0, vocab, (num_rows, length))
    chosen = np.zeros((num_rows, length), np.float16)
    chosen[:, :-1] = np.take_along_axis(logp[:, :-1], tokens[:, 1:, None], -1)[..., 0]
    texts = Texts(
        tokens.astype(np.int32),
        np.full((num_rows, length), ANSWER, np.uint8),
        np.ones(num_rows, np.float32),
        ids.astype(np.uint16),
        np.take_along_axis(logp, ids, -1).astype(np.float16),
        chosen,
    )
    return texts, np.exp(logp)


def test_the_template_is_taken_apart(source: Source) -> None:
    """What was found between the texts puts a conversation together again as the template does."""
    from edgespec.chat import ChatTemplate

    tokenizer = tiny_tokenizer()
    turns = take_apart(source, tokenizer)
    roles = ("user", "assistant", "user")
    words = ("one", "two", "three")
    messages = [{"role": role, "content": word} for role, word in zip(roles, words, strict=True)]
    assert source.chat_template is not None
    whole = ChatTemplate(source.chat_template, source.special_tokens).render(messages, add_generation_prompt=False)
    one, two, three = (tokenizer.encode(word, add_special_tokens=False).ids for word in words)
    made = [*turns.before, *one, *turns.to_answer, *two, *turns.to_user, *three]
    expected = tokenizer.encode(whole, add_special_tokens=False).ids
    assert made == expected[: len(made)]
    assert set(source.eos_token_ids) <= turns.ends


def test_a_bridge_is_not_doubled() -> None:
    """A turn that ends with the first token of the bridge goes on with its second."""
    turns = Turns([5], [2, 6], [2, 7], frozenset({2, 9}))
    assert turns.bridge(2, is_answer=False) == [6]
    assert turns.bridge(9, is_answer=False) == [2, 6]
    assert turns.bridge(2, is_answer=True) == [7]


def test_reading_keeps_the_best(teacher: Teacher, source: Source) -> None:
    """What is kept of a text's distributions is what the model in torch says."""
    tokens = np.random.default_rng(0).integers(0, NUM_TOKENS, (3, 20))
    texts = teacher.read(tokens)
    with torch.no_grad():
        logits = teacher.model(torch.from_numpy(tokens)).logits[..., :NUM_TOKENS]
    logp = torch.log_softmax(logits, -1).numpy()
    best = np.argsort(-logp, -1)[..., :8]
    np.testing.assert_array_equal(texts.ids, best)
    np.testing.assert_allclose(texts.logps, np.take_along_axis(logp, best, -1), atol=2e-2)
    follows = np.take_along_axis(logp[:, :-1], tokens[:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(texts.chosen[:, :-1], follows, atol=2e-2)


def test_writing_is_the_models_own_text(teacher: Teacher, source: Source) -> None:
    """Greedy answers are the model's first choices, all distributions are those that reading gives, and the same seed
    writes the same text."""
    turns = take_apart(source, tiny_tokenizer())
    texts = teacher.write(turns, [[70, 71, 72]], seed=[3, 0])
    again = teacher.read(texts.tokens.astype(np.int64))
    counts = texts.kinds[:, 1:] != TEMPLATE
    np.testing.assert_array_equal(texts.ids[:, :-1, 0][counts], again.ids[:, :-1, 0][counts])
    np.testing.assert_allclose(texts.chosen[:, :-1][counts], again.chosen[:, :-1][counts], atol=3e-2)
    greedy = (texts.kinds[:, 1:] == ANSWER) & (texts.temperatures == 0)[:, None]
    assert greedy.any()
    np.testing.assert_array_equal(texts.tokens[:, 1:][greedy], texts.ids[:, :-1, 0][greedy])
    assert (texts.kinds[0] == USER).sum() == 0  # begins with the prompt
    at = len(turns.before)
    assert texts.tokens[0, at : at + 3].tolist() == [70, 71, 72]
    assert texts.kinds[1, at] == USER
    assert (texts.tokens[:, :at] == turns.before).all()
    np.testing.assert_array_equal(texts.tokens, teacher.write(turns, [[70, 71, 72]], seed=[3, 0]).tokens)


def test_sampled_text_follows_the_distribution(teacher: Teacher) -> None:
    """At temperature 1 the tokens beyond the kept ones are drawn, too: 6,000 draws fit the distribution."""
    from scipy.stats import chisquare

    from edgespec.distill.teacher import _sample

    logits = torch.from_numpy(np.random.default_rng(1).normal(size=(1, 30)).astype(np.float32)).repeat(6000, 1)
    values, best = logits.topk(8, -1)
    total = logits.logsumexp(-1, keepdim=True)
    tokens, found = _sample(logits, best, values - total, total, np.ones(6000), np.random.default_rng(2))
    expected = torch.softmax(logits[0].double(), -1).numpy()
    assert chisquare(np.bincount(tokens, minlength=30), expected * 6000 / expected.sum()).pvalue > 1e-3
    np.testing.assert_allclose(found, np.log(expected[tokens]), atol=1e-4)


def test_the_loss_is_its_definition() -> None:
    """Divergence and lost acceptance, written out over whole distributions with the rest as one token."""
    texts, p = random_texts()
    head = np.sort(np.random.default_rng(4).choice(40, 25, replace=False))
    wanted = HeadMap(head, 40).wanted(texts, "cpu")
    logits = np.random.default_rng(5).normal(size=(3 * 11, 25)).astype(np.float32)
    q = np.zeros((3 * 11, 40))
    q[:, head] = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    divergence, lost = [], []
    flat = p[:, :-1].reshape(-1, 40)
    for i, row in enumerate(flat):
        kept = [t for t in np.argsort(-row)[:8] if t in head]
        rest_p, rest_q = 1 - row[kept].sum(), 1 - q[i, kept].sum()
        divergence.append((row[kept] * np.log(row[kept] / q[i, kept])).sum() + rest_p * np.log(rest_p / rest_q))
        lost.append(1 - np.minimum(row[kept], q[i, kept]).sum())
    for share, expected in ((0.0, np.mean(divergence)), (1.0, np.mean(lost))):
        assert float(distance(torch.from_numpy(logits), wanted, share)) == pytest.approx(expected, rel=2e-3)
    first, overlap = agreement(torch.from_numpy(logits), wanted)
    np.testing.assert_array_equal(first.numpy(), flat.argmax(-1) == q.argmax(-1))
    np.testing.assert_allclose(overlap.numpy(), 1 - np.array(lost), atol=2e-3)


def test_acceptance_by_depth() -> None:
    """Conditional acceptance of a row of rates is the ratio of mean products, written out."""
    row = np.array([1.0, 0.5, 0.0, 1.0, 1.0, np.nan, 1.0])
    one = np.nanmean(row)
    two = np.nanmean(row[:-1] * row[1:])
    found = _by_depth([row])
    assert found[0] == pytest.approx(one)
    assert found[1] == pytest.approx(two / one)


def test_a_perfect_draft_is_always_accepted(teacher: Teacher, source: Source) -> None:
    """All of the target's layers under a whole head agree with it at every depth; prompt lookup and bigrams do not."""
    turns = take_apart(source, tiny_tokenizer())
    texts = teacher.write(turns, [[70, 71, 72]], seed=[0, 0])
    head = np.arange(NUM_TOKENS)
    student = make_student(teacher.model, (0, 1), 96, head)
    found = measure(student, [texts], HeadMap(head, NUM_TOKENS), CPU.autocast())
    np.testing.assert_allclose(found.greedy, 1)
    np.testing.assert_allclose(found.sampled, 1, atol=1e-2)
    assert found.read is None
    assert 0 < baselines(texts, teacher.write(turns, [[70]], seed=[0, 1]))["bigram"] < 0.7


def test_a_draft_inherits(teacher: Teacher) -> None:
    """Its layers are the chosen ones, its head the rows of its tokens, and its MLPs the neurons with most weight."""
    head = np.array([3, 5, 200])
    student = make_student(teacher.model, (1,), 40, head)
    theirs, ours = teacher.model.state_dict(), student.state_dict()
    np.testing.assert_array_equal(ours["lm_head.weight"], theirs["model.embed_tokens.weight"][head])
    name = "self_attn.q_proj.weight"
    np.testing.assert_array_equal(ours[f"model.layers.0.{name}"], theirs[f"model.layers.1.{name}"])
    up, down = theirs["model.layers.1.mlp.up_proj.weight"], theirs["model.layers.1.mlp.down_proj.weight"]
    best = np.sort(np.argsort(-(up.norm(dim=1) * down.norm(dim=0)).numpy())[:40])
    np.testing.assert_array_equal(ours["model.layers.0.mlp.up_proj.weight"], up[best])
    np.testing.assert_array_equal(ours["model.layers.0.mlp.down_proj.weight"], down[:, best])


def test_training_raises_acceptance(teacher: Teacher, source: Source, tmp_path: Path) -> None:
    """Some steps on texts of the target agree with it better than none; a resumed run ends with the same weights."""
    tokens = np.random.default_rng(0).integers(0, NUM_TOKENS, (40, 48))
    texts = teacher.read(tokens)
    heads = HeadMap(np.arange(NUM_TOKENS), NUM_TOKENS)
    settings = Settings(batch_tokens=384, validate_every=10, checkpoint_every=5, learning_rate=3e-3)

    def trainer(file: Path | None) -> Trainer:
        student = make_student(teacher.model, (1,), 96, heads.head_ids)
        parts = {"read": texts.rows(slice(8, None))}
        return Trainer(student, heads, parts, [texts.rows(slice(0, 8))], settings, CPU, file, 40 * 8 * 47)

    whole = trainer(None)
    before = whole.validate().read
    whole.run(1 << 30, lambda state, loss: None)
    after = whole.validate().read
    assert before is not None
    assert after is not None
    assert after > 1.2 * before
    assert [point["tokens"] for point in whole.state.curve][:2] == [10 * 8 * 47, 20 * 8 * 47]

    class Killed(Exception):
        pass

    def kill(state: object, loss: float) -> None:
        if getattr(state, "step", 0) == 23:
            raise Killed

    file = tmp_path / "checkpoint.safetensors"
    with pytest.raises(Killed):
        trainer(file).run(1 << 30, kill)
    resumed = trainer(file)
    assert resumed.state.step == 20
    resumed.run(1 << 30, lambda state, loss: None)
    for name, weight in whole.model.state_dict().items():
        np.testing.assert_array_equal(weight, resumed.model.state_dict()[name], err_msg=name)
    assert resumed.state.curve == whole.state.curve


def test_a_damaged_checkpoint_is_refused(teacher: Teacher, tmp_path: Path) -> None:
    """What is no checkpoint of this training is named, with what to do."""
    file = tmp_path / "checkpoint.safetensors"
    file.write_bytes(b"nothing")
    student = make_student(teacher.model, (0,), 96, np.arange(50))
    with pytest.raises(ConfigError, match="delete it"):
        Trainer(student, HeadMap(np.arange(50), NUM_TOKENS), {}, [], SMALL, CPU, file, 100)


def test_files_are_made_once(tmp_path: Path) -> None:
    """A store makes what is missing, and gives back what was put in."""
    store, made = Store(tmp_path), []
    texts, _ = random_texts()

    def make(index: int) -> Texts:
        made.append(index)
        return texts.rows(slice(index, index + 1))

    store.fill("read", 2, make, lambda done, wanted: None)
    store.fill("read", 3, make, lambda done, wanted: None)
    assert made == [0, 1, 2]
    np.testing.assert_array_equal(store.load("read", range(3)).logps, texts.logps)
    (tmp_path / "read-00001.npz").write_bytes(b"PK")
    with pytest.raises(ConfigError, match="delete it"):
        store.load("read", [1])


def test_only_permissive_documentation_is_read() -> None:
    """Text comes from packages whose metadata name a permissive licence, in an order that the seed decides."""
    one, two = (read_corpus(tiny_tokenizer(), 2, 20_000, seed) for seed in (0, 1))
    assert len(one.tokens) == 20_000
    assert one.packages
    installed = {distribution.name for distribution in importlib.metadata.distributions()}
    assert {name.split(" (")[0] for name in one.packages} <= installed
    assert not any(word in name.lower() for name in one.packages for word in ("gpl", "mozilla", "proprietary"))
    np.testing.assert_array_equal(one.tokens, read_corpus(tiny_tokenizer(), 2, 20_000, 0).tokens)
    assert (one.tokens[:500] != two.tokens[:500]).any()


def test_candidates_are_distinct_and_complete() -> None:
    """Every candidate has as many layers as wanted, ascending; spread ones and the first ones are among them."""
    found = candidates(30, 4)
    assert len(set(found)) == len(found) <= 4
    assert all(len(c) == 4 and list(c) == sorted(set(c)) and c[-1] < 30 for c in found)
    assert (0, 1, 2, 3) in found
    assert candidates(2, 2) == [(0, 1)]
    assert candidates(5, 1) == [(0,), (4,)]


def test_cost_ratio_follows_the_sizes(teacher: Teacher) -> None:
    """More layers, wider ones and a larger head cost more; the target itself costs 1."""
    config = teacher.model.config
    whole = config.num_hidden_layers, config.intermediate_size, config.vocab_size
    assert predict_cost_ratio(config, *whole) == pytest.approx(1)
    ratios = [
        predict_cost_ratio(config, 1, 40, 50),
        predict_cost_ratio(config, 1, 96, 50),
        predict_cost_ratio(config, 2, 96, 50),
    ]
    assert ratios == sorted(ratios)


@pytest.mark.parametrize("values", [{"layers": 0}, {"head_size": 3}, {"width": 2}, {"tokens": 10}])
def test_settings_are_checked(values: dict[str, int]) -> None:
    """A value that cannot work is named."""
    with pytest.raises(ConfigError, match=next(iter(values))):
        Settings(**values)  # type: ignore[arg-type]
