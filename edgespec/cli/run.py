"""`edgespec run`: one answer to a prompt, or a chat."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click

import edgespec
from edgespec.bundle import MANIFEST, default_bundle_path
from edgespec.cli import terminal
from edgespec.cli.answer_view import Look, collect, show
from edgespec.cli.documents import Document, compose, read_file, read_stdin
from edgespec.cli.errors import INTERRUPTED
from edgespec.cli.help import HELP
from edgespec.cli.options import NamedPath, option, params_of, sampling_options, sampling_params
from edgespec.conversation import Conversation
from edgespec.errors import ConfigError, MissingExtraError
from edgespec.params import (
    DrafterName,
    Overflow,
    RequestParams,
    RuntimeParams,
    SamplingParams,
    SpecParams,
    Spinning,
    Verifier,
)

if TYPE_CHECKING:
    from edgespec import Engine, TextPiece, TextStream

_F = TypeVar("_F", bound=Callable[..., Any])
_SPEC, _RUNTIME = SpecParams(), RuntimeParams()


def _engine_options(command: _F) -> _F:
    # Names that applications give to drafters of their own are not for the command line.
    drafters, spinning = click.Choice(get_args(get_args(DrafterName)[0])), click.Choice(get_args(Spinning))
    verifiers = click.Choice(get_args(Verifier))
    for add in (
        option("--near-tie", type=float, default=_RUNTIME.near_tie, text="Decide greedy ties closer than this alone."),
        option("--exact", text="Greedy text bit-identical to that of --drafter none.", is_flag=True),
        option("--spinning", text="Whether idle threads spin.", default=_RUNTIME.spinning, type=spinning),
        option("--threads", text="Threads per operator.  [default: one per physical core]", type=int),
        option(
            "--map-weights/--no-map-weights",
            text="Map weights from a file in the cache folder, on the CPU.",
            default=_RUNTIME.map_weights,
        ),
        option("--draft-provider", text="Execution provider of the draft model.  [default: that of --provider]"),
        option("--provider", text="Execution provider: cpu, cuda, ...", default=_RUNTIME.provider),
        option("--verifier", text="coupled: one text per seed.", default=_SPEC.verifier, type=verifiers),
        option("--num-draft-tokens", text="Drafted per round.  [default: as many as pay]", type=int),
        option(
            "--history",
            text="Draft from the token ids of answers kept here; new ones are added.",
            type=NamedPath(dir_okay=False),
            metavar="FILE",
        ),
        option("--drafter", text="Who drafts.", default=_SPEC.drafter, type=drafters),
    ):
        command = add(command)
    return command


def _input_options(command: _F) -> _F:
    file = NamedPath(exists=True, dir_okay=False)
    overflows = click.Choice(get_args(Overflow))
    for add in (
        option("--json", "as_json", text="Print one JSON document with the answer and its figures.", is_flag=True),
        option("--plain", text="Show the text as the model writes it, Markdown not rendered.", is_flag=True),
        option("--show-drafts", text="Tint text whose tokens were drafted; with --json, list it.", is_flag=True),
        option("--max-time", text="Longest time for an answer, in seconds.", type=float),
        option(
            "--overflow",
            text="What a text does that outgrows the context.  [default: drop_oldest in a chat, else stop]",
            type=overflows,
        ),
        option("--system", text="System prompt.  [default: the template's own]"),
        option("--file", "-f", "files", text="Ask about this text; may be repeated.", type=file, multiple=True),
        option("--prompt", "-p", text="Answer this and end. What is piped to stdin is then a text beside it."),
    ):
        command = add(command)
    return command


@click.command("run", context_settings=HELP)
@click.argument("bundle", required=False, type=NamedPath())
@_input_options
@sampling_options
@_engine_options
def run_command(bundle: Path | None, prompt: str | None, system: str | None, as_json: bool, **options: Any) -> int:
    """Answer a prompt, or chat.

    BUNDLE is a folder that `edgespec export` made. Without it the default bundle is used, which is made first if it
    is not there yet. Text piped to stdin is the prompt, or beside --prompt a document. The answer goes to stdout, its
    figures to stderr.
    """
    params = sampling_params(options)
    if options["drafter"] == "history" and options["history"] is None:
        raise click.UsageError("--drafter history needs a file: give --history FILE, which need not exist yet")
    spec, runtime = params_of(SpecParams, options), params_of(RuntimeParams, options)
    documents = [read_file(path) for path in options["files"]]
    text = _prompt(prompt, documents)
    if text is None and as_json:
        raise click.UsageError("--json needs a prompt: give --prompt, or pipe it to stdin")
    look = Look(markdown=not options["plain"], drafts=options["show_drafts"])
    if look.drafts and not as_json and not terminal.is_capable(sys.stdout):
        terminal.note("stdout is not a terminal with colours: --show-drafts cannot tint anything there")
    request = RequestParams(overflow=options["overflow"] or ("drop_oldest" if text is None else "stop"))
    if bundle is None:
        ensure_default_bundle()
    with _load(bundle, spec, runtime) as engine:
        if text is not None:
            return answer(engine, Question(text, system, params, request, look, as_json))
        if engine.bundle.manifest.chat_template is None:
            raise ConfigError(f"{engine.bundle.path} has no chat template; give a --prompt to be continued")
        from edgespec.cli.chat_loop import chat_loop
        from edgespec.cli.chat_session import ChatSession

        return chat_loop(ChatSession(Conversation(engine, system), params, request, look, documents))


def _prompt(prompt: str | None, documents: list[Document]) -> str | None:
    """What is to be answered; `None` for a chat."""
    piped = read_stdin(is_needed=prompt is None)
    if prompt is None:
        prompt, piped = piped, None
    if prompt is None:
        return None
    if not prompt.strip():
        raise click.UsageError("The prompt is empty: give --prompt some text, or pipe it to stdin")
    beside = [Document(piped)] if piped else []
    return compose(prompt, [*documents, *beside])


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


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt, and how it is asked and answered.

    Attributes:
        text: what is asked, documents included.
        system: the system prompt, if one was given.
    """

    text: str
    system: str | None
    params: SamplingParams
    request: RequestParams
    look: Look
    as_json: bool


