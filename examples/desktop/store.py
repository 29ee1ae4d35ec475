"""Conversations and settings on disk. Knows nothing of Qt."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import edgespec


@dataclass
class Settings:
    """What the user chose."""

    system: str = ""
    temperature: float = 0.0
    max_new_tokens: int = 1024
    drafter: str = "auto"
    show_drafts: bool = False

    def params(self) -> edgespec.SamplingParams:
        return edgespec.SamplingParams(temperature=self.temperature, max_new_tokens=self.max_new_tokens)


class Store:
    """A folder with one file for each conversation, and one for the settings."""

    def __init__(self, folder: Path) -> None:
        self._conversations = folder / "conversations"
        self._settings = folder / "settings.json"
        self._conversations.mkdir(parents=True, exist_ok=True)

    def paths(self) -> list[Path]:
        """The newest first. Names are times, so that names sort as the conversations began."""
        return sorted(self._conversations.glob("*.json"), reverse=True)

    def new_path(self) -> Path:
        return self._conversations / f"{time.time_ns()}.json"

    def title(self, path: Path) -> str:
        """The beginning of the first question."""
        try:
            messages = json.loads(path.read_text(encoding="utf-8"))["messages"]
            first = next(m["content"] for m in messages if m["role"] == "user")
        except (OSError, ValueError, KeyError, TypeError, StopIteration):
            return "cannot be read"
        return " ".join(first.split())[:40]

    def delete(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def read_settings(self) -> Settings:
        """The settings; what is missing or of another type is as if never set."""
        settings = Settings()
        try:
            data = json.loads(self._settings.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return settings
        for field in fields(Settings):
            default, value = getattr(settings, field.name), data.get(field.name) if isinstance(data, dict) else None
            if type(value) is type(default):
                setattr(settings, field.name, value)
        return settings

    def write_settings(self, settings: Settings) -> None:
        self._settings.write_text(json.dumps(asdict(settings), indent=1), encoding="utf-8")
