"""Manners under stress: cancelled at any moment, used from everywhere, torn down in mid-answer, for a long time."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import edgespec
from edgespec import BusyError, ConfigError, Engine, RequestParams, RuntimeParams, SamplingParams, SpecParams

REPOSITORY = Path(__file__).parent.parent
HELLO = [{"role": "user", "content": "Hello!"}]
LONG = SamplingParams(max_new_tokens=60, ignore_eos=True)
# One text per seed, however much was drafted.
COUPLED = SpecParams(verifier="coupled")
PROC = Path("/proc/self")


@pytest.fixture
def engine(tiny_pair: Path) -> Iterator[Engine]:
    with edgespec.load(tiny_pair, runtime=RuntimeParams(prefill_chunk=4)) as engine:
        yield engine


def script(code: str, bundle: Path, **more: object) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that knows `bundle` and some names."""
    head = (
        "import sys, os, threading, time, json, edgespec\n"
        "from edgespec import RequestParams, SamplingParams, EdgespecError\n"
        "bundle = sys.argv[1]\n"
        "LONG = SamplingParams(max_new_tokens=400, ignore_eos=True)\n"
        "HELLO = [{'role': 'user', 'content': 'Hello!'}]\n"
    )
    command = [sys.executable, "-W", "error", "-c", head + code, str(bundle)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= more.pop("env", {})  # type: ignore[arg-type]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, **more)


def test_threads_that_iterate_one_stream_share_it(engine: Engine) -> None:
    """As a queue: no piece is lost or given twice, each thread gets its own in order, the whole is in the stream."""
    expected = [piece.text for piece in engine.fork(COUPLED).chat(HELLO, LONG).pieces()]
    stream = engine.fork(COUPLED).chat(HELLO, LONG)
    taken: list[list[str]] = [[], [], []]
    threads = [threading.Thread(target=lambda mine: mine.extend(stream), args=(mine,)) for mine in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stream.text_so_far == "".join(expected)
    assert sorted("".join(map("".join, taken))) == sorted(stream.text_so_far)
    for mine in taken:
        rest = iter(stream.text_so_far)
        assert all(letter in rest for letter in "".join(mine))  # a subsequence


def test_two_hundred_answers_cancelled_at_random_moments(engine: Engine, tiny_pair: Path) -> None:
    """By every way there is, while reading and while writing; afterwards texts are those of a fresh engine."""
    engine = engine.fork(COUPLED)
    rng = random.Random(0)
    reasons = set()
    for i in range(200):
        prompt = [rng.randrange(3, 250) for _ in range(rng.choice([3, 120, 400]))]
        stream = engine.generate(prompt, LONG)
        way = rng.choice(["cancel", "close", "engine", "leave", "drop", "wait"])
        if way == "wait":
            stream.text()
        elif way in ("leave", "drop"):
            for _ in zip(range(rng.randrange(8)), stream, strict=False):
                pass
            if way == "leave":
                stream.close()
        else:
            end = {"cancel": stream.cancel, "close": stream.close, "engine": engine.cancel}[way]
            timer = threading.Timer(rng.random() * 0.02, end)
            timer.start()
            stream.text()
            timer.join()
        reasons.add(stream.finish_reason)
        del stream
        if i % 20 == 0:
            with edgespec.load(tiny_pair, spec=COUPLED) as fresh:
                params = SamplingParams(max_new_tokens=30, temperature=20, seed=i, ignore_eos=True)
                assert engine.generate(prompt, params).text() == fresh.generate(prompt, params).text()
                assert engine.chat(HELLO, LONG).text() == fresh.chat(HELLO, LONG).text()
    assert reasons >= {"cancelled", "length"}


def test_eight_threads_on_one_engine(engine: Engine) -> None:
    """They wait, are refused, cancel each other and fork; every answer that is whole is right."""
    expected = engine.chat(HELLO, LONG).text()
    outcomes: list[str] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(12):
            request = RequestParams(busy=rng.choice(["wait", "raise"]), timeout=rng.choice([None, 0.01]))
            stream = engine.chat(HELLO, LONG, request)
            try:
                text = stream.text()
            except BusyError:
                outcomes.append("busy")
                continue
            whole = stream.finish_reason == "length"
            outcomes.append("whole" if whole and text == expected else "wrong" if whole else "cancelled")
            if not whole and not expected.startswith(text.rstrip("\ufffd")):
                outcomes.append("wrong")
            if rng.random() < 0.2:
                engine.cancel()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 96
    assert "wrong" not in outcomes
    assert outcomes.count("whole") > 10
    assert engine.chat(HELLO, LONG).text() == expected


def test_exceptions_in_the_consumer_s_loop(engine: Engine) -> None:
    """Wherever the consumer fails, with the stream in `with` or not, the engine is free as soon as it is dropped."""
    expected = engine.chat(HELLO, LONG).text()

    def fail(after: int, managed: bool) -> None:
        stream = engine.chat(HELLO, LONG)
        if managed:
            stream.__enter__()
        try:
            for i, _ in enumerate(stream):
                if i == after:
                    raise ZeroDivisionError
        finally:
            if managed:
                stream.__exit__(*sys.exc_info())

    for after in range(10):
        for managed in (True, False):
            with pytest.raises(ZeroDivisionError) as caught:
                fail(after, managed)
            del caught  # its traceback holds the frame, which holds the stream
            assert engine.chat(HELLO, LONG).text() == expected


ENDINGS = {
    "daemon thread in mid-answer": (
        "engine = edgespec.load(bundle)\n"
        "def work():\n"
        "    try:\n"
        "        while True:\n"
        "            for piece in engine.chat(HELLO, LONG): began.set()\n"
        "    except EdgespecError as error: pass\n"
        "began = threading.Event()\n"
        "threading.Thread(target=work, daemon=True).start()\n"
        "began.wait(); time.sleep(0.05)\n"
    ),
    "half-read stream": "engine = edgespec.load(bundle)\nstream = engine.chat(HELLO, LONG)\nnext(stream)\n",
    "exit inside the loop": "for piece in edgespec.load(bundle).chat(HELLO, LONG): sys.exit(0)\n",
    "thread that is waited for": (
        "engine = edgespec.load(bundle)\n"
        "threading.Thread(target=lambda: engine.chat(HELLO, SamplingParams(max_new_tokens=50)).text()).start()\n"
    ),
    "event loop gone": (
        "import asyncio\n"
        "engine = edgespec.load(bundle)\n"
        "def pause(context, row):\n"
        "    time.sleep(0.01); return row\n"
        "stream = engine.achat(HELLO, SamplingParams(max_new_tokens=400, ignore_eos=True, logits_processor=pause))\n"
        "async def main(): await anext(stream)\n"
        "asyncio.run(main())\n"
    ),
    "waiting in line": (
        "engine = edgespec.load(bundle)\n"
        "stream = engine.chat(HELLO, LONG); next(stream)\n"
        "def work():\n"
        "    try: engine.chat(HELLO, LONG, RequestParams(busy='wait')).text()\n"
        "    except EdgespecError: pass\n"
        "threading.Thread(target=work, daemon=True).start(); time.sleep(0.1)\n"
    ),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_interpreter_ends_in_mid_answer(tiny_pair: Path, ending: str) -> None:
    """Exit code 0 and not a word, whatever was under way."""
    done = script(ENDINGS[ending], tiny_pair)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_a_forked_process_is_told(tiny_pair: Path) -> None:
    """In the child every use is one clear error, never a hang, and both processes end well."""
    code = (
        "import warnings; warnings.simplefilter('ignore', DeprecationWarning)\n"
        "engine = edgespec.load(bundle)\n"
        "expected = engine.chat(HELLO, LONG).text()\n"
        "half = engine.chat(HELLO, LONG); next(half)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    for use in (lambda: engine.chat(HELLO), lambda: engine.achat(HELLO)._stream.text(), engine.close,\n"
        "                engine.cancel, engine.fork, lambda: engine.save_caches('x')):\n"
        "        try: use()\n"
        "        except EdgespecError as error: print(type(error).__name__, 'spawn' in str(error))\n"
        "    sys.exit(7)\n"
        "status = os.waitpid(pid, 0)[1]\n"
        "half.close()\n"
        "assert engine.chat(HELLO, LONG).text() == expected\n"
        "print(os.waitstatus_to_exitcode(status))\n"
    )
    done = script(code, tiny_pair)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["SessionError True"] * 6 + ["7"]
    assert done.returncode == 0


MEMORY = """
import gc
def resident():
    gc.collect()
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm") as stream: return int(stream.read().split()[1])
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
engine = edgespec.load(bundle)
def work(count):
    for i in range(count):
        params = SamplingParams(max_new_tokens=30, temperature=(i % 3) * 20.0, seed=i, logprobs=2, stop=["zz"])
        request = RequestParams(overflow="drop_oldest")
        messages = [{"role": "user", "content": f"question {i % 50} " * (i % 20 + 1)}]
        with engine.chat(messages, params, request) as stream:
            for n, piece in enumerate(stream):
                if i % 5 == 0 and n == 4: break
    return resident()
before, after = work(150), work(500)
print(before, after, flush=True)
assert after <= 1.02 * before, (before, after)
"""


def test_memory_is_flat(tiny_pair: Path) -> None:
    """After a warm-up, 500 more requests of all kinds keep the resident memory within 2 %."""
    pytest.importorskip("resource", reason="no measure of resident memory in this platform's standard library")
    done = script(MEMORY, tiny_pair)
    assert (done.returncode, done.stderr) == (0, ""), (done.stdout, done.stderr)


def test_nothing_is_left_behind(tiny_pair: Path) -> None:
    """Neither file handles nor threads, of Python's or of ONNX Runtime's, after engines of all kinds are closed."""

    def use() -> None:
        with edgespec.load(tiny_pair) as engine, engine.fork() as fork:
            engine.chat(HELLO, LONG).text()
            next(fork.chat(HELLO, LONG))
            asyncio.run(engine.achat(HELLO, LONG).text())  # type: ignore[arg-type]

    def count() -> tuple[int, int, int]:
        gc.collect()
        found = [len(list((PROC / name).iterdir())) if PROC.exists() else 0 for name in ("fd", "task")]
        return (threading.active_count(), *found)  # type: ignore[return-value]

    use()
    before = count()
    for _ in range(5):
        use()
    assert count() == before


AUDIT = """
writes, network = [], []
def note(path):
    path = os.path.abspath(os.fsdecode(path))
    if path != os.path.abspath(os.devnull) and not path.startswith(os.environ["EDGESPEC_CACHE"]): writes.append(path)
def hook(event, arguments):
    if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wxa+"): note(arguments[0])
    if event == "open" and not isinstance(arguments[1], str) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        note(arguments[0])
    if event in ("os.mkdir", "os.rename", "os.remove", "os.link", "os.symlink", "os.truncate"):
        note(arguments[0])
    if event.startswith(("socket.", "urllib.", "http.")): network.append((event, str(arguments)))
sys.addaudithook(hook)
with edgespec.load(bundle) as engine:
    chat = edgespec.Conversation(engine)
    for _ in range(3): chat.ask("Hello!", SamplingParams(max_new_tokens=40, ignore_eos=True)).text()
    sockets = []
    if os.path.exists("/proc/self/fd"):
        for name in os.listdir("/proc/self/fd"):
            try: sockets.append(os.readlink(f"/proc/self/fd/{name}"))
            except OSError: pass
print(json.dumps([writes, network, [s for s in sockets if s.startswith("socket:")]]))
"""


def test_no_writes_and_no_network(tiny_pair: Path, tmp_path: Path) -> None:
    """Loading and chatting opens no socket and writes nowhere but into the cache folder."""
    home = {name: str(tmp_path) for name in ("HOME", "USERPROFILE", "TMPDIR", "TEMP", "TMP", "XDG_CACHE_HOME")}
    before = {p: p.stat().st_mtime_ns for p in tiny_pair.rglob("*")}
    done = script(AUDIT, tiny_pair, cwd=tmp_path, env=home | {"EDGESPEC_CACHE": str(tmp_path / "cache")})
    assert done.stderr == ""
    assert json.loads(done.stdout) == [[], [], []]
    assert {path.name for path in tmp_path.iterdir()} <= {"cache"}
    assert {p: p.stat().st_mtime_ns for p in tiny_pair.rglob("*")} == before


def test_every_use_after_close_is_one_clear_line(tiny_pair: Path) -> None:
    """Closed twice is closed; whatever comes then says what to do."""
    engine = edgespec.load(tiny_pair)
    chat = edgespec.Conversation(engine)
    waiting = engine.chat(HELLO, LONG)
    engine.close()
    engine.close()
    engine.close(cancel=True)
    engine.cancel()
    uses = [
        lambda: engine.chat(HELLO),
        lambda: engine.generate("x"),
        waiting.text,
        lambda: asyncio.run(engine.achat(HELLO).text()),  # type: ignore[arg-type]
        lambda: chat.ask("x"),
        lambda: engine.save_caches(tiny_pair / "never"),
        lambda: engine.load_caches(tiny_pair / "never"),
        engine.fork,
    ]
    for use in uses:
        with pytest.raises(ConfigError, match="the engine is closed: load the bundle again"):
            use()
    assert chat.messages == []
