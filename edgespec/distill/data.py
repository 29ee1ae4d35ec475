"""The texts of a distillation: what the target writes, is asked and reads, each file once, in the working folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from edgespec.distill.corpus import read_code, read_corpus
from edgespec.distill.options import Settings
from edgespec.distill.places import Places
from edgespec.distill.store import ANSWER, Layers, Store, Texts, write_json
from edgespec.distill.tasks import make_requests
from edgespec.distill.teacher import Teacher
from edgespec.distill.turns import take_apart
from edgespec.errors import ConfigError
from edgespec.export.source import Source
from edgespec.state import write_atomically

_CORPUS, _PACKAGES, _REQUESTS = "corpus.npy", "packages.json", "requests.json"
_CODES = 1000  # source files whose functions are asked about, at most
# Shares in the ranking of tokens: answers look more like answers than documentation does.
_RANKED = {"written": 0.45, "asked": 0.3, "read": 0.25}


@dataclass(frozen=True, slots=True)
class Data:
    """What there is to train on.

    Attributes:
        train: texts by sort.
        check: texts for validation, by sort.
        store: where they and the hidden states lie.
        given: tokens that the template puts around texts.
        packages: whose documentation was read, or whose code was asked about.
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
    shares = {"written": settings.written, "asked": settings.asked, "read": 1 - settings.written - settings.asked}
    tokens = {sort: max(0.0, share) * settings.tokens for sort, share in shares.items()}
    sizes = {sort: rows * length for sort, (rows, length) in _sizes(settings).items()}
    least = {"written": 1, "asked": int(settings.asked > 0), "read": 1}
    files = {sort: max(least[sort], round(tokens[sort] / sizes[sort])) for sort in shares}
    return {sort: 1 + count if count else 0 for sort, count in files.items()}


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
    # Without turns nobody can be asked.
    wanted = num_files(settings if turns.to_answer else replace(settings, asked=0.0))
    sizes, coded = _sizes(settings), set[str]()

    def write(index: int) -> Texts:
        seed = [settings.seed, index]
        return teacher.write(turns, _openings(prompts, settings.write_rows, seed), settings.write_length, seed)

    store.fill("written", wanted["written"], write, lambda done, most: tell("written", done, most))
    if wanted["asked"]:
        rows, length = sizes["asked"]
        requests, coded = _requests(store, tokenizer, range(1, wanted["written"]), wanted["asked"] * rows, settings)
        wanted["asked"] = min(wanted["asked"], len(requests) // rows)

        def ask(index: int) -> Texts:
            return teacher.write(turns, requests[index * rows :][:rows], length, [settings.seed, index, 1])

        store.fill("asked", wanted["asked"], ask, lambda done, most: tell("asked", done, most))
    rows, length = sizes["read"]
    corpus, documented = _corpus(
        store.folder, tokenizer, source.eos_token_ids[0], wanted["read"] * rows * length, settings.seed
    )
    wanted["read"] = min(wanted["read"], len(corpus) // (rows * length))

    def read(index: int) -> Texts:
        return teacher.read(corpus[index * rows * length :][: rows * length].reshape(rows, length))

    store.fill("read", wanted["read"], read, lambda done, most: tell("read", done, most))
    sorts = [sort for sort, count in wanted.items() if count > 1]
    packages = set(documented if "read" in sorts else []) | (coded if "asked" in sorts else set())
    return Data(
        train={sort: store.load(sort, range(1, wanted[sort])) for sort in sorts},
        check={sort: store.load(sort, [0]) for sort in sorts},
        given=frozenset([*turns.before, *turns.to_answer, *turns.to_user, *source.eos_token_ids]),
        packages=sorted(packages),
        store=store,
    )


def _sizes(settings: Settings) -> dict[str, tuple[int, int]]:
    """Rows and tokens of a row in a file of each sort."""
    return {
        "written": (settings.write_rows, settings.write_length),
        "asked": (settings.write_rows, settings.read_length),
        "read": (settings.read_rows, settings.read_length),
    }


def _openings(prompts: list[list[int]], rows: int, seed: list[int]) -> list[list[int] | None]:
    """What the user says first in each of the rows: in every second one a prompt, where there are any."""
    found: list[list[int] | None] = [None] * rows
    if prompts:
        numbers = np.random.default_rng([*seed, 1]).integers(0, len(prompts), len(found[::2]))
        found[::2] = [prompts[number] for number in numbers]
    return found


def _requests(
    store: Store, tokenizer: Tokenizer, numbers: Sequence[int], wanted: int, settings: Settings
) -> tuple[list[list[int]], set[str]]:
    """User turns about passages, and the packages that some are taken from; made once, like the text to read.

    Where more are wanted than there are, those that there are come first: files of answers to them are there, too.
    """
    file = store.folder / _REQUESTS
    stored: dict[str, Any] = {"wanted": -1, "packages": [], "requests": []}
    if file.is_file():
        stored = json.loads(file.read_text(encoding="utf-8"))
    if stored["wanted"] >= wanted:
        return stored["requests"], set(stored["packages"])
    codes, found = read_code(settings.seed, _CODES)
    made = make_requests(_answers(store.load("written", numbers), tokenizer), codes, wanted, settings.seed)
    new = [tokenizer.encode(text, add_special_tokens=False).ids for text in made]
    # What is longer would be cut, and with it perhaps what is asked.
    new = [ids for ids in new if len(ids) <= settings.read_length // 2] or new
    known = set(map(tuple, stored["requests"]))
    requests = [*stored["requests"], *(ids for ids in new if tuple(ids) not in known)]
    packages = sorted({*stored["packages"], *found})
    write_json(file, {"wanted": wanted, "packages": packages, "requests": requests})
    return requests, set(packages)


def _answers(texts: Texts, tokenizer: Tokenizer) -> list[str]:
    """The answers in written conversations, each as text."""
    found = []
    for tokens, kinds in zip(texts.tokens, texts.kinds, strict=True):
        ends = np.flatnonzero(np.diff(kinds == ANSWER, prepend=False, append=False))
        found += [tokenizer.decode(tokens[start:end].tolist()) for start, end in ends.reshape(-1, 2)]
    return found


def make_seen(teacher: Teacher, data: Data, layers: Layers, tell: Callable[[str, int, int], None]) -> None:
    """Make what the target computes of all texts as far as it is missing."""
    for sort, texts in data.train.items():
        files = 1 + len(texts.tokens) // len(data.check[sort].tokens)
        data.store.fill_seen(
            sort,
            files,
            layers,
            lambda tokens: teacher.see(tokens, layers),
            lambda done, most, sort=sort: tell(sort, done, most),  # type: ignore[misc]
        )


def places(data: Data, layers: Layers, depth: int) -> tuple[Places, Places]:
    """Where to train and where to validate, `make_seen` having been there."""
    check = [data.store.seen(sort, 0, layers) for sort in data.check]
    parts: list[Texts] = []
    seen = []
    for sort, texts in data.train.items():
        rows = len(data.check[sort].tokens)  # of each file
        for index, start in enumerate(range(0, len(texts.tokens), rows), start=1):
            parts.append(texts.rows(slice(start, start + rows)))
            seen.append(data.store.seen(sort, index, layers))
    return Places(parts, seen, depth), Places(list(data.check.values()), check, depth)


def rank_head(data: Data, vocab_size: int, head_size: int) -> NDArray[np.int64]:
    """The tokens with the most expected occurrences, and those of the template: ascending ids."""
    mass = np.zeros(vocab_size)
    for sort, texts in data.train.items():
        probs = np.exp(texts.logps[:, :-1].astype(np.float32)) * texts.is_chosen[..., None]
        found = np.bincount(texts.ids[:, :-1].ravel().astype(np.int64), probs.ravel(), vocab_size)
        mass += found / found.sum() * _RANKED[sort]
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
