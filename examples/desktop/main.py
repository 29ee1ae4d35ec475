"""A chat window on edgespec: an example to copy. `python main.py --help` for its options."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from PySide6.QtCore import QStandardPaths, QTimer
from PySide6.QtWidgets import QApplication

from window import Window


def main() -> int:
    started = time.monotonic()
    parser = argparse.ArgumentParser(description="Chat with a local language model.")
    parser.add_argument("--bundle", type=Path, help="folder that `edgespec export` made [the default bundle]")
    parser.add_argument("--data", type=Path, help="folder for conversations and settings [the system's own place]")
    parser.add_argument("--check", metavar="PROMPT", help="ask this, print the answer and the times, and leave")
    options = parser.parse_args()

    app = QApplication(sys.argv[:1])
    app.setApplicationName("edgespec-chat")
    place = QStandardPaths.writableLocation(QStandardPaths.StandardLocation.AppDataLocation)
    window = Window(options.data or Path(place), options.bundle)
    window.show()
    if options.check is not None:
        QTimer.singleShot(0, lambda: _note(f"window after {time.monotonic() - started:.2f} s"))
        window.ready.connect(lambda: _note(f"model after {time.monotonic() - started:.2f} s"))
        window.ready.connect(lambda: window.ask(options.check))
        window.failed.connect(lambda text: (_note(text), app.exit(1)))
        window.answered.connect(lambda text: (_note(f"answer: {text}"), window.close()))
    return app.exec()


def _note(text: str) -> None:
    if sys.stdout is not None:  # a frozen program without a console has none
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
