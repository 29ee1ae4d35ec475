"""Text for the target to read and to be asked about: documentation and code of packages that are installed here under
permissive licences.

Owns which files count. Nothing of it is kept but token ids in the working folder, and the card names the packages.
"""

from __future__ import annotations

import ast
import hashlib
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

_PERMISSIVE = ("mit", "bsd", "apache", "isc", "python software foundation", "psf", "unlicense", "zlib", "0bsd", "cc0")
_OTHER = ("gpl", "mozilla", "mpl", "eclipse", "proprietary", "commercial", "nvidia")
_TEXTS = (".md", ".rst", ".txt")
_SHORTEST, _LONGEST = 200, 200_000  # characters of a text
_FILES = 400  # of a package at most, so that the large ones do not crowd out the rest


@dataclass(frozen=True, slots=True)
class Corpus:
    """Texts as tokens.

    Attributes:
        tokens: an end token between texts, shape (n,).
        packages: where they come from, `name (licence)`.
    """

    tokens: NDArray[np.int64]
    packages: list[str]


def read_corpus(tokenizer: Tokenizer, end: int, wanted: int, seed: int) -> Corpus:
    """Texts of installed packages in an order that depends on the seed, until there are enough tokens.

    Args:
        tokenizer: of the target.
        end: token between texts.
        wanted: tokens; fewer where there is not so much text.
        seed: of the order.
    """
    shuffle = random.Random(seed).shuffle
    found = [(licence, dist) for dist in _sorted() if (licence := _licence(dist)) is not None]
    readers = [_texts(dist) for _, dist in found]
    named = [f"{dist.metadata['Name']} ({licence})" for licence, dist in found]
    used: set[int] = set()
    seen: set[bytes] = set()
    pieces: list[NDArray[np.int64]] = []
    count, live = 0, list(range(len(readers)))
    while live and count < wanted:
        shuffle(live)
        for index in list(live):  # a text of each package in turn
            text = next(readers[index], None)
            if text is None:
                live.remove(index)
                continue
            digest = hashlib.sha256(text.encode("utf-8", "replace")).digest()
            if digest in seen:
                continue
            seen.add(digest)
            used.add(index)
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            pieces.append(np.array([*ids, end], np.int64))
            count += len(ids) + 1
            if count >= wanted:
                break
    tokens = np.concatenate(pieces)[:wanted] if pieces else np.empty(0, np.int64)
    return Corpus(tokens, sorted(named[i] for i in used))


def read_code(seed: int, wanted: int) -> tuple[list[str], list[str]]:
    """Source files of Python of installed packages, in an order that depends on the seed.

    Args:
        wanted: files, at most.
    Returns:
        Their contents, and the packages they come from as `Corpus.packages`.
    """
    found = [(f"{dist.metadata['Name']} ({licence})", dist) for dist in _sorted() if (licence := _licence(dist))]
    files = [(name, dist, file) for name, dist in found for file in _files(dist) if file.endswith(".py")]
    random.Random(seed).shuffle(files)
    codes: list[str] = []
    used: set[str] = set()
    for name, dist, file in files:
        if len(codes) == wanted:
            break
        code = _read(Path(str(dist.locate_file(file))))
        if _SHORTEST <= len(code) <= _LONGEST:
            codes.append(code)
            used.add(name)
    return codes, sorted(used)


def _sorted() -> list[Distribution]:
    found = {dist.metadata["Name"]: dist for dist in distributions() if dist.metadata["Name"]}
    return [found[name] for name in sorted(found)]


def _licence(dist: Distribution) -> str | None:
    """The licence if it is permissive by the package's own classifiers or expression."""
    classifiers = dist.metadata.get_all("Classifier") or []
    stated = [c.rpartition(" :: ")[2] for c in classifiers if c.startswith("License ::")]
    stated += [dist.metadata["License-Expression"]] if dist.metadata["License-Expression"] else []
    lowered = [text.lower() for text in stated]
    if not stated or any(word in text for text in lowered for word in _OTHER):
        return None
    return stated[-1] if all(any(word in text for word in _PERMISSIVE) for text in lowered) else None


def _texts(dist: Distribution) -> Iterator[str]:
    """The description, the text files and the docstrings of a package."""
    body = dist.metadata.get_payload() if hasattr(dist.metadata, "get_payload") else None
    if isinstance(body, str) and _SHORTEST <= len(body) <= _LONGEST:
        yield body
    for name in _files(dist):
        text = _read(Path(str(dist.locate_file(name))))
        if name.endswith(".py"):
            text = "\n\n".join(docstrings(text))
        if _SHORTEST <= len(text) <= _LONGEST:
            yield text


def _files(dist: Distribution) -> list[str]:
    """Text files and source files of a package, as many as count, in a mixed order."""
    files = sorted(str(file) for file in dist.files or [] if str(file).endswith((*_TEXTS, ".py")))
    random.Random(str(dist.metadata["Name"])).shuffle(files)
    return files[:_FILES]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8") if path.stat().st_size <= 4 * _LONGEST else ""
    except (OSError, UnicodeDecodeError):
        return ""


def parse(code: str) -> list[ast.stmt]:
    """The statements of a source file; none where it is no Python of this version."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def docstrings(code: str) -> Iterator[str]:
    """Those of a module, of its classes and of its functions."""
    for node in ast.walk(ast.Module(parse(code), [])):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text
