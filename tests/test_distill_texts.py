"""Texts of a distillation: written, read, kept, against the model in torch."""

from __future__ import annotations

import importlib.metadata
import json
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the libraries' own imports
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from edgespec.distill.corpus import read_code, read_corpus
    from edgespec.distill.data import _requests, make_data, num_files
    from edgespec.distill.options import Settings
    from edgespec.distill.store import ANSWER, TEMPLATE, USER, Layers, Seen, Store, Texts, write_json
    from edgespec.distill.tasks import make_requests
    from edgespec.distill.teacher import Teacher
    from edgespec.distill.turns import Turns, take_apart

from edgespec.errors import ConfigError
from edgespec.export.source import Source
from tests.tiny import NUM_TOKENS, tiny_tokenizer
from tests.tiny_distill import SMALL, make_source, make_teacher, random_texts, rotated

pytestmark = pytest.mark.export


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Read only."""
    return make_source(tmp_path_factory.mktemp("distill"))


@pytest.fixture(scope="module")
def teacher(source: Source) -> Teacher:
    """It in torch."""
    return make_teacher(source)


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
    openings = [[70, 71, 72], None] * 3
    texts = teacher.write(turns, openings, 96, seed=[3, 0])
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
    np.testing.assert_array_equal(texts.tokens, teacher.write(turns, openings, 96, seed=[3, 0]).tokens)


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


def test_what_is_seen_is_what_the_target_computes(teacher: Teacher) -> None:
    """Hidden states against the residual stream that the model in torch gives out, put through the layer's own norm;
    keys and values against a layer's own products, keys rotated by hand."""
    tokens = np.random.default_rng(0).integers(0, NUM_TOKENS, (3, 20))
    found = teacher.see(tokens, Layers((1,), 0))
    body = teacher.model.model
    with torch.no_grad():
        stream = body(torch.from_numpy(tokens), output_hidden_states=True).hidden_states
        expected = torch.cat([body.layers[1].input_layernorm(stream[1]), stream[-1]], -1)
        inner = body.layers[0].input_layernorm(stream[0])
        attention = body.layers[0].self_attn
        key, value = (product(inner).view(3, 20, 2, 16).numpy() for product in (attention.k_proj, attention.v_proj))
    np.testing.assert_allclose(found.hidden, expected, atol=2e-2)
    assert found.keys is not None
    np.testing.assert_allclose(found.keys[:, :, 1], value, atol=2e-2)
    np.testing.assert_allclose(found.keys[:, :, 0], rotated(key, np.arange(20)[:, None]), atol=2e-2)
    assert teacher.see(tokens, Layers((1,))).keys is None


def test_files_are_made_once(tmp_path: Path) -> None:
    """A store makes what is missing, texts and hidden states, and gives back what was put in."""
    store, made = Store(tmp_path), []
    texts, _ = random_texts()

    def make(index: int) -> Texts:
        made.append(index)
        return texts.rows(slice(index, index + 1))

    store.fill("read", 2, make, lambda done, wanted: None)
    store.fill("read", 3, make, lambda done, wanted: None)
    assert made == [0, 1, 2]
    np.testing.assert_array_equal(store.load("read", range(3)).logps, texts.logps)
    layers = Layers((4, 7), 2)

    def see(tokens: np.ndarray) -> Seen:
        return Seen(tokens.astype(np.float16), tokens.astype(np.float16) + 1)

    for wanted in (1, 3):
        store.fill_seen("read", wanted, layers, see, lambda done, most: None)
    seen = store.seen("read", 2, layers)
    np.testing.assert_array_equal(seen.hidden, texts.tokens[2:])
    np.testing.assert_array_equal(seen.keys, texts.tokens[2:] + 1)
    assert store.seen("read", 2, Layers((4, 7))).keys is None
    file = tmp_path / "read-00001.npz"
    for damaged in (file.read_bytes()[:-100], b"PK"):
        file.write_bytes(damaged)
        with pytest.raises(ConfigError, match="delete it"):
            store.load("read", [1])
    (tmp_path / "hidden-4-7" / "read-00001.npy").write_bytes(b"no")
    with pytest.raises(ConfigError, match="delete it"):
        store.seen("read", 1, layers)


