"""Encoding, and text that streams out exactly as `decode` of all tokens would give it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as HFTokenizer

from edgespec.errors import BundleError, ConfigError
from edgespec.tokens import StreamDecoder, Tokenizer
from tests.tiny import byte_alphabet

SPECIAL = AddedToken("<|end|>", special=True, normalized=False)


def byte_level() -> HFTokenizer:
    """Like GPT-2, Llama 3 and Qwen: any byte is a token, and words begin with a space."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["he", "ll", "hell", "hello", "Ġw", "or", "Ġwor", "ld", "Ġworld", "Ċ", "ðŁ", "ðŁĺ", "âĤ"]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(alphabet + words))}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("o", "r"), ("Ġw", "or"), ("l", "d")]
    tokenizer = HFTokenizer(models.BPE(vocab, [*merges, ("Ġwor", "ld"), ("ð", "Ł"), ("ðŁ", "ĺ"), ("â", "Ĥ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece() -> HFTokenizer:
    """Like Llama 2 and Mistral: `▁` for spaces, bytes as a fall-back, one leading space dropped."""
    pieces = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁▁", "▁a", "a", "b", "▁hello", "é", "\ufffd"]
    tokenizer = HFTokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def metaspace() -> HFTokenizer:
    """Metaspace and byte fall-back, which drop a first token's spaces altogether."""
    tokenizer = sentencepiece()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


def word_level() -> HFTokenizer:
    """No decoder at all: words joined by spaces."""
    words = ["<unk>", "one", "two", "three", "été", "😀"]
    tokenizer = HFTokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def word_piece() -> HFTokenizer:
    """Continuations marked by ##, and punctuation pulled to the word before it."""
    pieces = ["[UNK]", "play", "##ing", "##s", "do", "n", "'", "t", "n't", ".", ",", "##é"]
    tokenizer = HFTokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


MAKERS = [byte_level, sentencepiece, metaspace, word_level, word_piece]


def save(inner: HFTokenizer, folder: Path) -> Tokenizer:
    inner.add_special_tokens([SPECIAL])
    inner.add_tokens(["<added>"])
    inner.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder / "tokenizer.json")


@pytest.fixture(params=MAKERS, ids=lambda maker: maker.__name__)
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    return save(request.param(), tmp_path)


@pytest.fixture
def make(tmp_path: Path) -> Callable[[Callable[[], HFTokenizer]], Tokenizer]:
    return lambda maker: save(maker(), tmp_path)


def stream(decoder: StreamDecoder, ids: Sequence[int], rng: random.Random | None = None) -> list[str]:
    """The pieces of text that come out, tokens pushed in groups of random sizes."""
    pieces, at = [], 0
    while at < len(ids):
        size = rng.randint(1, 5) if rng else 1
        pieces.append(decoder.push(ids[at : at + size]))
        at += size
    return [*pieces, decoder.flush()]


def random_ids(tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    """Any ids, with runs of one token, special tokens and ids beyond the vocabulary."""
    ids: list[int] = []
    for _ in range(rng.randint(0, 40)):
        ids += [rng.randrange(tokenizer.vocab_size + 3)] * rng.choice([1, 1, 1, 2, 12])
    return ids


def test_streamed_text_is_the_decoded_text(tokenizer: Tokenizer) -> None:
    """Whatever the tokens and their grouping, the pieces put together are `decode` of all of them."""
    for seed in range(400):
        rng = random.Random(seed)
        ids = random_ids(tokenizer, rng)
        assert "".join(stream(StreamDecoder(tokenizer), ids, rng)) == tokenizer.decode(ids), ids


def test_streamed_real_text_round_trips(make: Callable[..., Tokenizer]) -> None:
    """Text with spaces, accents, CJK and emoji comes out of the stream as it went in."""
    tokenizer = make(byte_level)
    text = "  hello world\n\nété 你好 😀👩‍👩‍👧 ok"
    ids = tokenizer.encode(text, add_special_tokens=False).tolist()
    assert "".join(stream(StreamDecoder(tokenizer), ids)) == text


def test_no_piece_shows_half_a_character(make: Callable[..., Tokenizer]) -> None:
    """The bytes of an emoji come out together with the last of them, and not before."""
    tokenizer = make(byte_level)
    ids = tokenizer.encode("a😀b", add_special_tokens=False).tolist()
    assert len(ids) == 4
    assert stream(StreamDecoder(tokenizer), ids) == ["a", "", "😀", "b", ""]


def test_byte_fallback_run_is_held_until_it_ends(make: Callable[..., Tokenizer]) -> None:
    """A run of byte tokens is decoded as a whole, because one more byte may spoil all of it."""
    tokenizer = make(sentencepiece)
    run = [tokenizer.token_to_id(f"<0x{b:02X}>") for b in "你".encode()]
    end = tokenizer.token_to_id("a")
    assert stream(StreamDecoder(tokenizer), [*run, end]) == ["", "", "", "你a", ""]
    bad = tokenizer.token_to_id("<0x80>")
    assert "".join(stream(StreamDecoder(tokenizer), [*run, bad, end])) == "\ufffd" * 4 + "a"


def test_unfinished_character_comes_with_flush(make: Callable[..., Tokenizer]) -> None:
    """A text that ends inside a character shows the replacement character, once, at the end."""
    tokenizer = make(byte_level)
    ids = tokenizer.encode("a€", add_special_tokens=False).tolist()[:-1]
    assert stream(StreamDecoder(tokenizer), ids) == ["a", "", "\ufffd"]


def test_continuing_a_text_keeps_its_space(make: Callable[..., Tokenizer]) -> None:
    """With the prompt as context, the space that a first token would lose is kept."""
    tokenizer = make(sentencepiece)
    word = tokenizer.token_to_id("▁hello")
    assert "".join(stream(StreamDecoder(tokenizer), [word])) == "hello"
    assert "".join(stream(StreamDecoder(tokenizer, context=[tokenizer.token_to_id("a")]), [word])) == " hello"


def expected_stop(tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str]) -> tuple[str, int]:
    """By the definition: the first token after which the decoded text holds a stop string."""
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count]).rstrip("\ufffd")
        ends = [(text.index(s) + len(s), text.index(s)) for s in stop if s in text]
        if ends:
            return text[: min(ends)[1]], count
    return tokenizer.decode(ids), len(ids)


@pytest.mark.parametrize("stop", [["b"], ["aa", "ab"], ["é"], ["a b", "b a"], [" "], ["\n", "two t"], ["abab"]])
def test_text_ends_before_the_first_stop_string(tokenizer: Tokenizer, stop: list[str]) -> None:
    """Stop strings that lie across tokens and groups end the text at the same place and token as the definition."""
    texts = ["a", "b", "▁a", "▁", "é", "one", "two", "three", "Ċ", "<0x0A>", "<0x61>", "Ġw", "he", "été", "play", "##é"]
    known = [i for i in map(tokenizer.token_to_id, texts) if i is not None]
    stopped = 0
    for seed in range(200):
        rng = random.Random(seed)
        ids = [rng.choice(known) for _ in range(rng.randint(1, 30))]
        decoder = StreamDecoder(tokenizer, stop)
        text = "".join(stream(decoder, ids, rng))
        assert (text, decoder.num_tokens) == expected_stop(tokenizer, ids, stop), (ids, stop)
        stopped += decoder.stopped
    assert stopped > 0 or not any(s in tokenizer.decode(known * 3) for s in stop)


HARD = ["😀", "👩\u200d👩\u200d👧", "你", "好", "e\u0301", "é", "한", "🇩🇪", "a", "b", " ", "\ufe0f"]


@pytest.mark.parametrize("maker", [byte_level, sentencepiece, metaspace])
def test_stop_strings_of_hard_characters(make: Callable[..., Tokenizer], maker: Callable[[], HFTokenizer]) -> None:
    """Emoji, joined emoji, CJK, combining marks, in byte tokens: same text and token as the definition, none leaks."""
    tokenizer = make(maker)
    stopped = 0
    for seed in range(300):
        rng = random.Random(seed)
        text = "".join(rng.choice(HARD) for _ in range(rng.randint(2, 14)))
        ids = tokenizer.encode(text, add_special_tokens=False).tolist()
        start = rng.randrange(len(text))  # a stop string may begin inside of what is shown as one character
        stop = [text[start : start + rng.randint(1, 4)], rng.choice(HARD) * 2]
        decoder = StreamDecoder(tokenizer, stop)
        pieces = stream(decoder, ids, rng)
        assert ("".join(pieces), decoder.num_tokens) == expected_stop(tokenizer, ids, stop), (text, stop)
        assert not any("\ufffd" in piece for piece in pieces)
        stopped += decoder.stopped
    assert stopped > 200


@pytest.mark.parametrize("maker", [byte_level, sentencepiece, metaspace])
def test_hard_characters_stream_whole(make: Callable[..., Tokenizer], maker: Callable[[], HFTokenizer]) -> None:
    """No piece begins or ends inside a code point, however the bytes are divided among tokens and calls."""
    tokenizer = make(maker)
    for seed in range(200):
        rng = random.Random(seed)
        text = "b" + "".join(rng.choice(HARD) for _ in range(20)) + "b"
        ids = tokenizer.encode(text, add_special_tokens=False).tolist()
        pieces = stream(StreamDecoder(tokenizer), ids, rng)
        assert "".join(pieces) == tokenizer.decode(ids)
        assert "\ufffd" not in "".join(pieces)


@pytest.mark.export
@pytest.mark.parametrize("maker", [byte_level, sentencepiece, word_piece])
def test_ten_thousand_texts_as_transformers_decodes_them(
    make: Callable[..., Tokenizer], maker: Callable[[], HFTokenizer]
) -> None:
    """Random ids, special and added tokens, broken bytes: streamed in random groups, the text is transformers'."""
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle; install edgespec[export]")
    tokenizer = make(maker)
    oracle = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer._inner)
    rng = random.Random(1)
    for _ in range(10_000):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randint(0, 24))]
        assert "".join(stream(StreamDecoder(tokenizer), ids, rng)) == oracle.decode(ids, skip_special_tokens=True), ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == oracle.decode(ids), ids


