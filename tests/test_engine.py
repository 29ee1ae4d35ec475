"""The engine and its streams on a tiny bundle."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

import edgespec
from edgespec import (
    BundleError,
    BusyError,
    ConfigError,
    ContextOverflowError,
    RuntimeParams,
    SamplingParams,
    SessionError,
    SpecParams,
)
from edgespec.bundle import list_files
from edgespec.selfcheck import SelfCheck
from tests.tiny import EOS, make_tiny_bundle, reference_logits, rewrite_manifest, tiny_model, tiny_tokenizer

HELLO = [{"role": "user", "content": "Hello!"}]
RENDERED = "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
LONG = SamplingParams(max_new_tokens=60, ignore_eos=True)


def reference_text(prompt: str, num_tokens: int) -> str:
    """Greedy text by the definition of the tiny model."""
    tokens = tiny_tokenizer().encode(prompt, add_special_tokens=False).ids
    length = len(tokens)
    for _ in range(num_tokens):
        tokens.append(int(reference_logits(tiny_model(eos_bonus=272), np.array(tokens)).argmax()))
    return tiny_tokenizer().decode(tokens[length:])


@pytest.mark.parametrize("drafter", ["auto", "model", "ngram", "none"])
def test_the_answer_is_the_target_s(tiny_pair: Path, drafter: str) -> None:
    """Rendered by the template and decoded, the same text with every drafter."""
    with edgespec.load(tiny_pair, spec=SpecParams(drafter=drafter)) as engine:
        stream = engine.chat(HELLO, LONG)
        assert "".join(stream) == reference_text(RENDERED, 60)
        assert stream.text() == reference_text(RENDERED, 60)
        assert stream.finish_reason == "length"
        assert len(stream.token_ids) == stream.stats.new_tokens == 60
        assert engine.drafter == {"auto": "ngram+model"}.get(drafter, drafter)
        assert (stream.stats.acceptance is None) == (drafter == "none")


def test_an_answer_ends_at_the_end_token(tiny_bundle: Path) -> None:
    """The end token is among the ids and not in the text."""
    with edgespec.load(tiny_bundle) as engine:
        stream = engine.chat(HELLO, SamplingParams(max_new_tokens=400))
        text = stream.text()
        assert stream.finish_reason == "eos"
        assert stream.token_ids[-1] == EOS
        assert "<|im_end|>" not in text
        assert text == reference_text(RENDERED, len(stream.token_ids))


def test_stop_strings_end_the_text_in_front_of_them(tiny_pair: Path) -> None:
    """Wherever drafts begin and end, the text stops before the string, the ids behind its last token."""
    whole = reference_text(RENDERED, 60)
    with edgespec.load(tiny_pair) as engine:
        for start in range(1, 40, 5):
            stop = whole[start : start + 3]
            stream = engine.chat(HELLO, SamplingParams(max_new_tokens=60, ignore_eos=True, stop=[stop]))
            pieces = list(stream)
            end = whole.index(stop)
            assert "".join(pieces) == whole[:end]
            assert stream.finish_reason == "stop"
            assert tiny_tokenizer().decode(stream.token_ids) == whole[: end + 3]
            assert stream.stats.new_tokens == len(stream.token_ids)


def test_a_second_turn_reads_only_what_is_new(tiny_pair: Path) -> None:
    """The first turn's prompt and answer are cached."""
    with edgespec.load(tiny_pair) as engine:
        first = engine.chat(HELLO, SamplingParams(max_new_tokens=400))
        turns = [*HELLO, {"role": "assistant", "content": first.text()}, {"role": "user", "content": "More"}]
        second = engine.chat(turns, LONG)
        again = second.text()
        assert second.stats.cached_tokens >= first.stats.prompt_tokens + first.stats.new_tokens - 1
    with edgespec.load(tiny_pair) as engine:
        fresh = engine.chat(turns, LONG)
        assert fresh.text() == again
        assert fresh.stats.cached_tokens == 0


def test_cancelling_from_another_thread(tiny_pair: Path) -> None:
    """The stream ends soon, says so, and the engine goes on."""
    with edgespec.load(tiny_pair) as engine:
        stream = engine.chat(HELLO, SamplingParams(max_new_tokens=400, ignore_eos=True))
        for i, _ in enumerate(stream):
            if i == 2:
                thread = threading.Thread(target=stream.cancel)
                thread.start()
                thread.join()
        assert stream.finish_reason == "cancelled"
        assert 0 < len(stream.token_ids) < 60
        assert engine.chat(HELLO, LONG).text() == reference_text(RENDERED, 60)


def test_leaving_the_loop_frees_the_engine(tiny_pair: Path) -> None:
    """While a stream is half read another is refused; closing it, or its `with` block, ends that."""
    with edgespec.load(tiny_pair) as engine:
        stream = engine.chat(HELLO, LONG)
        next(iter(stream))
        with pytest.raises(BusyError, match="cancel or close"):
            engine.chat(HELLO, LONG).text()
        with pytest.raises(BusyError):
            engine.close()
        stream.close()
        assert stream.finish_reason == "cancelled"
        with engine.chat(HELLO, LONG) as other:
            next(iter(other))
        assert engine.chat(HELLO, LONG).text() == reference_text(RENDERED, 60)


