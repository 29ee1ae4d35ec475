"""What the README shows works, and what the command line offers is in the README."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from edgespec.cli import COMMANDS, main
from tests.tiny import make_tiny_bundle

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_readme_names_every_option_and_command() -> None:
    """The README mentions every option of every command, and no command that does not exist."""
    for name in COMMANDS:
        command = main.get_command(click.Context(main), name)
        assert command is not None
        for option in command.params:
            for flag in option.opts if isinstance(option, click.Option) else []:
                assert re.search(rf"{flag}\b", README), f"{name} {flag}"
    blocks = "".join(re.findall(r"```\n(.*?)```", README, re.DOTALL))
    assert set(re.findall(r"edgespec (\w+)", blocks)) == set(COMMANDS)


def test_python_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The examples in Python, as they stand, one after the other; the first prints its figures."""
    make_tiny_bundle(tmp_path / "my-bundle")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(code, names)
    assert re.search(r"(eos|length) ", capsys.readouterr().out)