def test_byte_level_text_is_utf_8(make: Callable[..., Tokenizer]) -> None:
    """By the definition: the bytes of the tokens, read as UTF-8 with a replacement for each unreadable part."""
    tokenizer = make(byte_level)
    values = dict(zip(sorted(pre_tokenizers.ByteLevel.alphabet()), byte_alphabet(), strict=True))
    names = {i: name for name, i in tokenizer.vocab().items() if tokenizer.has_text(i) and set(name) <= set(values)}
    rng = random.Random(2)
    for _ in range(2000):
        ids = [rng.choice(list(names)) for _ in range(rng.randint(0, 30))]
        data = bytes(values[c] for i in ids for c in names[i])
        assert "".join(stream(StreamDecoder(tokenizer), ids, rng)) == data.decode("utf-8", "replace"), ids


def test_stop_string_that_does_not_come_is_given_back(make: Callable[..., Tokenizer]) -> None:
    """What might become a stop string is held back, and given as soon as it can't."""
    tokenizer = make(byte_level)
    ids = [tokenizer.token_to_id(c) for c in "abac"]
    decoder = StreamDecoder(tokenizer, ["abab"])
    assert stream(decoder, ids) == ["", "", "", "abac", ""]
    assert not decoder.stopped


def test_first_completed_stop_string_counts(make: Callable[..., Tokenizer]) -> None:
    """Of two stop strings in one token the one that ends first counts, as it would token by token."""
    tokenizer = make(byte_level)
    for ids in ([tokenizer.token_to_id("hello")], [tokenizer.token_to_id(c) for c in "hello"]):
        assert "".join(stream(StreamDecoder(tokenizer, ["hello", "ll"]), ids)) == "he"


