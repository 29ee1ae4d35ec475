"""Options of `edgespec run` that change how tokens are chosen."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import click
import jsonschema
import pytest

from edgespec.cli import COMMANDS, main
from tests.test_cli import cli, error_line, expected, words
from tests.tiny import make_tiny_bundle

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["n"]}


@pytest.mark.parametrize(
    ("options", "params"),
    [
        ("--repetition-penalty 1.9", {"repetition_penalty": 1.9}),
        ("--frequency-penalty 2 --presence-penalty 1.5", {"frequency_penalty": 2.0, "presence_penalty": 1.5}),
        ("--no-repeat-ngram-size 1", {"no_repeat_ngram_size": 1}),
        ("--logit-bias 70=300 --logit-bias 71=-2.5", {"logit_bias": {70: 300.0, 71: -2.5}}),
        ("--ban-token 2 --ban-token 40", {"banned_tokens": [2, 40]}),
        ("--min-new-tokens 35", {"min_new_tokens": 35}),
        ("--temperature 60 --seed 3 --typical-p 0.5", {"temperature": 60.0, "seed": 3, "typical_p": 0.5}),
    ],
    ids=str,
)
def test_options_give_the_answer_of_the_library(tmp_path: Path, options: str, params: dict[str, object]) -> None:
    """Each option is the parameter of that name, and changes what is said."""
    bundle = make_tiny_bundle(tmp_path / "b", eos_bonus=265)
    document = json.loads(cli("run", bundle, "-p", "x", "--json", "--max-new-tokens", 50, *words(options)).stdout)
    assert document["token_ids"] == expected(bundle, "x", max_new_tokens=50, **params).token_ids
    assert document["token_ids"] != expected(bundle, "x", max_new_tokens=50).token_ids


@pytest.fixture
def schema(tmp_path: Path) -> Path:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA), encoding="utf-8-sig")
    return path


def test_the_answer_validates(tiny_pair: Path, schema: Path) -> None:
    """Standard output is JSON of the schema and nothing else."""
    pytest.importorskip("llguidance")
    result = cli("run", tiny_pair, "-p", "x", "--json-schema", schema)
    assert result.exit_code == 0
    jsonschema.validate(json.loads(result.stdout), SCHEMA)


def test_regex_and_lark(tiny_pair: Path, tmp_path: Path) -> None:
    """A pattern is given on the command line, a grammar in a file."""
    pytest.importorskip("llguidance")
    assert re.fullmatch("[xyz]{4}\n", cli("run", tiny_pair, "-p", "x", "--regex", "[xyz]{4}").stdout)
    (tmp_path / "g.lark").write_text('start: "a" /[0-9]/ "b"\n', encoding="utf-8")
    assert re.fullmatch("a[0-9]b\n", cli("run", tiny_pair, "-p", "x", "--lark", tmp_path / "g.lark").stdout)


def test_an_answer_that_is_cut_says_so(tiny_pair: Path) -> None:
    """A text that the limit ends before the grammar does is reported as cut, on stderr and in JSON."""
    pytest.importorskip("llguidance")
    options = ("run", tiny_pair, "-p", "x", "--regex", "a{9}", "--max-new-tokens", 3)
    assert "cut at --max-new-tokens" in cli(*options).stderr
    assert json.loads(cli(*options, "--json").stdout)["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--repetition-penalty 0", "repetition_penalty is 0.0; it must be"),
        ("--typical-p 2", "typical_p is 2.0; it must be"),
        ("--logit-bias 3", "--logit-bias is '3'; write ID=BIAS"),
        ("--logit-bias 3=x", "--logit-bias is '3=x'; write ID=BIAS"),
        ("--ban-token -1", "banned_tokens is (-1,); it must be"),
        ("--ban-token 999", "banned_tokens has the token id 999, outside the vocabulary of 264"),
        ("--json-schema no-such-file", "no-such-file"),
        ("--json-schema bad.json", "bad.json: the JSON schema is not valid JSON"),
        ("--json-schema latin.json", "latin.json is not UTF-8 text (byte 0)"),
        ("--regex (a", "the regular expression cannot be used: unclosed group"),
        ("--regex a --lark bad.json", "use one of --json-schema, --regex and --lark"),
    ],
)
def test_bad_values_are_one_line(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, reason: str
) -> None:
    """Exit code 2 and what is wrong."""
    pytest.importorskip("llguidance")
    (tmp_path / "bad.json").write_text("{", encoding="utf-8")
    (tmp_path / "latin.json").write_bytes(b"\xff{}")
    monkeypatch.chdir(tmp_path)
    assert reason in error_line(cli("run", tiny_bundle, "-p", "x", *words(options)), 2)


FLOATS = [
    (name, option.opts[0])
    for name in COMMANDS
    for option in main.get_command(click.Context(main), name).params  # type: ignore[union-attr]
    if isinstance(option, click.Option)
    and (isinstance(option.type, type(click.FLOAT)) or option.name in ("budget", "logit_bias"))
]


def test_all_options_that_are_numbers_are_found() -> None:
    """The list below has the commands that take any."""
    assert {name for name, _ in FLOATS} >= {"run", "verify", "plan", "tune", "bench"}
    assert ("run", "--temperature") in FLOATS


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "9" * 400])
@pytest.mark.parametrize(("name", "flag"), FLOATS, ids=" ".join)
def test_numbers_are_finite(tiny_pair: Path, tmp_path: Path, name: str, flag: str, value: str) -> None:
    """No command takes for a number what is none or has no end: one line, and exit code 2."""
    value = f"5={value}" if flag == "--logit-bias" else value
    args = ["--alpha", 0.5, "--cost-ratio", 0.1] if name == "plan" else [tiny_pair]
    args += ["--output", tmp_path / "trials"] if name == "bench" else ["-p", "x"] if name == "run" else []
    error_line(cli(name, *args, flag, value), 2)


PATHS = [
    (name, option.opts[0] if isinstance(option, click.Option) else "")
    for name in COMMANDS
    for option in main.get_command(click.Context(main), name).params  # type: ignore[union-attr]
    if isinstance(option.type, click.Path) or option.name in ("source", "draft", "target")
]


@pytest.mark.parametrize(("name", "flag"), PATHS, ids=" ".join)
def test_an_empty_name_is_no_folder(tiny_bundle: Path, name: str, flag: str) -> None:
    """A shell variable that is not set does not stand for the current folder, in any command."""
    needed = {"plan": ["--alpha", 0.5, "--cost-ratio", 0.1]}
    needed |= {key: ["-o", "x", *(["x"] if flag else [])] for key in ("export", "import", "distill")}
    args = needed.get(name, [tiny_bundle] if flag else [])
    assert "is empty" in error_line(cli(name, *args, *([flag] if flag else []), ""), 2)


def test_a_history_needs_a_file(tiny_bundle: Path, tmp_path: Path) -> None:
    """The drafter of earlier answers without their file says which option gives it; with it, the file is made."""
    args = ("run", tiny_bundle, "-p", "x", "--max-new-tokens", 4, "--drafter", "history")
    assert "give --history FILE" in error_line(cli(*args), 2)
    assert cli(*args, "--history", tmp_path / "h").exit_code == 0
    assert (tmp_path / "h").stat().st_size > 8


def test_without_the_extra(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What to install, and exit code 1, since the call is right."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    line = error_line(cli("run", tiny_bundle, "-p", "x", "--regex", "a"), 1)
    assert "pip install 'edgespec[structured]'" in line
