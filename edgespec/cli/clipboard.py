"""The clipboard: the system's own program where there is one, else the terminal's."""

from __future__ import annotations

import base64
import shutil
import subprocess
import sys

from edgespec.cli import terminal
from edgespec.errors import EdgespecError

_PROGRAMS = (
    ("clip", "utf-16"),
    ("pbcopy", "utf-8"),
    ("wl-copy", "utf-8"),
    ("xclip -selection clipboard", "utf-8"),
    ("xsel --clipboard --input", "utf-8"),
)


def copy(text: str) -> str:
    """Put text on the clipboard; how it got there, for the user.

    Raises:
        EdgespecError: there is no way to it.
    """
    for command, encoding in _PROGRAMS:
        name, *arguments = command.split()
        program = shutil.which(name)
        if program is not None and _feed([program, *arguments], text.encode(encoding, "replace")):
            return f"by {name}"
    if terminal.is_capable(sys.stdout):
        # OSC 52; terminals that do not know it ignore it, which cannot be noticed from here.
        terminal.write_raw(f"\x1b]52;c;{base64.b64encode(text.encode('utf-8', 'replace')).decode()}\a")
        return "through the terminal, if it allows that"
    raise EdgespecError("no clipboard was found: install xclip, xsel or wl-clipboard, or use /save")


def _feed(command: list[str], data: bytes) -> bool:
    """Whether the program took it. Output goes nowhere: some stay in the background and keep the pipe open."""
    null = subprocess.DEVNULL
    try:
        done = subprocess.run(command, input=data, timeout=5, check=False, stdout=null, stderr=null)
        return done.returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
