"""What the user sees: streams, the footer, progress. Colour and movement only where there is a terminal.

The answer goes to stdout, everything else to stderr. Knows nothing of engines.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from edgespec.stats import GenerationStats

# A model may write what moves the cursor or retitles the window; a terminal gets only lines and tabs.
_CONTROLS = {c: None for c in [*range(32), *range(127, 160)] if chr(c) not in "\n\t"}


def prepare_streams() -> bool:
    """UTF-8 where no console says otherwise; `?` for characters that a console does not have.

    Streams that were closed before we began become the null device, so that nobody has to ask for them and no file
    that is opened later gets their numbers; stdin stays None, which says that there never was any.

    Returns:
        Whether there is a stdout.
    """
    has_stdout = sys.stdout is not None
    if sys.stdin is None:
        os.open(os.devnull, os.O_RDONLY)  # kept for as long as we run
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_WRONLY)
            setattr(sys, name, open(null, "w", encoding="utf-8", closefd=False))  # noqa: SIM115  # likewise
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            encoding = None if stream.isatty() or sys.platform != "win32" else "utf-8"
            stream.reconfigure(encoding=encoding, errors="replace")
    return has_stdout


def is_capable(stream: IO[str]) -> bool:
    """Whether a stream is a terminal that can do more than print: it understands ANSI sequences."""
    if not stream.isatty():
        return False
    console = console_on(stream)
    return not console.is_dumb_terminal and not console.legacy_windows


def write(text: str) -> None:
    """A piece of an answer, at once."""
    write_raw(clean(text) if sys.stdout.isatty() else text)


def clean(text: str) -> str:
    """Text without what a terminal would obey. Bundles, templates and models say what they like: all text of others
    passes through here on its way to a terminal."""
    return text.translate(_CONTROLS)


def clean_line(text: str) -> str:
    """The same in one line, which can pass for no other."""
    return clean(" ".join(text.split()))


def tint(text: str) -> str:
    """Text in another colour, or underlined where colours are not wanted (the variable NO_COLOR)."""
    on, off = ("4", "24") if os.environ.get("NO_COLOR") else ("36", "39")
    return f"\x1b[{on}m{text}\x1b[{off}m"


def write_raw(text: str) -> None:
    """Text and escape sequences, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_json(document: object) -> None:
    """One JSON document on stdout."""
    import json

    is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    text = json.dumps(document, indent=2, ensure_ascii=not is_unicode)
    # JSON writes the other controls like this by itself.
    sys.stdout.write(re.sub(r"[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", text) + "\n")


def note(text: str) -> None:
    """A remark on stderr, dimmed on a terminal."""
    sys.stdout.flush()
    if sys.stderr.isatty():
        console_on(sys.stderr).print(clean(text), style="dim")
    else:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


@contextlib.contextmanager
def busy(text: str) -> Iterator[None]:
    """A spinner on a terminal while something takes its time; nothing elsewhere."""
    if not is_capable(sys.stderr):
        yield
        return
    with console_on(sys.stderr).status(text, spinner="line"):
        yield


class PrefillProgress:
    """Shows how much of a long prompt has been read, on a terminal; goes when the answer comes. A context manager.

    Called as `RequestParams.on_prefill`.
    """

    def __init__(self) -> None:
        self._status: Any = None

    def __call__(self, read: int, total: int) -> None:
        if self._status is None and read < total and is_capable(sys.stderr):
            self._status = console_on(sys.stderr).status("", spinner="line")
            self._status.start()
        if self._status is not None:
            self._status.update(f"reading the prompt: {read} of {total} tokens")

    def stop(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def __enter__(self) -> PrefillProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@contextlib.contextmanager
def quiet_keyboard() -> Iterator[None]:
    """What is typed meanwhile is kept for later and not echoed into an answer, where the system can do that."""
    try:
        import termios
    except ImportError:  # Windows echoes only what is being read
        yield
        return
    if not sys.stdin or not sys.stdin.isatty():
        yield
        return
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    quiet = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(number, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(number, termios.TCSANOW, before)


def footer(stats: GenerationStats, finish_reason: str | None) -> str:
    """The measured figures of an answer, in one line. What is not known is not mentioned."""
    parts = [f"{stats.new_tokens} tokens"]
    if stats.tokens_per_s is not None:
        parts.append(f"{stats.tokens_per_s:.1f} tokens/s")
    if stats.prefill_s > 0:
        parts.append(f"first after {stats.prefill_s:.2f} s")
    if stats.acceptance is not None:
        parts.append(f"{stats.acceptance:.0%} of {stats.drafted} drafted tokens accepted")
    if stats.tokens_per_pass is not None:
        parts.append(f"{stats.tokens_per_pass:.2f} tokens per target pass")
    ends = {
        "length": "cut at --max-new-tokens",
        "context": "cut where the context is full",
        "time": "cut at --max-time",
        "cancelled": "stopped",
    }
    return ", ".join([*parts, *filter(None, [ends.get(finish_reason or "")])])


class ExportProgress:
    """Steps of an export: a bar on a terminal, a line per step elsewhere. A context manager."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> ExportProgress:
        if is_capable(sys.stderr):
            from rich import progress

            columns = (progress.SpinnerColumn("line"), progress.TextColumn("{task.description}", markup=False))
            more = (progress.BarColumn(), progress.TaskProgressColumn(), progress.TimeElapsedColumn())
            self._bar = progress.Progress(*columns, *more, console=console_on(sys.stderr))
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            if kind is None:
                self._finish()
            self._bar.stop()

    def step(self, name: str) -> None:
        if self._bar is None:
            note(f"{name} ...")
            return
        self._finish()
        self._task = self._bar.add_task(clean(name), total=None)

    def advance(self, fraction: float) -> None:
        if self._bar is not None:
            self._bar.update(self._task, total=1.0, completed=fraction)

    def note(self, text: str) -> None:
        self._print(f"  {text}", "dim")

    def warn(self, text: str) -> None:
        self._print(f"warning: {text}", "yellow")

    def _print(self, text: str, style: str) -> None:
        if self._bar is None:
            note(text)
        else:
            self._bar.console.print(clean(text), style=style)

    def _finish(self) -> None:
        if self._task is not None:
            self._bar.update(self._task, total=1.0, completed=1.0)
            self._bar.stop_task(self._task)


def console_on(stream: IO[str]) -> Console:
    """rich's console. Bound to today's stream: a bar must go on moving while somebody else's output is redirected."""
    from rich.console import Console

    return Console(file=stream, markup=False, highlight=False, emoji=False)
