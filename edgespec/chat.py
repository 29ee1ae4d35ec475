"""Messages -> the prompt text of a model: chat templates, rendered in a sandbox, and which turns fit.

A template comes with the bundle and is untrusted: it sees no Python internals, changes nothing, and is stopped
when it takes too long or writes too much. Knows nothing of tokens or of models.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn, TypeAlias

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.filters import do_indent
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Cycler, Joiner, Namespace

from edgespec.errors import BundleError, ConfigError, ContextOverflowError

Message: TypeAlias = Mapping[str, str]

MAX_SECONDS = 5.0
# Beyond what the messages themselves hold; the longest real templates write a few thousand characters.
MAX_EXTRA_CHARACTERS = 1 << 20


class ChatTemplate:
    """A Jinja chat template, with the names and settings that templates of the Hugging Face hub are written for.

    Args:
        source: the template.
        special_tokens: name -> text (`bos_token`, `eos_token`, ...) as the template uses them.
        name: of the template in messages.

    Raises:
        BundleError: the template cannot be parsed.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], name: str = "the chat template") -> None:
        self._name = name
        self._special_tokens = dict(special_tokens)
        self._environment = _Sandbox()
        try:
            self._template = self._environment.from_string(source)
        except TemplateSyntaxError as error:
            raise BundleError(f"{name} has a syntax error in line {error.lineno}: {_one_line(error)}") from error
        except Exception as error:  # Python, too, may refuse the compiled code
            raise BundleError(f"{name} cannot be compiled: {_one_line(error)}") from error

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The prompt, special tokens included: encode it without adding more.

        Args:
            messages: of `role` and `content`.
            add_generation_prompt: end with the header of the answer.
        Raises:
            ConfigError: the messages are malformed, or the template refuses them (by `raise_exception`).
            BundleError: the template fails in any other way.
        """
        check_messages(messages)
        self._environment.start(MAX_EXTRA_CHARACTERS + 4 * sum(len(m["content"]) for m in messages))
        variables: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens}
        variables.update(messages=[dict(m) for m in messages], add_generation_prompt=add_generation_prompt)
        try:
            return self._environment.bounded(self._template.generate(variables))
        except _Refusal as error:
            raise ConfigError(f"{self._name} refuses these messages: {_one_line(error)}") from error
        except Exception as error:  # a template can raise anything that Python can
            kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            raise BundleError(f"{self._name} fails: {kind}{_one_line(error)}; use a bundle with another") from error


def drop_oldest(
    messages: Sequence[Message], count: Callable[[Sequence[Message]], int], limit: int
) -> tuple[list[Message], tuple[Message, ...]]:
    """What is kept of a conversation that must fit, and what is dropped: whole turns, oldest first.

    A turn is a user's message and what follows it up to the next. System messages at the beginning and the last
    turn are always kept. How much is dropped is rounded up to quarters of the limit, and depends on nothing but the
    messages: while a conversation grows by less than that it is cut in the same place each time, so that a cache of
    the last prompt still holds the beginning of the next one.

    Args:
        messages: oldest first.
        count: tokens of a conversation, by its messages.
        limit: most tokens that what is kept may have.
    Raises:
        ContextOverflowError: the last turn does not fit.
    """
    total = count(messages)
    if total <= limit:
        return list(messages), ()
    first = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    starts = [i for i, m in enumerate(messages) if m["role"] == "user" and i > first]

    def kept(start: int) -> list[Message]:
        return [*messages[:first], *messages[start:]]

    quarter = max(1, limit // 4)
    wanted = total - -(-(total - limit) // quarter) * quarter
    at = bisect_left(starts, True, key=lambda start: count(kept(start)) <= wanted)
    start = starts[min(at, len(starts) - 1)] if starts else first
    if count(kept(start)) > limit:
        raise ContextOverflowError(
            f"the last turn and the system prompt have {count(kept(start))} tokens and only {limit} fit beside the "
            "answer: shorten them"
        )
    return kept(start), tuple(messages[first:start])


def check_messages(messages: Sequence[Message]) -> None:
    """Raise ConfigError unless there are messages, each with strings `role` and `content`."""
    if isinstance(messages, str | Mapping) or not messages:
        raise ConfigError("messages is empty or not a list; pass a list of {'role': ..., 'content': ...}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ConfigError(f"messages[{index}] is a {type(message).__name__}; it must be a mapping")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ConfigError(f"messages[{index}][{key!r}] is {message.get(key)!r:.60}; it must be a string")
        if not message["role"]:
            raise ConfigError(f"messages[{index}]['role'] is empty; it must be 'user', 'assistant' or 'system'")


class _Refusal(TemplateError):
    """The template called `raise_exception`."""


class _Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}` marks the answers for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 reads a class attribute)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_EXTENSIONS: list[str | type[Extension]] = ["jinja2.ext.loopcontrols", _Generation]


class _Generator(CodeGenerator):
    """Compiles `a ~ b` into a call of the sandbox, which the operator would otherwise bypass."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concatenate((")
        for item in node.nodes:
            self.visit(item, frame)
            self.write(", ")
        self.write("))")


