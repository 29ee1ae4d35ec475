"""Parts of the window: the text of a conversation, the box for questions, the settings."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QColor, QKeyEvent, QTextBlockFormat, QTextCharFormat, QTextCursor, QTextDocument
from PySide6.QtWidgets import (
    QCheckBox,
    QComboBox,
    QDialog,
    QDialogButtonBox,
    QDoubleSpinBox,
    QFormLayout,
    QPlainTextEdit,
    QSpinBox,
    QTextBrowser,
    QWidget,
)

from store import Settings

TINT = QColor("#0a8f8f")
ERROR = QColor("#b3261e")
PAPER = QColor(128, 128, 128, 40)


class Transcript(QTextBrowser):
    """Questions and answers; the last answer may still grow."""

    def __init__(self) -> None:
        super().__init__()
        self.setOpenLinks(False)
        self._answer_at = 0

    def loadResource(self, kind: int, name: object) -> None:
        """Nothing: a model's text must not open files or pages."""

    def show_messages(self, messages: list[dict[str, str]]) -> None:
        self.clear()
        for message in messages:
            if message["role"] == "user":
                self.add_question(message["content"])
            else:
                self.begin_answer()
                self._end().insertMarkdown(message["content"], QTextDocument.MarkdownFeature.MarkdownNoHTML)

    def add_question(self, text: str) -> None:
        block = QTextBlockFormat()
        block.setBackground(PAPER)
        block.setTopMargin(10)
        block.setBottomMargin(6)
        self._new_block(block).insertText(text, QTextCharFormat())

    def begin_answer(self) -> None:
        self._answer_at = self._new_block(QTextBlockFormat()).position()

    def add_piece(self, text: str, is_tinted: bool) -> None:
        """Text of the answer as it comes. The view follows unless the user has scrolled back."""
        bar = self.verticalScrollBar()
        is_at_end = bar.value() >= bar.maximum() - 4
        style = QTextCharFormat()
        if is_tinted:
            style.setForeground(TINT)
        self._end().insertText(text, style)
        if is_at_end:
            bar.setValue(bar.maximum())

    def end_answer(self, text: str) -> None:
        """Show the whole answer with its Markdown."""
        cursor = self._end()
        cursor.setPosition(self._answer_at, QTextCursor.MoveMode.KeepAnchor)
        cursor.removeSelectedText()
        cursor.insertMarkdown(text, QTextDocument.MarkdownFeature.MarkdownNoHTML)
        self.verticalScrollBar().setValue(self.verticalScrollBar().maximum())

    def add_error(self, text: str) -> None:
        style = QTextCharFormat()
        style.setForeground(ERROR)
        self._new_block(QTextBlockFormat()).insertText(text, style)

    def _end(self) -> QTextCursor:
        cursor = QTextCursor(self.document())
        cursor.movePosition(QTextCursor.MoveOperation.End)
        return cursor

    def _new_block(self, block: QTextBlockFormat) -> QTextCursor:
        cursor = self._end()
        if self.document().isEmpty():
            cursor.setBlockFormat(block)
        else:
            cursor.insertBlock(block, QTextCharFormat())
        return cursor


class QuestionBox(QPlainTextEdit):
    """Enter sends what is written, Shift-Enter begins a new line."""

    entered = Signal()

    def __init__(self) -> None:
        super().__init__()
        self.setPlaceholderText("Ask something. Shift-Enter begins a new line.")
        self.setFixedHeight(72)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        is_enter = event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter)
        if is_enter and not event.modifiers() & Qt.KeyboardModifier.ShiftModifier:
            self.entered.emit()
        else:
            super().keyPressEvent(event)


class SettingsDialog(QDialog):
    """Changes a copy of the settings: `settings()` after `exec()` was accepted."""

    def __init__(self, settings: Settings, drafters: list[str], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle("Settings")
        self.system = QPlainTextEdit(settings.system)
        self.temperature = QDoubleSpinBox(minimum=0, maximum=2, singleStep=0.1, value=settings.temperature)
        self.max_new_tokens = QSpinBox(minimum=1, maximum=1 << 20, value=settings.max_new_tokens)
        self.drafter = QComboBox()
        self.drafter.addItems(drafters)
        self.drafter.setCurrentText(settings.drafter)
        self.show_drafts = QCheckBox("text whose tokens were drafted and accepted", checked=settings.show_drafts)
        buttons = QDialogButtonBox.StandardButton
        box = QDialogButtonBox(buttons.Ok | buttons.Cancel, accepted=self.accept, rejected=self.reject)
        form = QFormLayout(self)
        form.addRow("System prompt of new conversations", self.system)
        form.addRow("Temperature (0 is greedy)", self.temperature)
        form.addRow("Longest answer, in tokens", self.max_new_tokens)
        form.addRow("Drafter", self.drafter)
        form.addRow("Tint", self.show_drafts)
        form.addRow(box)

    def settings(self) -> Settings:
        return Settings(
            system=self.system.toPlainText().strip(),
            temperature=self.temperature.value(),
            max_new_tokens=self.max_new_tokens.value(),
            drafter=self.drafter.currentText(),
            show_drafts=self.show_drafts.isChecked(),
        )
