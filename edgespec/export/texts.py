"""What a model folder says about text: tokenizer, template, special and end tokens, licence."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from edgespec.errors import ExportError
from edgespec.export.convert import quiet

_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; an empty one where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def tokenizer_file(folder: Path, work: Path) -> Path:
    """`tokenizer.json`, made in `work` from older files where the folder has none.

    Raises:
        ExportError: it has none and none can be made.
    """
    file = folder / "tokenizer.json"
    if file.is_file():
        return file
    try:
        with quiet():
            from transformers import AutoTokenizer

            AutoTokenizer.from_pretrained(folder, use_fast=True, trust_remote_code=False).save_pretrained(work)
    except Exception as error:  # whatever a slow tokenizer's conversion lacks, the remedy is the same
        raise ExportError(f"{folder} has no tokenizer.json and none could be made ({error})".split("\n")[0]) from error
    return work / "tokenizer.json"


def chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """From its own file, or from the tokenizer's settings; of several named ones, the default."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Role (`bos_token`, ...) -> text."""
    found = {}
    for role in _ROLES:
        token = settings.get(role)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            found[role] = text
    return found


def eos_token_ids(folder: Path, config: dict[str, Any], tokenizer: Path, special: dict[str, str]) -> tuple[int, ...]:
    """What generation stops at by the model's own settings, and the tokenizer's end token."""
    from tokenizers import Tokenizer

    ids: set[int] = set()
    stated = read_json(folder / "generation_config.json").get("eos_token_id", config.get("eos_token_id"))
    ids.update(i for i in (stated if isinstance(stated, list) else [stated]) if isinstance(i, int))
    try:
        end = Tokenizer.from_file(str(tokenizer)).token_to_id(special.get("eos_token", ""))
    except Exception as error:  # the library raises bare Exception
        raise ExportError(f"{tokenizer} is not a readable tokenizer ({error})") from error
    if end is not None:
        ids.add(end)
    if not ids:
        raise ExportError(f"{folder} names no end token, so no answer would stop; set eos_token_id in config.json")
    return tuple(sorted(ids))


def licence(folder: Path) -> str | None:
    """`license:` of the model card's front matter."""
    card = folder / "README.md"
    if not card.is_file():
        return None
    text = card.read_text(encoding="utf-8", errors="replace")
    front = text.split("---")[1] if text.startswith("---") and text.count("---") >= 2 else ""
    found = re.search(r"^license:\s*([\w.+-]+)\s*$", front, re.MULTILINE)
    return found.group(1) if found else None
