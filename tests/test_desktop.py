"""The desktop example, without a screen: streaming, stopping, closing in the middle, and what is kept on disk."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import edgespec
from tests.tiny import make_tiny_bundle

pytest.importorskip("pytestqt", reason="needs PySide6-Essentials and pytest-qt")
QtCore = pytest.importorskip("PySide6.QtCore", reason="needs Qt's system libraries", exc_type=ImportError)
QtTest = pytest.importorskip("PySide6.QtTest", reason="needs Qt's system libraries", exc_type=ImportError)

FOLDER = Path(__file__).parent.parent / "examples" / "desktop"
NAMES = ("main", "store", "threads", "widgets", "window")


@pytest.fixture(scope="module")
def app() -> Iterator[Any]:
    """The modules of the example, which are no package, by their names."""
    sys.path.insert(0, str(FOLDER))
    try:
        import main
        import store
        import threads
        import widgets
        import window

        yield type("App", (), {m.__name__: m for m in (main, store, threads, widgets, window)})
    finally:
        sys.path.remove(str(FOLDER))
        for name in NAMES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with a draft, whose answers go on until they are cut."""
    folder = tmp_path_factory.mktemp("pair")
    return make_tiny_bundle(folder, draft=True, context_length=30000, eos_bonus=-1000)


Open = Callable[..., Any]


@pytest.fixture
def open_window(app: Any, pair: Path, tmp_path: Path, qtbot: Any) -> Iterator[Open]:
    """Opens a window and waits until its model is loaded."""
    windows = []

    def open_window(data: Path = tmp_path / "data", bundle: Path = pair, **settings: Any) -> Any:
        store = app.store.Store(data)
        store.write_settings(app.store.Settings(**{"max_new_tokens": 40, **settings}))
        window = app.window.Window(data, bundle)
        windows.append(window)
        qtbot.addWidget(window)
        with qtbot.waitSignal(window.ready, timeout=20_000):
            window.show()
        assert window.send_button.isEnabled()
        return window

    yield open_window
    for window in windows:
        window.close()


def ask(qtbot: Any, window: Any, question: str) -> str:
    """Type a question and Enter; the answer."""
    with qtbot.waitSignal(window.answered, timeout=20_000) as signal:
        qtbot.keyClicks(window.question, question)
        qtbot.keyClick(window.question, QtCore.Qt.Key.Key_Return)
    return str(signal.args[0])


def test_an_answer_streams_and_is_kept(open_window: Open, qtbot: Any, pair: Path, tmp_path: Path) -> None:
    """The answer is the library's, is shown, is measured, and is in the list and the file afterwards."""
    window = open_window()
    pieces: list[str] = []
    window.transcript.add_piece = lambda text, tinted: pieces.append(text + "tinted" * tinted)
    answer = ask(qtbot, window, "hello")
    with edgespec.load(pair) as engine:
        params = edgespec.SamplingParams(max_new_tokens=40)
        assert answer == engine.chat([{"role": "user", "content": "hello"}], params).text()
    assert "".join(pieces) == answer
    assert len(pieces) > 5
    assert "40 tokens, " in window.speed.text()
    assert "tokens/s" in window.speed.text()
    assert [window.list.item(i).text() for i in range(window.list.count())] == ["hello"]
    (path,) = (tmp_path / "data" / "conversations").glob("*.json")
    assert json.loads(path.read_text(encoding="utf-8"))["messages"][1]["content"] == answer
    assert window.question.toPlainText() == ""


def test_the_window_is_alive_while_an_answer_comes(open_window: Open, qtbot: Any) -> None:
    """Timers of the window's thread go on firing on time; questions wait their turn."""
    window = open_window(max_new_tokens=4000)
    ticks: list[int] = []
    clock = QtCore.QElapsedTimer()
    timer = QtCore.QTimer(interval=10)
    timer.timeout.connect(lambda: ticks.append(clock.restart()))
    window.ask("hello")
    assert window.stop_button.isEnabled()
    assert not window.send_button.isEnabled()
    window.ask("ignored")
    clock.start()
    timer.start()
    with qtbot.waitSignal(window.answered, timeout=60_000):
        QtCore.QTimer.singleShot(1000, window.stop)
    timer.stop()
    assert len(ticks) > 20
    assert max(ticks) < 400
    assert [m["content"] for m in window.conversation.messages[::2]] == ["hello"]