def test_a_document_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is killed while it writes one goes on from the one before."""
    file = tmp_path / "about.json"
    write_json(file, {"seed": 0})

    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("os.replace", kill)
        write_json(file, {"seed": 1})
    assert [json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.iterdir()] == [{"seed": 0}]


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


def test_requests_are_about_passages() -> None:
    """Every one has an instruction and a passage out of what was given, none twice; the seed decides the order."""
    body = "\n".join(f"    value = value + {i}  # step {i} of many" for i in range(6))
    codes = [f'"""{"Words of a module. " * 12}"""\n\ndef one_{i}(value):\n{body}\n' for i in range(8)]
    codes += ["def broken(:", codes[0], "# a page\n\x0c\n" + codes[1].replace("one_1", "one_page")]
    answers = [f"Answer {i}. " + "It goes on for a while. " * 10 for i in range(30)]
    found = make_requests(answers, codes, 20, 0)
    assert len(found) == len(set(found)) == 20
    assert 4 <= sum("def one_" in text for text in found) <= 8
    assert sum("Answer" in text for text in found) >= 8
    for text in found:
        parts = text.split("\n\n")
        assert len(parts) == 2
        assert min(map(len, parts)) < 100 < max(map(len, parts))
    assert found == make_requests(answers, codes, 20, 0) != make_requests(answers, codes, 20, 1)
    assert len(make_requests(answers[:3], codes[:1], 20, 0)) < 6
    pages = [text for text in make_requests([], codes, 40, 0) if "one_page" in text]
    assert len(pages) == 1
    assert "def one_page(value):\n    value = value + 0" in pages[0]


def test_code_is_of_permissive_packages_too() -> None:
    """As documentation is."""
    codes, packages = read_code(0, 20)
    assert len(codes) == 20
    assert all("(" in name for name in packages)
    assert codes == read_code(0, 20)[0] != read_code(1, 20)[0]


def test_the_budget_is_shared_out() -> None:
    """Files of each sort come to about the tokens asked for, in the shares asked for; no share is no file."""
    settings = Settings(tokens=2_000_000, written=0.5, asked=0.3)
    files = num_files(settings)
    sizes = {"written": 64 * 256, "asked": 64 * 512, "read": 64 * 512}
    for sort, share in (("written", 0.5), ("asked", 0.3), ("read", 0.2)):
        assert abs((files[sort] - 1) * sizes[sort] - share * 2_000_000) <= sizes[sort] / 2
    assert num_files(Settings(tokens=100_000, written=0.9, asked=0.0))["asked"] == 0
    shares = replace(settings, written=0.7, asked=0.3)
    assert num_files(shares)["read"] == 2
    with pytest.raises(ConfigError, match=r"written is 0.8 and asked is 0.3: they are shares"):
        replace(settings, written=0.8)


def test_a_model_without_a_template_is_not_asked(teacher: Teacher, source: Source, tmp_path: Path) -> None:
    """It writes on without turns, and reads: no file is missed, and the budget is shared by these two."""
    plain = replace(source, chat_template=None)
    settings = replace(SMALL, tokens=4000)
    data = make_data(teacher, plain, Store(tmp_path), settings, lambda sort, done, wanted: None)
    assert set(data.train) == set(data.check) == {"written", "read"}
    assert sum(data.num_tokens.values()) > 0.8 * settings.tokens
    assert not (tmp_path / "requests.json").exists()


def test_more_requests_leave_those_before_in_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of answers to them may be there: what is asked later is new, and what packages it is from is added."""
    monkeypatch.setattr("edgespec.distill.data._CODES", 30)
    store, texts = Store(tmp_path), random_texts(num_rows=80, length=400, vocab=200)[0]
    store.fill("written", 1, lambda index: texts, lambda done, wanted: None)
    found = [_requests(store, tiny_tokenizer(), [0], wanted, SMALL) for wanted in (10, 25, 5)]
    few, many, again = (requests for requests, _ in found)
    assert (len(few), many[:10]) == (10, few)
    assert len(many) == len({tuple(ids) for ids in many}) > 20
    assert again == many
    assert found[0][1] <= found[1][1]
