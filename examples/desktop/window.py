"""The window: a list of conversations, the one that is shown, a box for questions, and how fast the answer comes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import Qt, QTimer, Signal
from PySide6.QtGui import QCloseEvent
from PySide6.QtWidgets import (
    QDialog,
    QHBoxLayout,
    QLabel,
    QListWidget,
    QListWidgetItem,
    QMainWindow,
    QPushButton,
    QSplitter,
    QVBoxLayout,
    QWidget,
)

import edgespec
from store import Settings, Store
from threads import AnswerThread, LoadThread
from widgets import QuestionBox, SettingsDialog, Transcript

PATH = Qt.ItemDataRole.UserRole


class Window(QMainWindow):
    """Everything here runs in the thread of the window; `threads.py` has what does not.

    `ready` comes when the model is loaded, `failed` if it cannot be, `answered` with the text of each answer.
    """

    ready = Signal()
    failed = Signal(str)
    answered = Signal(str)

    def __init__(self, data: Path, bundle: Path | None = None) -> None:
        super().__init__()
        self._store = Store(data)
        self.settings = self._store.read_settings()
        self.engine: edgespec.Engine | None = None
        self.conversation: edgespec.Conversation | None = None
        self._path = self._store.new_path()
        self._answer: AnswerThread | None = None
        self._bundle, self._question = bundle, ""
        self._is_closed = False
        self._build()
        self._fill_list()
        spec = edgespec.SpecParams(drafter=self.settings.drafter)
        self._load(lambda: edgespec.load(bundle, spec=spec))

    def ask(self, question: str) -> None:
        """Have a question answered. Until the answer has ended only Stop and closing do anything."""
        if self.conversation is None or self._answer is not None or not question.strip():
            return
        self._question = question
        self.transcript.add_question(question)
        self.transcript.begin_answer()
        self._answer = AnswerThread(self.conversation, question, self.settings.params())
        # Methods of a QObject, so that Qt calls them in the window's thread; a lambda gives no such promise.
        self._answer.piece.connect(self._add_piece)
        self._answer.progress.connect(self._show_progress)
        self._answer.ended.connect(self._answer_ended)
        self._answer.start()
        self._timer.start()
        self._update_buttons()

    def stop(self) -> None:
        """End the answer; what there is of it stays."""
        if self._answer is not None:
            self._answer.stop()

    def closeEvent(self, event: QCloseEvent) -> None:
        """Threads first, then the engine. A cancelled answer ends within one pass of the model."""
        self._is_closed = True  # signals that are under way come to nothing
        self.hide()
        self._timer.stop()
        if self._answer is not None:
            self._answer.stop()
            self._answer.wait()
            self._save()
        self._loader.wait()
        for engine in (self.engine, self._loader.engine):
            if engine is not None:
                engine.close()
        super().closeEvent(event)

    def _build(self) -> None:
        self.setWindowTitle("edgespec chat")
        self.resize(900, 640)
        self.list = QListWidget()
        self.list.itemClicked.connect(self._open)
        self.new_button = QPushButton("New", clicked=self._new)
        self.delete_button = QPushButton("Delete", clicked=self._delete)
        self.settings_button = QPushButton("Settings…", clicked=self._change_settings)
        self.transcript = Transcript()
        self.question = QuestionBox()
        self.question.entered.connect(self._send)
        self.send_button = QPushButton("Send", clicked=self._send)
        self.stop_button = QPushButton("Stop", clicked=self.stop)
        self.speed = QLabel()
        left = _column(self.list, _row(self.new_button, self.delete_button), self.settings_button)
        right = _column(self.transcript, self.question, _row(self.speed, self.send_button, self.stop_button))
        splitter = QSplitter()
        splitter.addWidget(left)
        splitter.addWidget(right)
        splitter.setSizes([220, 680])
        self.setCentralWidget(splitter)
        self._timer = QTimer(self, interval=200, timeout=self._show_speed)

    def _load(self, make: Callable[[], edgespec.Engine]) -> None:
        self._status("loading the model …")
        self._loader = LoadThread(make)
        self._loader.loaded.connect(self._loaded)
        self._loader.failed.connect(self._load_failed)
        self._loader.start()
        self._update_buttons()

    def _loaded(self, engine: edgespec.Engine) -> None:
        if self._is_closed:
            return
        self._loader.wait()
        old, self.engine = self.engine, engine
        if old is not None:
            old.close()
        if self.conversation is None:
            self.conversation = edgespec.Conversation(engine, self.settings.system or None)
        else:
            self.conversation.engine = engine
        self._status(f"{engine.bundle.manifest.name}, drafter {engine.drafter}")
        self._update_buttons()
        self.ready.emit()

    def _load_failed(self, reason: str) -> None:
        self._loader.wait()
        self.transcript.add_error(reason)
        self._status("no model")
        self._update_buttons()
        self.failed.emit(reason)

    def _send(self) -> None:
        question = self.question.toPlainText()
        if self.conversation is not None and self._answer is None and question.strip():
            self.question.clear()
            self.ask(question)

    def _add_piece(self, text: str, is_drafted: bool) -> None:
        self.transcript.add_piece(text, is_drafted and self.settings.show_drafts)

    def _show_progress(self, read: int, total: int) -> None:
        self._status(f"reading the prompt: {read} of {total} tokens")

    def _answer_ended(self, error: str) -> None:
        if self._is_closed or self._answer is None or self.conversation is None:
            return
        self._answer.wait()
        self._timer.stop()
        self._show_speed()
        text = "" if self._answer.stream is None else self._answer.stream.text_so_far
        self._answer = None
        if not text:  # the conversation took the question back
            self.transcript.show_messages(self.conversation.messages)
            self.question.setPlainText(self._question)
            self._status("")
        elif not self.settings.show_drafts:
            self.transcript.end_answer(text)
        if error:
            self.transcript.add_error(error)
        self._save()
        self._update_buttons()
        self.answered.emit(text)

    def _show_speed(self) -> None:
        stream = None if self._answer is None else self._answer.stream
        if stream is None or not stream.stats.new_tokens:
            return
        stats, parts = stream.stats, [f"{stream.stats.new_tokens} tokens"]
        if stats.tokens_per_s is not None:
            parts.append(f"{stats.tokens_per_s:.0f} tokens/s")
        if stats.acceptance is not None:
            parts.append(f"{stats.acceptance:.0%} of the drafted ones accepted")
        if stream.dropped:
            parts.append(f"the oldest {len(stream.dropped)} messages did not fit")
        self._status(", ".join(parts))

    def _save(self) -> None:
        if self.conversation is not None and self.conversation.messages:
            self.conversation.save(self._path)
            self._fill_list()

    def _fill_list(self) -> None:
        self.list.clear()
        for path in self._store.paths():
            item = QListWidgetItem(self._store.title(path))
            item.setData(PATH, path)
            self.list.addItem(item)
            if path == self._path:
                self.list.setCurrentItem(item)

    def _open(self, item: QListWidgetItem) -> None:
        if self.engine is None:
            return
        path: Path = item.data(PATH)
        try:
            self.conversation = edgespec.Conversation.load(path, self.engine)
        except (edgespec.EdgespecError, OSError) as error:
            self.transcript.add_error(str(error))
            return
        self._path = path
        self.transcript.show_messages(self.conversation.messages)

    def _new(self) -> None:
        if self.engine is not None:
            self.conversation = edgespec.Conversation(self.engine, self.settings.system or None)
            self._path = self._store.new_path()
            self.transcript.clear()
            self.list.setCurrentItem(None)
            self.question.setFocus()

    def _delete(self) -> None:
        item = self.list.currentItem()
        if item is not None:
            self._store.delete(item.data(PATH))
            if item.data(PATH) == self._path:
                self._new()
            self._fill_list()

    def _change_settings(self) -> None:
        drafters = ["auto", "model", "ngram", "none"]
        if self.engine is not None and self.engine.bundle.manifest.draft is None:
            drafters.remove("model")
        dialog = SettingsDialog(self.settings, drafters, self)
        if dialog.exec() == QDialog.DialogCode.Accepted:
            self.apply(dialog.settings())

    def apply(self, settings: Settings) -> None:
        """Use and keep these settings. Another drafter works on the same loaded weights."""
        old, self.settings = self.settings, settings
        self._store.write_settings(settings)
        engine, spec = self.engine, edgespec.SpecParams(drafter=settings.drafter)
        if engine is None:
            self._load(lambda: edgespec.load(self._bundle, spec=spec))
        elif settings.drafter != old.drafter:
            self._load(lambda: engine.fork(spec))

    def _update_buttons(self) -> None:
        is_ready, is_answering = self.engine is not None and not self._loader.isRunning(), self._answer is not None
        for button in (self.send_button, self.new_button, self.delete_button, self.list):
            button.setEnabled(is_ready and not is_answering)
        # Settings also without a model: they may be why it could not be loaded.
        self.settings_button.setEnabled(not self._loader.isRunning() and not is_answering)
        self.stop_button.setEnabled(is_answering)

    def _status(self, text: str) -> None:
        self.speed.setText(text)


def _row(*widgets: QWidget) -> QHBoxLayout:
    layout = QHBoxLayout()
    for widget in widgets:
        layout.addWidget(widget, isinstance(widget, QLabel))
    return layout


def _column(*parts: QWidget | QHBoxLayout) -> QWidget:
    widget = QWidget()
    layout = QVBoxLayout(widget)
    for part in parts:
        if isinstance(part, QWidget):
            layout.addWidget(part)
        else:
            layout.addLayout(part)
    return widget
