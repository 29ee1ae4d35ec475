"""Prompts by family: a folder of JSON lines, or the few that come with the package. Knows no models."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from edgespec.errors import ConfigError

PACKAGED = Path(__file__).parent / "data"


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """A user's message.

    Attributes:
        id: unique within its family.
        family: what it is an example of.
        text: without template.
    """

    id: str
    family: str
    text: str


def read_prompts(folder: Path | None, families: Sequence[str], limit: int) -> list[BenchPrompt]:
    """The first `limit` prompts of each family, the families taking turns.

    A family is a file `FAMILY.jsonl`, each of whose lines is an object with `prompt` or, for a conversation of which
    the first message is taken, `turns`; `id` is optional.

    Args:
        folder: of the files; `None` takes those of the package.
        families: their names; none means all.
    Raises:
        ConfigError: a family is not there, or a line is not such an object.
    """
    files = _files(folder or PACKAGED)
    for family in families:
        if family not in files:
            raise ConfigError(f"{folder or 'the packaged set'} has no family {family!r}; it has {', '.join(files)}")
    rows = [list(_read(files[family], limit)) for family in families or files]
    return [prompt for turn in zip_longest(*rows) for prompt in turn if prompt is not None]


def _files(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder of prompts: name one with FAMILY.jsonl files in it")
    files = {path.stem: path for path in sorted(folder.glob("*.jsonl"))}
    if not files:
        raise ConfigError(f"{folder} has no prompts: it needs FAMILY.jsonl files, a JSON object with `prompt` a line")
    return files


def _read(path: Path, limit: int) -> Iterator[BenchPrompt]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as text: {error}") from error
    filled = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    for number, line in filled[:limit]:
        try:
            item = json.loads(line)
            text = item["prompt"] if "prompt" in item else item["turns"][0]
            name = str(item.get("id", number))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise ConfigError(f"{path}, line {number}: not a JSON object with `prompt` or `turns`") from error
        if not isinstance(text, str) or not text.strip():
            raise ConfigError(f"{path}, line {number}: the prompt is empty")
        yield BenchPrompt(name, path.stem, text)
