"""Starts a frozen desktop example without a screen, has it answer, and prints its size and how long it took.

`python check_frozen.py PROGRAM_FOLDER BUNDLE`
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path


def start(command: list[str | Path], env: dict[str, str]) -> dict[str, float]:
    """Run it; seconds from its start to its window, its model, its answer and its end."""
    started, times = time.monotonic(), {}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as child:
        watchdog = threading.Timer(120, child.kill)
        watchdog.start()
        assert child.stdout is not None
        for line in child.stdout:
            times[line.split(maxsplit=1)[0].rstrip(":")] = time.monotonic() - started
        code = child.wait()
        watchdog.cancel()
    assert code == 0, code
    assert list(times) == ["window", "model", "answer"], times
    return {**times, "end": time.monotonic() - started}


def main(folder: Path, bundle: Path) -> None:
    program = folder / ("edgespec-chat.exe" if sys.platform == "win32" else "edgespec-chat")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
    # Nothing of this Python, and none of its libraries, may help.
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    env |= {"QT_QPA_PLATFORM": "offscreen"}
    for run in ("first", "second"):
        with tempfile.TemporaryDirectory() as data:
            command = [program, "--bundle", bundle, "--data", data, "--check", "hello"]
            times = start(command, env)
            assert len(list(Path(data).glob("conversations/*.json"))) == 1
        shown = ", ".join(f"{name} after {seconds:.2f} s" for name, seconds in times.items())
        sys.stdout.write(f"{run} start of the frozen program: {shown}\n")
    sys.stdout.write(f"frozen size: {size / 1e6:.0f} MB\n")


main(Path(sys.argv[1]), Path(sys.argv[2]).resolve())
