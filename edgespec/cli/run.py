"""`edgespec run`: one answer to a prompt, or a chat."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click

import edgespec
from edgespec.bundle import MANIFEST, default_bundle_path
from edgespec.chat import Conversation
from edgespec.cli import terminal
from edgespec.cli.errors import INTERRUPTED
from edgespec.errors import ConfigError, MissingExtraError
from edgespec.params import DrafterName, RuntimeParams, SamplingParams, SpecParams, Spinning, Verifier

if TYPE_CHECKING:
    from edgespec import Engine, TextStream

_F = TypeVar("_F", bound=Callable[..., Any])
_SAMPLING, _SPEC, _RUNTIME = SamplingParams(), SpecParams(), RuntimeParams()


def _option(*names: str, text: str, default: object = None, **kind: Any) -> Callable[[_F], _F]:
    """An option whose default, if it has one, is that of the parameters and is shown."""
    shown: dict[str, Any] = {} if default is None else {"default": default, "show_default": True}
    return click.option(*names, help=text, **shown, **kind)


def _sampling_options(command: _F) -> _F:
    default = _SAMPLING
    for option in (
        _option("--stop", text="End the answer before this text; may be repeated.", multiple=True, metavar="TEXT"),
        _option("--seed", text="Make sampling repeatable.", type=int),
        _option("--min-p", text="Keep tokens this probable beside the best.", default=default.min_p, type=float),
        _option("--top-p", text="Keep the most probable tokens up to this mass.", default=default.top_p, type=float),
        _option("--top-k", text="Keep this many tokens; 0 keeps all.", default=default.top_k, type=int),
        _option("--temperature", text="0 is greedy.", default=default.temperature, type=float),
        _option("--max-new-tokens", text="Longest answer.", default=default.max_new_tokens, type=int),
    ):
        command = option(command)
    return command


def _engine_options(command: _F) -> _F:
    drafters, spinning = click.Choice(get_args(DrafterName)), click.Choice(get_args(Spinning))
    verifiers = click.Choice(get_args(Verifier))
    for option in (
        _option("--exact", text="Greedy text bit-identical to that of --drafter none.", is_flag=True),
        _option("--spinning", text="Whether idle threads spin.", default=_RUNTIME.spinning, type=spinning),
        _option("--threads", text="Threads per operator.  [default: one per physical core]", type=int),
        _option("--provider", text="Execution provider: cpu, cuda, ...", default=_RUNTIME.provider),
        _option("--verifier", text="coupled: one text per seed.", default=_SPEC.verifier, type=verifiers),
        _option("--num-draft-tokens", text="Drafted per round.", default=_SPEC.num_draft_tokens, type=int),
        _option("--drafter", text="Who drafts.", default=_SPEC.drafter, type=drafters),
    ):
        command = option(command)
    return command


@click.command("run")
@click.argument("bundle", required=False, type=click.Path(path_type=Path))
@_option("--prompt", "-p", text="Answer this and end. Text piped to stdin does the same.")
@_option("--system", text="System prompt.  [default: the template's own]")
@_sampling_options
@_engine_options
@_option("--json", "as_json", text="Print one JSON document with the answer and its figures.", is_flag=True)
def run_command(
    bundle: Path | None,
    prompt: str | None,
    system: str | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Answer a prompt, or chat.

    BUNDLE is a folder that `edgespec export` made. Without it the default bundle is used, which is made first if it
    is not there yet. The answer goes to stdout, its figures to stderr.
    """
    params = _params(SamplingParams, options)
    spec, runtime = _params(SpecParams, options), _params(RuntimeParams, options)
    if prompt is None and not sys.stdin.isatty():
        prompt = _read_stdin()
    if prompt is None and as_json:
        raise click.UsageError("--json needs a prompt: give --prompt, or pipe it to stdin")
    if prompt is not None and not prompt.strip():
        raise click.UsageError("The prompt is empty: give --prompt some text, or pipe it to stdin")
    if bundle is None:
        ensure_default_bundle()
    with _load(bundle, spec, runtime) as engine:
        if prompt is not None:
            return answer(engine, prompt, system, params, as_json=as_json)
        from edgespec.cli.chat_loop import chat_loop

        return chat_loop(engine, Conversation(system), params)


def _params(kind: Callable[..., Any], options: dict[str, Any]) -> Any:
    """The options that are fields of a class of parameters."""
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in options.items() if name in names})


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"stdin is not UTF-8 text (byte {error.start}): convert it first") from error


@contextlib.contextmanager
def _load(bundle: Path | None, spec: SpecParams, runtime: RuntimeParams) -> Iterator[Engine]:
    with terminal.busy("loading"):
        engine = edgespec.load(bundle, spec=spec, runtime=runtime)
    with engine:
        yield engine


def ensure_default_bundle() -> None:
    """Export the default bundle if there is none.

    Raises:
        MissingExtraError: it would have to be made, and what makes it is not installed.
    """
    path = default_bundle_path()
    if (path / MANIFEST).exists():
        return
    terminal.note(f"making the default bundle in {path}; this is done once")
    try:
        from edgespec.export import export_bundle

        # Libraries that print would otherwise write into the answer.
        with contextlib.redirect_stdout(sys.stderr), terminal.ExportProgress() as progress:
            export_bundle(path.name, path, progress=progress)
    except MissingExtraError:
        raise
    except ImportError as error:
        raise MissingExtraError(
            f"the default bundle is not there yet and {error.name or 'a package'} is needed to make it: "
            "run `pip install 'edgespec[export]'`, or name a bundle"
        ) from error


def answer(engine: Engine, prompt: str, system: str | None, params: SamplingParams, *, as_json: bool) -> int:
    """Answer one prompt on stdout; the exit code."""
    stream = _ask(engine, prompt, system, params)
    with stop_on_interrupt(stream.cancel), stream:
        text = show(stream, as_json=as_json)
    if as_json:
        document = {"text": text, "token_ids": stream.token_ids, "finish_reason": stream.finish_reason}
        terminal.write_json(document | {"stats": stream.stats.as_dict()})
    else:
        terminal.note(terminal.footer(stream.stats, stream.finish_reason))
    return INTERRUPTED if stream.finish_reason == "cancelled" else 0


def _ask(engine: Engine, prompt: str, system: str | None, params: SamplingParams) -> TextStream:
    if engine.bundle.manifest.chat_template is not None:
        chat = Conversation(system)
        chat.ask(prompt)
        return engine.chat(chat.messages(), params)
    if system is not None:
        raise ConfigError(f"{engine.bundle.path} has no chat template, so it has no place for --system; leave it out")
    terminal.note("this bundle has no chat template: the prompt is continued as plain text")
    return engine.generate(prompt, params)


def show(stream: TextStream, *, as_json: bool = False) -> str:
    """Write an answer as it comes, with a line end behind it; the whole text."""
    pieces = []
    for piece in stream:
        pieces.append(piece)
        if not as_json:
            terminal.write(piece)
    text = "".join(pieces)
    if not as_json and not text.endswith("\n"):
        terminal.write("\n")
    return text


@contextlib.contextmanager
def stop_on_interrupt(cancel: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C calls `cancel` instead of raising somewhere in the middle of the engine; a second one raises."""
    previous = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or previous is None or previous is signal.SIG_IGN:
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, previous)
        cancel()

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