def test_nothing_comes_after_a_stop_string(make: Callable[..., Tokenizer]) -> None:
    """Tokens after the stop string are neither shown nor counted."""
    tokenizer = make(byte_level)
    ids = [tokenizer.token_to_id(c) for c in "abcde"]
    decoder = StreamDecoder(tokenizer, ["c"])
    assert decoder.push(ids) == "ab"
    assert (decoder.stopped, decoder.num_tokens) == (True, 3)
    assert (decoder.push(ids), decoder.flush(), decoder.num_tokens) == ("", "", 3)


@pytest.mark.parametrize(("maker", "name"), [(byte_level, "a"), (byte_level, "Ģ"), (sentencepiece, "<0x80>")])
def test_cost_of_a_token_does_not_grow(
    make: Callable[..., Tokenizer], maker: Callable[[], HFTokenizer], name: str
) -> None:
    """Eight times the tokens take about eight times as long, for text and for endless garbage."""
    tokenizer = make(maker)
    token = tokenizer.token_to_id(name)

    def seconds(count: int) -> float:
        decoder = StreamDecoder(tokenizer, ["zz"])
        start = time.perf_counter()
        stream(decoder, [token] * count)
        return time.perf_counter() - start

    ratios = [seconds(16000) / seconds(2000) for _ in range(3)]
    assert min(ratios) < 24, ratios  # quadratic would be 64