def answer(engine: Engine, question: Question) -> int:
    """Answer one prompt on stdout; the exit code."""

    def make(request: RequestParams) -> TextStream:
        return _ask(engine, question, request)

    if question.as_json:
        stream, pieces = collect(make, question.request)
        terminal.write_json(_document(stream, pieces if question.look.drafts else None))
    else:
        stream = show(make, question.request, question.look)
        terminal.note(terminal.footer(stream.stats, stream.finish_reason))
    return INTERRUPTED if stream.finish_reason == "cancelled" else 0


def _document(stream: TextStream, pieces: list[TextPiece] | None) -> dict[str, Any]:
    shown = {} if pieces is None else {"pieces": [asdict(piece) for piece in pieces]}
    return {
        "text": stream.text_so_far,
        "token_ids": stream.token_ids,
        "finish_reason": stream.finish_reason,
        "stats": stream.stats.as_dict(),
        **shown,
    }


def _ask(engine: Engine, question: Question, request: RequestParams) -> TextStream:
    if engine.bundle.manifest.chat_template is not None:
        messages = [{"role": "user", "content": question.text}]
        if question.system is not None:
            messages.insert(0, {"role": "system", "content": question.system})
        return engine.chat(messages, question.params, request)
    if question.system is not None:
        raise ConfigError(f"{engine.bundle.path} has no chat template, so it has no place for --system; leave it out")
    terminal.note("this bundle has no chat template: the prompt is continued as plain text")
    question.look.markdown = False
    return engine.generate(question.text, question.params, request)
