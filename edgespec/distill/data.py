"""The texts of a distillation: written and read by the target, each file once, in the working folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from edgespec.distill.corpus import read_corpus
from edgespec.distill.options import Settings
from edgespec.distill.places import Places
from edgespec.distill.store import Store, Texts, write_json
from edgespec.distill.teacher import Teacher
from edgespec.distill.turns import take_apart
from edgespec.errors import ConfigError
from edgespec.export.source import Source
from edgespec.state import write_atomically

_CORPUS, _PACKAGES = "corpus.npy", "packages.json"
_WRITTEN_SHARE = 0.7  # of the ranking of tokens: answers look more like answers than documentation does


@dataclass(frozen=True, slots=True)
class Data:
    """What there is to train on.

    Attributes:
        train: texts by sort.
        check: texts for validation, by sort.
        store: where they and the hidden states lie.
        given: tokens that the template puts around texts.
        packages: whose documentation was read.
    """

    train: dict[str, Texts]
    check: dict[str, Texts]
    given: frozenset[int]
    packages: list[str]
    store: Store

    @property
    def num_tokens(self) -> dict[str, int]:
        """To train on, by sort."""
        return {sort: texts.tokens.size for sort, texts in self.train.items()}


def num_files(settings: Settings) -> dict[str, int]:
    """Files of each sort that a budget asks for, one of them for validation."""
    written = settings.tokens * settings.written / (settings.write_rows * settings.write_length)
    read = settings.tokens * (1 - settings.written) / (settings.read_rows * settings.read_length)
    return {"written": 1 + max(1, round(written)), "read": 1 + max(1, round(read))}


def make_data(
    teacher: Teacher, source: Source, store: Store, settings: Settings, tell: Callable[[str, int, int], None]
) -> Data:
    """Make the files that are missing and load all.

    Args:
        tell: told the sort, files made and files wanted.
    """
    tokenizer = Tokenizer.from_file(str(source.tokenizer))
    turns = take_apart(source, tokenizer)
    prompts = _prompts(settings, tokenizer)
    wanted = num_files(settings)

    def write(index: int) -> Texts:
        return teacher.write(turns, prompts, seed=[settings.seed, index])

    store.fill("written", wanted["written"], write, lambda done, most: tell("written", done, most))
    size = settings.read_rows * settings.read_length
    corpus, packages = _corpus(store.folder, tokenizer, source.eos_token_ids[0], wanted["read"] * size, settings.seed)
    wanted["read"] = min(wanted["read"], len(corpus) // size)

    def read(index: int) -> Texts:
        return teacher.read(corpus[index * size :][:size].reshape(settings.read_rows, settings.read_length))

    store.fill("read", wanted["read"], read, lambda done, most: tell("read", done, most))
    sorts = [sort for sort, count in wanted.items() if count > 1]
    return Data(
        train={sort: store.load(sort, range(1, wanted[sort])) for sort in sorts},
        check={sort: store.load(sort, [0]) for sort in sorts},
        given=frozenset([*turns.before, *turns.to_answer, *turns.to_user, *source.eos_token_ids]),
        packages=packages if "read" in sorts else [],
        store=store,
    )


def make_hidden(teacher: Teacher, data: Data, layers: Sequence[int], tell: Callable[[str, int, int], None]) -> None:
    """Make the hidden states that are missing of all texts."""
    for sort, texts in data.train.items():
        files = 1 + len(texts.tokens) // len(data.check[sort].tokens)
        data.store.fill_hidden(
            sort,
            files,
            layers,
            lambda tokens: teacher.hidden(tokens, layers),
            lambda done, most, sort=sort: tell(sort, done, most),  # type: ignore[misc]
        )


def places(data: Data, layers: Sequence[int], depth: int) -> tuple[Places, Places]:
    """Where to train and where to validate, with hidden states that are there."""
    check = [data.store.hidden(sort, 0, layers) for sort in data.check]
    parts: list[Texts] = []
    hidden = []
    for sort, texts in data.train.items():
        rows = len(data.check[sort].tokens)  # of each file
        for index, start in enumerate(range(0, len(texts.tokens), rows), start=1):
            parts.append(texts.rows(slice(start, start + rows)))
            hidden.append(data.store.hidden(sort, index, layers))
    return Places(parts, hidden, depth), Places(list(data.check.values()), check, depth)


def rank_head(data: Data, vocab_size: int, head_size: int) -> NDArray[np.int64]:
    """The tokens with the most expected occurrences, and those of the template: ascending ids."""
    mass = np.zeros(vocab_size)
    for sort, texts in data.train.items():
        probs = np.exp(texts.logps[:, :-1].astype(np.float32)) * texts.is_chosen[..., None]
        found = np.bincount(texts.ids[:, :-1].ravel().astype(np.int64), probs.ravel(), vocab_size)
        mass += found / found.sum() * (_WRITTEN_SHARE if sort == "written" else 1 - _WRITTEN_SHARE)
    mass[[token for token in data.given if token < vocab_size]] += 1
    size = min(head_size, vocab_size)
    return np.sort(np.argpartition(-mass, size - 1)[:size])


def _prompts(settings: Settings, tokenizer: Tokenizer) -> list[list[int]]:
    if settings.prompts is None:
        return []
    try:
        lines = settings.prompts.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{settings.prompts} cannot be read as UTF-8 text ({error}); name another file") from error
    found = [tokenizer.encode(line.strip(), add_special_tokens=False).ids for line in lines if line.strip()]
    if not found:
        raise ConfigError(f"{settings.prompts} has no prompts; write one on each line")
    return found


def _corpus(
    folder: Path, tokenizer: Tokenizer, end: int, wanted: int, seed: int
) -> tuple[NDArray[np.int64], list[str]]:
    """The text to read, found once: what is installed may change while a distillation is interrupted."""
    file, names = folder / _CORPUS, folder / _PACKAGES
    if file.is_file() and names.is_file():
        stored = json.loads(names.read_text(encoding="utf-8"))
        if stored["wanted"] >= wanted:
            return np.load(file, allow_pickle=False).astype(np.int64), stored["packages"]
    found = read_corpus(tokenizer, end, wanted, seed)
    write_atomically(file, lambda stream: np.save(stream, found.tokens.astype(np.int32), allow_pickle=False))
    write_json(names, {"wanted": wanted, "packages": found.packages})
    return found.tokens, found.packages