def test_encode_gives_int64_and_adds_special_tokens_only_when_asked(tmp_path: Path) -> None:
    """Encoding gives an int64 array, with the post-processor's tokens if wanted, and cuts nothing."""
    inner = byte_level()
    inner.add_special_tokens([SPECIAL])
    end = inner.token_to_id("<|end|>")
    inner.post_processor = processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", end)])
    inner.enable_truncation(3)
    inner.enable_padding(length=20)
    tokenizer = save(inner, tmp_path)
    plain = tokenizer.encode("hello world", add_special_tokens=False)
    assert plain.dtype == np.int64
    assert tokenizer.decode(plain) == "hello world"
    assert tokenizer.encode("hello world", add_special_tokens=True).tolist() == [end, *plain]
    assert tokenizer.encode("abcdefgh", add_special_tokens=False).shape == (8,)
    assert tokenizer.decode([end, *plain], skip_special_tokens=False) == "<|end|>hello world"


def test_vocab_size_counts_ids_not_entries(tmp_path: Path) -> None:
    """With a hole in the ids the size is still the highest id + 1, which is what a row of logits must hold."""
    inner = HFTokenizer(models.WordLevel({"<unk>": 0, "far": 9}, unk_token="<unk>"))
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.vocab_size == 10
    assert (tokenizer.token_to_id("far"), tokenizer.token_to_id("near")) == (9, None)


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"version": "1.0"}', "\x00"])
def test_foreign_file_is_a_bundle_error(tmp_path: Path, content: str) -> None:
    """A file that is not a tokenizer gives one line with its path."""
    file = tmp_path / "tokenizer.json"
    file.write_text(content)
    with pytest.raises(BundleError, match=r"tokenizer\.json is not a tokenizer") as caught:
        Tokenizer(file)
    assert len(str(caught.value).splitlines()) == 1


def test_missing_file_is_a_bundle_error(tmp_path: Path) -> None:
    """A missing tokenizer gives one line with its path."""
    with pytest.raises(BundleError, match="absent"):
        Tokenizer(tmp_path / "absent.json")


def test_lone_surrogate_is_a_config_error(make: Callable[..., Tokenizer]) -> None:
    """Text that is not Unicode is refused with the place of the damage."""
    with pytest.raises(ConfigError, match="index 2"):
        make(byte_level).encode("ab\ud800", add_special_tokens=False)