class _Sandbox(ImmutableSandboxedEnvironment):
    """The immutable sandbox, with bounds on time, on the output and on strings in between.

    The checks are where the sandbox already looks: calls, attributes and some operators. A loop body that has
    none of these can only be as long as one `range` (which the sandbox bounds), so no template runs for ever.
    Not bounded beforehand: what one string method or filter makes of arguments that are within the bounds.
    """

    intercepted_binops = frozenset({"*", "**", "+", "%"})
    code_generator_class = _Generator

    def __init__(self) -> None:
        # Nothing is computed at compile time, where there are no bounds yet.
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=_EXTENSIONS, optimized=False)
        for name in ("center", "format"):
            del self.filters[name]
        self.globals.clear()
        self.globals.update(_GLOBALS)
        self.filters.update(tojson=_tojson, indent=_indent)

    def start(self, max_characters: int) -> None:
        """Begin a rendering with fresh bounds."""
        self._max_characters = max_characters
        self._deadline = time.monotonic() + MAX_SECONDS

    def bounded(self, pieces: Any) -> str:
        """The joined output, or SecurityError as soon as it is too long."""
        written: list[str] = []
        length = 0
        for piece in pieces:
            length += len(piece)
            self._check(length)
            written.append(piece)
        return "".join(written)

    def _check(self, length: int) -> None:
        if length > self._max_characters:
            raise SecurityError(f"it builds more than {self._max_characters} characters")
        if time.monotonic() > self._deadline:
            raise SecurityError(f"it takes more than {MAX_SECONDS:g} seconds")

    def _checked(self, value: Any) -> Any:
        self._check(len(value) if isinstance(value, str | list | tuple) else 0)
        return value

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        for value in args:
            self._check(value if isinstance(value, int) else 0)
            self._checked(value)
        return self._checked(super().call(context, obj, *args, **kwargs))

    def getattr(self, obj: Any, attribute: str) -> Any:
        return self._checked(super().getattr(obj, attribute))

    def getitem(self, obj: Any, argument: Any) -> Any:
        return self._checked(super().getitem(obj, argument))

    def concatenate(self, values: tuple[Any, ...]) -> str:
        texts = [str(value) for value in values]
        self._check(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or (operator == "%" and isinstance(left, str)):
            raise SecurityError(f"it uses {operator} where its result has no bound")
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int):
                    self._check(len(value) * times)
        return self._checked(super().call_binop(context, operator, left, right))


def _raise_exception(message: object) -> NoReturn:
    raise _Refusal(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As `json.dumps`. Jinja's own filter escapes for HTML, which is not what models were trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    if (width if isinstance(width, int) else len(width)) > 100:
        raise SecurityError("it indents by more than 100 columns")
    return do_indent(text, width, first, blank)


_GLOBALS: dict[str, Any] = {
    "range": safe_range,
    "dict": dict,
    "namespace": Namespace,
    "cycler": Cycler,
    "joiner": Joiner,
    "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
}


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
