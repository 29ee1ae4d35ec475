"""The script that runs other engines, with the one that is installed here: answers, times, and errors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgespec.bench.peers import Peer, PeerError
from edgespec.params import SamplingParams
from tests.export_models import save_llama, torch_logits

pytest.importorskip("transformers")

PROMPT = np.array([5, 6, 7, 8, 5, 6, 7, 8, 5, 6])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("peer"))


@pytest.fixture(scope="module")
def peer(llama: Path) -> Iterator[Peer]:
    with Peer("transformers", sys.executable, llama, None, 1) as peer:
        yield peer


def test_greedy_answers(peer: Peer, llama: Path) -> None:
    """All ways of decoding give one text, that of the arg max of torch's logits, and time their first token."""
    params = SamplingParams(max_new_tokens=12)
    answers = [peer.answer(mode, PROMPT, params) for mode in peer.modes]
    assert len(answers) == 3
    text = np.concatenate([PROMPT, answers[0].token_ids])
    np.testing.assert_array_equal(torch_logits(llama, text)[len(PROMPT) - 1 : -1].argmax(-1), answers[0].token_ids)
    for answer in answers:
        assert answer.token_ids == answers[0].token_ids
        assert 0 < answer.first_token_s < answer.seconds


def test_sampled_answers(peer: Peer) -> None:
    """A seed gives one text, another seed another."""
    texts = [peer.answer("plain", PROMPT, SamplingParams(temperature=1.0, seed=s)).token_ids for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_memory(peer: Peer) -> None:
    peak = peer.peak_bytes()
    assert peak is None or peak > 50 << 20


def test_a_draft_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="transformers is measured with prompt lookup"):
        Peer("transformers", sys.executable, tmp_path, tmp_path, None)
