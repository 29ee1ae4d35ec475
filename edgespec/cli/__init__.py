"""The command line: `edgespec run`, `export`, `info` and the other commands. Owns names, help and exit codes.

A command's module is imported when the command is called, so that `edgespec --help` loads neither ONNX Runtime nor
anything that an export needs.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from edgespec import __version__
from edgespec.cli.errors import exit_code
from edgespec.cli.help import HELP
from edgespec.cli.terminal import prepare_streams
from edgespec.errors import EdgespecError

# name -> module, attribute, help in the list of commands
COMMANDS = {
    "run": ("edgespec.cli.run", "run_command", "Answer a prompt, or chat."),
    "export": ("edgespec.cli.export", "export_command", "Make a bundle from a model, and perhaps a draft model."),
    "import": ("edgespec.cli.import_", "import_command", "Make a bundle from ONNX folders that others made."),
    "distill": ("edgespec.cli.distill", "distill_command", "Make a draft from what a model itself writes."),
    "info": ("edgespec.cli.info", "info_command", "Show versions, providers and what is in a bundle."),
    "verify": ("edgespec.cli.verify", "verify_command", "Test that a bundle's drafts change nothing."),
    "plan": ("edgespec.cli.plan", "plan_command", "Show what drafting would gain."),
    "tune": ("edgespec.cli.tune", "tune_command", "Measure what calls cost here, and how to run a bundle best."),
    "bench": ("edgespec.cli.bench", "bench_command", "Measure what drafting gains, against other engines too."),
}


class _Cli(click.Group):
    """Commands by name, and errors as one line."""

    debug = False

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in COMMANDS.items()])

    def main(  # type: ignore[override]  # click's overloads tell when it exits; this one always does
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> NoReturn:
        self.debug = False
        try:
            if not prepare_streams():
                raise EdgespecError("stdout is closed; `> /dev/null` (Windows: `> NUL`) says that nobody wants it")
            code = super().main(args, "edgespec", **extra | {"standalone_mode": False})
            sys.stdout.flush()
        except (Exception, KeyboardInterrupt) as error:  # every end of a command but the good one
            code = exit_code(error, debug=self.debug)
        sys.exit(code if isinstance(code, int) else 0)


@click.group(cls=_Cli, invoke_without_command=True, context_settings=HELP)
@click.version_option(__version__, message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def main(ctx: click.Context, debug: bool) -> None:
    """Local language models on ONNX Runtime, made faster by lossless speculative decoding."""
    assert isinstance(ctx.command, _Cli)
    ctx.command.debug = debug
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