def test_an_error_in_the_consumer_s_loop_frees_the_engine(tiny_bundle: Path) -> None:
    """The consumer's exception passes through and leaves no lock behind."""
    with edgespec.load(tiny_bundle) as engine:
        with pytest.raises(ZeroDivisionError), engine.chat(HELLO, LONG) as stream:
            for _ in stream:
                raise ZeroDivisionError
        assert engine.chat(HELLO, LONG).text() == reference_text(RENDERED, 60)


def test_closing_twice_and_using_after_close(tiny_bundle: Path) -> None:
    """The first is fine, the second one clear line."""
    engine = edgespec.load(tiny_bundle)
    engine.close()
    engine.close()
    with pytest.raises(ConfigError, match="the engine is closed"):
        engine.chat(HELLO).text()


def test_generate_takes_text_or_ids(tiny_bundle: Path) -> None:
    """Plain text is continued without a template, ids as they are."""
    with edgespec.load(tiny_bundle) as engine:
        expected = reference_text("Once upon", 60)
        ids = tiny_tokenizer().encode("Once upon", add_special_tokens=False).ids
        assert engine.generate("Once upon", LONG).text() == expected
        assert engine.generate(ids, LONG).text() == expected
        for wrong, message in (("", "empty"), ([], "empty"), ([3, -1], "outside"), ([10**6], "outside")):
            with pytest.raises(ConfigError, match=message):
                engine.generate(wrong)


def test_a_prompt_longer_than_the_context(tiny_bundle: Path) -> None:
    """One line, and the engine goes on."""
    with edgespec.load(tiny_bundle) as engine:
        with pytest.raises(ContextOverflowError, match=r"600 tokens and the model's context 512: shorten"):
            engine.generate("x" * 600).text()
        assert engine.chat(HELLO, LONG).text() == reference_text(RENDERED, 60)


def test_a_draft_that_is_not_there(tiny_bundle: Path) -> None:
    """Asking for the model drafter of a bundle without one is an error, not something else done instead."""
    with pytest.raises(ConfigError, match="no draft model"):
        edgespec.load(tiny_bundle, spec=SpecParams(drafter="model"))


def test_exact_mode_is_proved_or_refused(tiny_pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule comes from a measurement on this machine; where there is none, loading fails with one line."""
    with edgespec.load(tiny_pair, runtime=RuntimeParams(exact=True)) as engine:
        assert engine.row_rule == ">=2"
        assert engine.chat(HELLO, LONG).text() == reference_text(RENDERED, 60)
    found = SelfCheck(None, "none")
    monkeypatch.setattr("edgespec.selfcheck.self_check", lambda *_, **__: found)
    with pytest.raises(SessionError, match="exact mode cannot be had"):
        edgespec.load(tiny_pair, runtime=RuntimeParams(exact=True))


def test_the_growing_cache_gives_the_same_text(tmp_path: Path) -> None:
    """A bundle with the growing cache in both models, exact mode included."""
    make_tiny_bundle(tmp_path, draft=True, shared=False)
    for exact in (False, True):
        with edgespec.load(tmp_path, runtime=RuntimeParams(exact=exact)) as engine:
            assert engine.chat(HELLO, LONG).text() == reference_text(RENDERED, 60)


def test_concurrent_callers_get_their_answer_or_a_busy_error(tiny_pair: Path) -> None:
    """Eight threads: every answer that comes is right, every other call was refused."""
    outcomes: list[str] = []
    expected = reference_text(RENDERED, 60)

    def work() -> None:
        for _ in range(5):
            try:
                outcomes.append("right" if engine.chat(HELLO, LONG).text() == expected else "wrong")
            except BusyError:
                outcomes.append("busy")

    with edgespec.load(tiny_pair) as engine:
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(outcomes) == 40
    assert "wrong" not in outcomes
    assert "right" in outcomes


@pytest.mark.parametrize("wrong", [None, [1.5], [True], [[1, 2]], [[1], [1, 2]], b"text", {1: 2}], ids=str)
def test_what_is_no_prompt_is_refused(tiny_bundle: Path, wrong: object) -> None:
    """One line, not an id made of it."""
    with edgespec.load(tiny_bundle) as engine, pytest.raises(ConfigError, match="it must be a text, or whole numbers"):
        engine.generate(wrong).text()


def test_a_template_that_says_nothing(tmp_path: Path) -> None:
    """A conversation that renders to no text cannot be answered."""
    make_tiny_bundle(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{# nothing #}")
    rewrite_manifest(tmp_path, files={name: asdict(info) for name, info in list_files(tmp_path).items()})
    with edgespec.load(tmp_path) as engine, pytest.raises(BundleError, match="gives no text"):
        engine.chat(HELLO).text()


@pytest.mark.parametrize(
    "change",
    [{"num_layers": 2}, {"num_kv_heads": 2}, {"head_dim": 4}, {"vocab_size": 400}, {"cache": "growing"}],
    ids=str,
)
def test_a_manifest_that_contradicts_its_graph(tmp_path: Path, change: dict[str, object]) -> None:
    """What the manifest says of a graph is compared with the graph."""
    make_tiny_bundle(tmp_path)
    target = json.loads((tmp_path / "edgespec.json").read_text())["target"]
    rewrite_manifest(tmp_path, target=target | change)
    with pytest.raises(BundleError, match=f"the manifest says {next(iter(change))}"):
        edgespec.load(tmp_path)
