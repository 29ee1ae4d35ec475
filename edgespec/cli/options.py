"""Options that are fields of the library's parameters: names, help, and how they become parameters."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from edgespec.errors import ConfigError
from edgespec.params import Grammar, SamplingParams

_F = TypeVar("_F", bound=Callable[..., Any])
_SAMPLING = SamplingParams()


class NamedPath(click.Path):
    """A path of a file or folder. An empty one, as of a shell variable that is not set, is not the current folder."""

    def __init__(self, *, exists: bool = False, dir_okay: bool = True) -> None:
        super().__init__(exists=exists, dir_okay=dir_okay, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not os.fspath(value):
            self.fail("the name is empty", param, ctx)
        return super().convert(value, param, ctx)


class NamedSource(click.types.StringParamType):
    """A name of a model, which may be a folder: likewise."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not value:
            self.fail("the name is empty", param, ctx)
        return super().convert(value, param, ctx)


class FiniteRange(click.FloatRange):
    """A number between two bounds; NaN, which no comparison refuses, is none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


def option(*names: str, text: str, default: object = None, **kind: Any) -> Callable[[_F], _F]:
    """An option whose default, if it has one, is that of the parameters and is shown."""
    shown: dict[str, Any] = {} if default is None else {"default": default, "show_default": True}
    return click.option(*names, help=text, **shown, **kind)


def params_of(kind: Callable[..., Any], options: dict[str, Any]) -> Any:
    """The options that are fields of a class of parameters."""
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in options.items() if name in names})


def sampling_options(command: _F) -> _F:
    """Options that `sampling_params` makes `SamplingParams` of."""
    for add in reversed((*_cuts(), *_penalties(), *_tokens(), *_text())):
        command = add(command)
    return command


def sampling_params(options: dict[str, Any]) -> SamplingParams:
    """The `SamplingParams` of the options that `sampling_options` adds.

    Raises:
        ConfigError: a value is out of its range, or a file holds no grammar.
    """
    params: SamplingParams = params_of(SamplingParams, options | {"grammar": _grammar(options)})
    return params


def _cuts() -> list[Callable[[_F], _F]]:
    default = _SAMPLING
    return [
        option("--max-new-tokens", text="Longest answer.", default=default.max_new_tokens, type=int),
        option("--temperature", text="0 is greedy.", default=default.temperature, type=float),
        option("--top-k", text="Keep this many tokens; 0 keeps all.", default=default.top_k, type=int),
        option("--top-p", text="Keep the most probable tokens up to this mass.", default=default.top_p, type=float),
        option("--min-p", text="Keep tokens this probable beside the best.", default=default.min_p, type=float),
        option(
            "--typical-p", text="Keep the most typical tokens, to this mass.", default=default.typical_p, type=float
        ),
        option("--seed", text="Make sampling repeatable.", type=int),
    ]


def _penalties() -> list[Callable[[_F], _F]]:
    names = {
        "--repetition-penalty": "Divide logits of tokens seen before; 1 is off.",
        "--frequency-penalty": "Subtract for each time a token was used.",
        "--presence-penalty": "Subtract if a token was used.",
    }
    fields = {name: name.removeprefix("--").replace("-", "_") for name in names}
    return [
        *(option(n, text=t, default=getattr(_SAMPLING, fields[n]), type=float) for n, t in names.items()),
        option(
            "--no-repeat-ngram-size",
            text="No sequence of this many tokens twice; 0 is off.",
            default=_SAMPLING.no_repeat_ngram_size,
            type=int,
        ),
    ]


def _tokens() -> list[Callable[[_F], _F]]:
    return [
        option(
            "--logit-bias",
            text="Add BIAS to the logit of token ID; may be repeated.",
            metavar="ID=BIAS",
            multiple=True,
            callback=lambda ctx, param, values: dict(map(_bias, values)),
        ),
        option("--ban-token", "banned_tokens", text="Never this ID; may be repeated.", multiple=True, type=int),
        option("--min-new-tokens", text="Shortest answer.", default=_SAMPLING.min_new_tokens, type=int),
    ]


def _text() -> list[Callable[[_F], _F]]:
    file = NamedPath(exists=True, dir_okay=False)
    return [
        option("--stop", text="End the answer before this text; may be repeated.", multiple=True, metavar="TEXT"),
        option("--json-schema", text="Answer with JSON of this schema.", type=file, metavar="FILE"),
        option("--regex", text="Answer with text that this matches whole.", metavar="PATTERN"),
        option("--lark", text="Answer with text of this Lark grammar.", type=file, metavar="FILE"),
    ]


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError as error:
        raise click.UsageError(f"--logit-bias is {text!r}; write ID=BIAS, as in 50=-2.5") from error


def _grammar(options: dict[str, Any]) -> Grammar | None:
    given = [name for name in ("json_schema", "regex", "lark") if options.get(name) is not None]
    if len(given) > 1:
        raise click.UsageError("use one of --json-schema, --regex and --lark")
    if not given:
        return None
    value = options[given[0]]
    if given[0] == "regex":
        return Grammar.regex(value)
    make = Grammar.json_schema if given[0] == "json_schema" else Grammar.lark
    try:
        return make(value.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{value} is not UTF-8 text (byte {error.start}): convert it first") from error
    except ConfigError as error:
        raise ConfigError(f"{value}: {error}") from error