def test_stop_keeps_what_is_there(open_window: Open, qtbot: Any) -> None:
    """The button ends the answer soon; what was said is in the history, and the next question is answered."""
    window = open_window(max_new_tokens=20_000)
    with qtbot.waitSignal(window.answered, timeout=20_000) as signal:
        window.ask("hello")
        qtbot.waitUntil(lambda: len(window.transcript.toPlainText()) > 30)
        qtbot.mouseClick(window.stop_button, QtCore.Qt.MouseButton.LeftButton)
    text = signal.args[0]
    assert 10 < len(text) < 19_000
    assert window.conversation.messages[1]["content"] == text
    assert not window.stop_button.isEnabled()
    window.apply(type(window.settings)(max_new_tokens=5))
    assert 0 < len(ask(qtbot, window, "again")) <= 5
    assert len(window.conversation.messages) == 4


def test_stop_before_the_first_word(open_window: Open, qtbot: Any) -> None:
    """Stopped at once, the question is taken back and nothing of it stays."""
    window = open_window()
    for _ in range(10):
        with qtbot.waitSignal(window.answered, timeout=20_000) as signal:
            window.ask("hello")
            window.stop()
        if signal.args[0] == "":
            assert window.conversation.messages == []
            assert window.transcript.toPlainText() == ""
        else:
            window.new_button.click()


def test_stop_before_there_is_a_stream(open_window: Open, qtbot: Any, app: Any) -> None:
    """A stop that comes before the thread has asked for its answer is not lost."""
    window = open_window()
    thread = app.threads.AnswerThread(window.conversation, "hello", window.settings.params())
    thread.stop()
    with qtbot.waitSignal(thread.ended, timeout=20_000) as signal:
        thread.start()
    assert thread.wait(5000)
    assert signal.args == [""]
    assert thread.stream.finish_reason == "cancelled"
    assert window.conversation.messages == []


def test_closing_while_an_answer_comes(open_window: Open, qtbot: Any, tmp_path: Path) -> None:
    """The window closes soon, no thread is left, the engine is released, and what was said is on disk."""
    before = threading.active_count()
    window = open_window(max_new_tokens=20_000)
    window.ask("hello")
    qtbot.waitUntil(lambda: len(window.transcript.toPlainText()) > 30)
    clock = QtCore.QElapsedTimer()
    clock.start()
    thread = window._answer
    window.close()
    assert clock.elapsed() < 1000
    assert not thread.isRunning()
    assert threading.active_count() == before
    with pytest.raises(edgespec.ConfigError, match="the engine is closed"):
        window.engine.generate("x")
    with qtbot.assertNotEmitted(window.answered, wait=50):
        pass  # what was under way when it closed comes to nothing
    (path,) = (tmp_path / "data" / "conversations").glob("*.json")
    assert len(json.loads(path.read_text(encoding="utf-8"))["messages"][1]["content"]) > 10


def test_closing_while_the_model_loads(app: Any, pair: Path, tmp_path: Path, qtbot: Any) -> None:
    """A window that is closed at once leaves neither a thread nor an engine."""
    window = app.window.Window(tmp_path, pair)
    qtbot.addWidget(window)
    window.close()
    assert window._loader.isFinished()
    qtbot.wait(50)
    with pytest.raises(edgespec.ConfigError, match="closed"):
        window._loader.engine.generate("x")


def test_drafts_are_tinted_as_they_come(open_window: Open, qtbot: Any, app: Any) -> None:
    """With the setting on, as many characters have the tint as tokens were accepted; without it none."""
    window = open_window(show_drafts=True)
    with qtbot.waitSignal(window.answered, timeout=20_000):
        window.ask("hello")
        thread = window._answer
    assert num_tinted(app, window) == thread.stream.stats.accepted > 0
    window.apply(type(window.settings)(max_new_tokens=40))
    window.new_button.click()
    ask(qtbot, window, "hello")
    assert num_tinted(app, window) == 0


