"""Typed access to a JSON object that somebody else wrote. Knows nothing of what the fields mean.

Every accessor raises `BundleError` with the field's dotted name, what it is and what it must be.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import PurePosixPath
from typing import Any, TypeGuard, cast

from edgespec.errors import BundleError


class Fields:
    """One JSON object; `where` is its dotted name, with a dot at the end."""

    def __init__(self, data: dict[str, Any], where: str = "") -> None:
        self.data = data
        self.where = where

    def has(self, name: str) -> bool:
        return self.data.get(name) is not None

    def _get(self, name: str, wanted: str, is_right: bool) -> Any:
        if not is_right:
            found = repr(self.data[name])[:80] if name in self.data else "missing"
            raise BundleError(f"{self.where}{name} is {found}; it must be {wanted}; export or copy the bundle again")
        return self.data[name]

    def text(self, name: str) -> str:
        return cast(str, self._get(name, "a string", isinstance(self.data.get(name), str)))

    def choice(self, name: str, choices: Collection[str]) -> str:
        value = self.data.get(name)
        is_right = isinstance(value, str) and value in choices
        return cast(str, self._get(name, "one of " + ", ".join(choices), is_right))

    def count(self, name: str, most: int, least: int = 1) -> int:
        is_right = is_integer(value := self.data.get(name)) and least <= value <= most
        return cast(int, self._get(name, f"an integer from {least} to {most}", is_right))

    def integers(self, name: str) -> list[int]:
        value = self.data.get(name)
        is_right = isinstance(value, list) and all(is_integer(item) and item >= 0 for item in value)
        return cast(list[int], self._get(name, "a list of integers that are not negative", is_right))

    def sha256(self, name: str) -> str:
        value = self.data.get(name)
        is_right = isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")
        return cast(str, self._get(name, "64 hex digits", is_right))

    def path(self, name: str) -> str:
        check_path(self.text(name), self.where + name)
        return self.text(name)

    def table(self, name: str) -> Fields:
        value = self._get(name, "an object", isinstance(self.data.get(name), dict))
        return Fields(value, f"{self.where}{name}.")

    def texts(self) -> dict[str, str]:
        return {name: self.text(name) for name in self.data}


def is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def check_path(name: str, where: str) -> None:
    """A relative path with forward slashes that means the same inside the folder on every platform."""
    parts = name.split("/")
    # A colon is a drive or a stream on Windows; there, a dot or space at the end of a name is dropped.
    odd = any(c in name for c in "\\:\0") or any(p in ("", ".", "..") or p[-1] in ". " for p in parts)
    if odd or PurePosixPath(name).is_absolute():
        raise BundleError(f"{where} is {name!r}, which is not a path inside the bundle; do not use this bundle")
