"""Every code block of the documentation works, the CLI reference is the real `--help`, and links lead somewhere.

`EDGESPEC_WRITE_DOCS=1 python -m pytest tests/test_docs.py` writes the reference anew.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from edgespec.cli import COMMANDS, main
from edgespec.cli.help import HELP
from tests.tiny import make_tiny_bundle

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"])
# What a shell block may call besides edgespec, each with a check of its own below.
PROGRAMS = {"edgespec", "pip", "python", "pyinstaller", "cd", "cat", "echo", "bash", "ruff", "mypy", ".", "./"}

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Language and text of each fenced block."""
    return iter(re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE))


@pages
def test_python_blocks_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The blocks of a page run one after the other, as a reader would type them, in a folder with a `my-bundle`."""
    codes = [code for language, code in blocks(page) if language == "python"]
    make_tiny_bundle(tmp_path / "my-bundle", draft=True, context_length=2048)
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    shutil.copytree(tmp_path / "my-bundle", tmp_path / "cache" / "bundles" / "smollm2-135m")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": page.name}
    for code in codes:
        if "PySide6" in code:
            pytest.importorskip("PySide6.QtWidgets", exc_type=ImportError)
            request.getfixturevalue("qapp")  # a process has one, which must be the kind that other tests need
        exec(compile(code, page.name, "exec"), names)


@pages
def test_shell_blocks_could_run(page: Path) -> None:
    """Each command is one that exists, with options that it has, files that are there and extras that we declare."""
    for language, text in blocks(page):
        assert language in ("", "bash", "python", "text", "json"), f"{page.name}: a block of {language!r}"
        if language == "json":
            json.loads(text)
        if language not in ("", "bash"):
            continue
        for line in filter(None, (line.split("  #")[0].strip() for line in text.splitlines())):
            for command in re.split(r"\s(?:\||&&)\s", re.sub(r"\s[<>]\s*\S+", "", line)):
                check_command(shlex.split(command))


def check_command(words: list[str]) -> None:
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):  # a variable of its environment
        words = words[1:]
    program, *arguments = words
    if program == "edgespec" or words[:3] == ["python", "-m", "edgespec"]:
        check_edgespec(arguments if program == "edgespec" else arguments[2:])
    elif program == "pip":
        named = re.findall(r"\[([\w,]+)\]", " ".join(arguments))
        assert {extra for names in named for extra in names.split(",")} <= EXTRAS, words
    elif program in ("python", "bash", "pyinstaller"):
        for name in (a for a in arguments if a.endswith((".py", ".spec", "run"))):
            assert list(ROOT.rglob(name)), f"{name} is not there"
    else:
        assert program in PROGRAMS or program.startswith(("./", ".venv")), f"unknown command: {program}"


def check_edgespec(arguments: list[str]) -> None:
    """Whether the real parser takes this. Brackets stand for what may be left out."""
    arguments = [a.strip("[]") for a in arguments]
    while arguments and arguments[0].startswith("-"):
        assert arguments.pop(0) in ("--debug", "--help", "--version", "…"), arguments
    name, *rest = arguments
    if name == "…":
        return
    assert name in COMMANDS, f"there is no command {name}"
    command = main.get_command(click.Context(main), name)
    assert command is not None
    command.make_parser(click.Context(command, info_name=name, **HELP)).parse_args(rest)


@pages
def test_links_lead_somewhere(page: Path) -> None:
    """Links to files of this repository, and the images, are there."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http", "#")):
            assert (page.parent / target.split("#")[0]).exists(), f"{page.name}: {target}"


def reference() -> str:
    """docs/cli.md."""
    parts = [
        "# Command line\n\nMade from `edgespec --help` by `EDGESPEC_WRITE_DOCS=1 python -m pytest tests/test_docs.py`. "
        "[quickstart.md](quickstart.md) shows\nhow they are used.\n"
    ]
    for name in ["", *COMMANDS]:
        result = CliRunner().invoke(main, [*([name] if name else []), "--help"], terminal_width=100)
        assert result.exit_code == 0, result.output
        parts.append(f"## edgespec{' ' * bool(name)}{name}\n\n```text\n{result.stdout.rstrip()}\n```\n")
    return "\n".join(parts)


def test_the_cli_reference_is_the_real_help() -> None:
    """docs/cli.md has the help of every command, word for word."""
    path = ROOT / "docs" / "cli.md"
    if os.environ.get("EDGESPEC_WRITE_DOCS"):
        path.write_text(reference(), encoding="utf-8", newline="\n")
    assert path.read_text(encoding="utf-8") == reference(), "EDGESPEC_WRITE_DOCS=1 writes it anew"


def test_no_figure_that_nobody_can_repeat() -> None:
    """Speeds are in benchmarks/, beside the commands that measure them; the pages have none."""
    for page in (p for p in PAGES if p.name not in ("cli.md", "families.md")):
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        assert not re.search(r"\d(\.\d+)? ?(tokens/s|tok/s|tokens per second|times faster|x faster)", text), page.name


def test_the_tour_runs(tiny_pair: Path) -> None:
    """examples/tour.py runs to its end, as a script would."""
    script = ROOT / "examples" / "tour.py"
    command = [sys.executable, "-W", "error", str(script), str(tiny_pair)]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("-- equal answers\n")