def num_tinted(app: Any, window: Any) -> int:
    total, block = 0, window.transcript.document().begin()
    while block.isValid():
        fragments = iter(block)
        for fragment in fragments:
            text = fragment.fragment()
            if text.charFormat().foreground().color() == app.widgets.TINT:
                total += text.length()
        block = block.next()
    return total


def test_conversations_are_listed_opened_and_deleted(open_window: Open, qtbot: Any, tmp_path: Path) -> None:
    """A second window finds the conversations of the first, goes on with one, and deletes one."""
    first = open_window()
    one = ask(qtbot, first, "one")
    first.new_button.click()
    ask(qtbot, first, "two")
    first.close()
    second = open_window()
    assert [second.list.item(i).text() for i in range(2)] == ["two", "one"]
    second.list.itemClicked.emit(second.list.item(1))
    assert [m["content"] for m in second.conversation.messages] == ["one", one]
    assert "one" in second.transcript.toPlainText()
    ask(qtbot, second, "three")
    assert len(second.conversation.messages) == 4
    assert second.list.currentItem().text() == "one"
    second.delete_button.click()
    assert [second.list.item(i).text() for i in range(second.list.count())] == ["two"]
    assert second.conversation.messages == []


def test_settings_are_used_and_kept(app: Any, open_window: Open, qtbot: Any, tmp_path: Path) -> None:
    """What the dialog says reaches the engine and the disk; another drafter works on the same weights."""
    window = open_window()
    dialog = app.widgets.SettingsDialog(window.settings, ["auto", "model", "ngram", "none"], window)
    dialog.system.setPlainText(" Be brief. ")
    dialog.temperature.setValue(0.5)
    dialog.max_new_tokens.setValue(7)
    dialog.drafter.setCurrentText("none")
    with qtbot.waitSignal(window.ready, timeout=20_000):
        window.apply(dialog.settings())
    assert window.engine.drafter == "none"
    window.new_button.click()
    assert len(ask(qtbot, window, "hello")) <= 7
    assert window.conversation.system == "Be brief."
    settings = app.store.Store(tmp_path / "data").read_settings()
    assert settings == app.store.Settings("Be brief.", 0.5, 7, "none", False)
    (tmp_path / "data" / "settings.json").write_text('{"temperature": "hot", "drafter": "ngram"}', encoding="utf-8")
    assert app.store.Store(tmp_path / "data").read_settings() == app.store.Settings(drafter="ngram")


def test_a_bundle_that_is_not_there(app: Any, tmp_path: Path, qtbot: Any) -> None:
    """The reason is in the window, and the window can be closed."""
    window = app.window.Window(tmp_path / "data", tmp_path / "absent")
    qtbot.addWidget(window)
    with qtbot.waitSignal(window.failed, timeout=20_000):
        window.show()
    assert "is not a folder" in window.transcript.toPlainText()
    assert not window.send_button.isEnabled()
    window.close()


def test_an_answer_is_rendered_at_the_end(open_window: Open, qtbot: Any) -> None:
    """Markdown of an answer is shown as such when the answer is complete; its HTML stays text, its links unopened."""
    window = open_window()
    window.transcript.add_question("q")
    window.transcript.begin_answer()
    window.transcript.add_piece("**bold** <b>", False)
    window.transcript.end_answer("**bold** <b>tag</b>")
    assert window.transcript.toPlainText().split("\n") == ["q", "bold <b>tag</b>"]
    assert window.transcript.loadResource(2, QtCore.QUrl("file:///etc/hosts")) is None


def test_settings_that_stop_the_model_from_loading_can_be_changed(
    app: Any, qtbot: Any, tiny_bundle: Path, tmp_path: Path
) -> None:
    """A stored drafter that the bundle does not have: the window says so, and lets it be changed."""
    app.store.Store(tmp_path).write_settings(app.store.Settings(drafter="model"))
    window = app.window.Window(tmp_path, tiny_bundle)
    qtbot.addWidget(window)
    qtbot.waitSignal(window.failed, timeout=10_000).wait()
    assert window.settings_button.isEnabled()
    with qtbot.waitSignal(window.ready, timeout=10_000):
        window.apply(app.store.Settings(drafter="ngram"))
    window.close()
