"""Conversations: what is read again and what is not, editing, branching, saving, and files that are not sound."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import edgespec
from edgespec import BusyError, ConfigError, Conversation, Engine, RequestParams, RuntimeParams, SamplingParams
from tests.tiny import make_tiny_bundle

SHORT = SamplingParams(max_new_tokens=30)
# Sampled text is mostly not what the tokenizer would choose for it.
WILD = SamplingParams(max_new_tokens=20, temperature=60, seed=7, ignore_eos=True)


@pytest.fixture(params=["pair", "growing"])
def bundle(request: pytest.FixtureRequest, tiny_pair: Path, tmp_path: Path) -> Path:
    if request.param == "pair":
        return tiny_pair
    return make_tiny_bundle(tmp_path / "growing", draft=True, shared=False)


@pytest.fixture
def engine(bundle: Path) -> Iterator[Engine]:
    with edgespec.load(bundle) as engine:
        yield engine


def num_read(stream: edgespec.TextStream) -> int:
    return stream.stats.prompt_tokens - stream.stats.cached_tokens


def talk(engine: Engine, *questions: str) -> Conversation:
    chat = Conversation(engine, "Be brief.")
    for question in questions:
        chat.ask(question, SHORT).text()
    return chat


def test_a_turn_is_what_engine_chat_says(engine: Engine) -> None:
    """The history is kept and sent whole; the answers are those of the stateless call."""
    chat = talk(engine, "one", "two", "three")
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 3
    messages = [{"role": "system", "content": "Be brief."}]
    with engine.fork() as fresh:
        for question, answer in zip(chat.messages[::2], chat.messages[1::2], strict=True):
            messages.append(question)
            assert fresh.chat(messages, SHORT).text() == answer["content"]
            messages.append(answer)
    assert chat.count_tokens() == engine.count_tokens(messages)


def test_a_turn_reads_only_what_is_new(engine: Engine) -> None:
    """To the token: the end of the last answer, the question and the headers, and no token of what was there."""
    chat = talk(engine, "one")
    first = chat.ask("two", SHORT)
    first.text()
    before = first.stats.prompt_tokens + first.stats.new_tokens
    second = chat.ask("three", SHORT)
    second.text()
    # What was emitted last was mostly never fed: then it is read with the question.
    assert second.stats.cached_tokens in (before - 1, before)
    assert num_read(second) < 40


def test_answers_keep_the_tokens_they_were_written_in(tmp_path: Path) -> None:
    """Where the tokenizer would encode an answer otherwise, the next turn still finds all of it cached."""
    make_tiny_bundle(tmp_path)
    merge_tokens(tmp_path)
    with edgespec.load(tmp_path) as engine:
        chat = Conversation(engine)
        first = chat.ask("one", WILD)
        answer = first.text()
        assert engine.tokenizer.encode(answer, add_special_tokens=False).tolist() != first.token_ids
        second = chat.ask("two", SHORT)
        second.text()
        assert second.stats.cached_tokens == first.stats.prompt_tokens + len(first.token_ids) - 1
        stateless = engine.fork().chat([*chat.messages[:2], {"role": "user", "content": "two"}], SHORT)
        stateless.text()
        assert stateless.stats.prompt_tokens != second.stats.prompt_tokens


def merge_tokens(folder: Path) -> None:
    """Give the byte tokenizer merges, so that single bytes are not what it would choose."""
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    vocab = data["model"]["vocab"]
    letters = [c for c in vocab if len(c) == 1 and 33 <= ord(c) < 127]
    rare = [c for c in vocab if len(c) == 1 and ord(c) > 200][:100]
    pairs = [(a, b) for a in letters for b in letters][:: len(letters) ** 2 // 90][:90]
    for i, c in enumerate(rare[: len(pairs)]):
        vocab["".join(pairs[i])] = vocab.pop(c)
    data["model"]["merges"] = [list(p) for p in pairs[: len(rare)]]
    path.write_text(json.dumps(data), encoding="utf-8")
    manifest = json.loads((folder / "edgespec.json").read_text(encoding="utf-8"))
    from edgespec.bundle import list_files

    files = {n: {"size": i.size, "sha256": i.sha256} for n, i in list_files(folder).items() if n != "edgespec.json"}
    (folder / "edgespec.json").write_text(json.dumps(manifest | {"files": files}), encoding="utf-8")


def test_editing_reads_from_the_change_on(engine: Engine) -> None:
    """An earlier question changed: what stands before it stays cached, and the answer is that of a fresh engine."""
    chat = talk(engine, "one", "two", "three")
    before = engine.count_tokens([{"role": "system", "content": "Be brief."}, *chat.messages[:2]])
    chat.edit(2, "two two")
    assert len(chat.messages) == 3
    stream = chat.reply(SHORT)
    answer = stream.text()
    header = len("<|im_start|>assistant\n") - len("<|im_start|>") + 1
    assert before - header <= stream.stats.cached_tokens < before + len("user\ntwo")
    assert chat.messages[3] == {"role": "assistant", "content": answer}
    with engine.fork() as fresh:
        assert talk(fresh, "one", "two two").messages == chat.messages
    for index, message in ((9, "no message 9"), (-1, "no message -1")):
        with pytest.raises(ConfigError, match=message):
            chat.edit(index, "x")
    with pytest.raises(ConfigError, match="no question"):
        chat.reply()


def test_branches_go_their_own_ways(engine: Engine) -> None:
    """A branch shares the beginning, not what comes after; on a fork both keep their caches."""
    chat = talk(engine, "one", "two")
    with engine.fork() as other:
        branch = chat.branch(2, engine=other)
        assert branch.messages == chat.messages[:2]
        branch.ask("other", SHORT).text()
        assert len(chat.messages) == 4
        for one in (chat, branch):
            stream = one.ask("more", SHORT)
            stream.text()
            assert num_read(stream) < 40
    here = chat.branch(4)
    assert here.engine is engine
    stream = here.ask("another way", SHORT)
    stream.text()
    assert num_read(stream) < 60


def test_undo_and_reset(engine: Engine) -> None:
    """The last question comes back with its answer gone; a reset keeps the system prompt."""
    chat = talk(engine, "one", "two")
    assert chat.undo() == "two"
    assert len(chat.messages) == 2
    assert (chat.undo(), chat.undo(), chat.messages) == ("one", None, [])
    chat.ask("three", SHORT).text()
    chat.reset()
    assert (chat.messages, chat.system) == ([], "Be brief.")


def test_a_stopped_answer_is_kept_and_an_empty_one_is_not(engine: Engine) -> None:
    """Half an answer stays, a question without any is taken back, and so is one whose stream is never read."""
    chat = talk(engine, "one")
    with chat.ask("two", SHORT) as stream:
        piece = next(stream)
        with pytest.raises(BusyError, match="not finished"):
            chat.ask("three")
    assert chat.messages[-1]["content"].startswith(piece)
    cancelled = chat.ask("three", SHORT)
    cancelled.cancel()
    assert cancelled.text() == ""
    assert len(chat.messages) == 4
    chat.ask("four", SHORT)  # dropped unread
    assert chat.undo() == "two"
    with pytest.raises(edgespec.ContextOverflowError):
        chat.ask("x" * 900)
    assert len(chat.messages) == 2


def test_a_long_conversation_drops_its_oldest_turns(engine: Engine) -> None:
    """The history stays whole; the stream says what the model did not see."""
    chat = Conversation(engine, "Be brief.")
    request = RequestParams(overflow="drop_oldest")
    for i in range(14):
        stream = chat.ask(f"{'word ' * 6}{i}", SamplingParams(max_new_tokens=12, ignore_eos=True), request)
        stream.text()
    assert stream.dropped
    assert stream.dropped[0] == chat.messages[0]
    assert len(chat.messages) == 28


@pytest.mark.parametrize("exact", [False, True])
def test_a_saved_conversation_resumes_at_once(bundle: Path, tmp_path: Path, exact: bool) -> None:
    """With caches, only the new question is read, and the answer is the one that was due."""
    file, runtime = tmp_path / "chat.json", RuntimeParams(exact=exact)
    with edgespec.load(bundle, runtime=runtime) as engine:
        chat = talk(engine, "one", "été 😀")
        chat.save(file, caches=True)
        due = chat.ask("three", SHORT)
        expected = due.text()
    with edgespec.load(bundle, runtime=runtime) as engine:
        again = Conversation.load(file, engine)
        assert again.cache_note is None
        assert (again.messages, again.system) == (chat.messages[:4], "Be brief.")
        stream = again.ask("three", SHORT)
        assert stream.text() == expected
        assert num_read(stream) == num_read(due)
    with edgespec.load(bundle, runtime=runtime) as engine:
        text_only = Conversation.load(file, engine, caches=False)
        stream = text_only.ask("three", SHORT)
        assert (stream.text(), stream.stats.cached_tokens) == (expected, 0)
    assert sorted(p.name for p in tmp_path.glob("chat*")) == ["chat.json", "chat.json.npz"]


def test_text_alone_is_saved_without_caches(engine: Engine, tmp_path: Path) -> None:
    """One readable file of UTF-8."""
    talk(engine, "été").save(tmp_path / "chat.json")
    data = json.loads((tmp_path / "chat.json").read_text(encoding="utf-8"))
    assert data["messages"][0] == {"role": "user", "content": "été"}
    assert [p.name for p in tmp_path.glob("*.npz")] == []
    assert Conversation.load(tmp_path / "chat.json", engine).cache_note is None


def test_caches_of_another_bundle_are_not_used(engine: Engine, tmp_path: Path) -> None:
    """The text is, and the reason is said; so it is where the file is gone or the mode another."""
    file = tmp_path / "chat.json"
    talk(engine, "one").save(file, caches=True)
    other = make_tiny_bundle(tmp_path / "other", draft=True, eos_bonus=100)
    with edgespec.load(other) as foreign:
        chat = Conversation.load(file, foreign)
        assert "another bundle" in str(chat.cache_note)
        stream = chat.ask("two", SHORT)
        stream.text()
        assert stream.stats.cached_tokens == 0
    with edgespec.load(engine.bundle.path, runtime=RuntimeParams(exact=True)) as exact:
        assert "another row rule" in str(Conversation.load(file, exact).cache_note)
    (tmp_path / "chat.json.npz").unlink()
    assert "chat.json.npz" in str(Conversation.load(file, engine).cache_note)


def npy(array: np.ndarray, shape: tuple[int, ...] | None = None) -> bytes:
    """The .npy form of an array, perhaps with another shape in its header."""
    stream = io.BytesIO()
    header = np.lib.format.header_data_from_array_1_0(array)
    np.lib.format.write_array_header_1_0(stream, header | ({} if shape is None else {"shape": shape}))
    return stream.getvalue() + array.tobytes()


KEY = "target/past_key_values.0.key.npy"
DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "no member": (KEY, lambda data: b""),
    "not an array": (KEY, lambda data: b"PK" * 50),
    "huge in the header": (KEY, lambda data: npy(np.zeros(3, np.float32), (1, 1, 1 << 40, 8))),
    "hostile header": (KEY, lambda data: b"\x93NUMPY\x01\x00" + (3000).to_bytes(2, "little") + b"(" * 3000),
    "another type": (KEY, lambda data: npy(np.zeros((1, 1, 5, 8), np.float64))),
    "pickled": (KEY, lambda data: npy(np.zeros(3, "O"))),
    "too short": (KEY, lambda data: data[:-4]),
    "too long": (KEY, lambda data: data + b"1234"),
    "wild tokens": ("target/tokens.npy", lambda data: npy(np.full(3, 10**9, np.int64))),
    "negative tokens": ("target/tokens.npy", lambda data: npy(np.full(3, -1, np.int64))),
    "too many tokens": ("target/tokens.npy", lambda data: npy(np.zeros(10**6, np.int64))),
    "more tokens": ("target/tokens.npy", lambda data: npy(np.zeros(100, np.int64))),
    "description": ("about.npy", lambda data: npy(np.frombuffer(b"{not json", np.uint8))),
    "long description": ("about.npy", lambda data: npy(np.zeros(10**6, np.uint8))),
    "foreign description": ("about.npy", lambda data: npy(np.frombuffer(b"[]", np.uint8))),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_caches_change_nothing(engine: Engine, tmp_path: Path, damage: str) -> None:
    """Refused in one line before anything is allocated or replaced; what the engine had read stays cached."""
    file = tmp_path / "caches.npz"
    talk(engine, "one", "two")
    engine.save_caches(file)
    name, change = DAMAGES[damage]
    with zipfile.ZipFile(file) as archive:
        members = {n: archive.read(n) for n in archive.namelist()}
    members[name] = change(members[name])
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in members.items():
            if data:
                archive.writestr(member, data)
    before = engine._sessions[0].tokens.copy()
    with pytest.raises(ConfigError, match=r"caches\.npz") as caught:
        engine.load_caches(file)
    assert "\n" not in str(caught.value)
    assert np.array_equal(engine._sessions[0].tokens, before)


@pytest.mark.parametrize("content", [b"", b"PK\x05\x06", b"not a zip" * 100])
def test_what_is_no_archive_is_refused(engine: Engine, tmp_path: Path, content: bytes) -> None:
    """Garbage in place of caches is one line."""
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(ConfigError, match=r"x\.npz"):
        engine.load_caches(tmp_path / "x.npz")


def test_a_flipped_bit_is_found(engine: Engine, tmp_path: Path) -> None:
    """The checksum of the archive covers the caches."""
    talk(engine, "one")
    engine.save_caches(tmp_path / "x.npz")
    data = bytearray((tmp_path / "x.npz").read_bytes())
    with zipfile.ZipFile(tmp_path / "x.npz") as archive:
        info = archive.getinfo(KEY)
    data[info.header_offset + 400] ^= 4
    (tmp_path / "x.npz").write_bytes(data)
    with pytest.raises(ConfigError, match="CRC"):
        engine.load_caches(tmp_path / "x.npz")


GOOD = {"format": "edgespec-conversation", "format_version": 1, "system": None, "messages": []}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"format": "edgespec"}',
        json.dumps(GOOD | {"format_version": 2}),
        json.dumps(GOOD | {"system": 3}),
        json.dumps(GOOD | {"messages": {}}),
        json.dumps(GOOD | {"messages": [{"role": "user"}]}),
        json.dumps(GOOD | {"messages": ["x"]}),
        json.dumps(GOOD | {"caches": 3}),
        json.dumps(GOOD | {"read": {"text": "x", "token_ids": [-1]}}),
        json.dumps(GOOD | {"read": {"text": "x", "token_ids": [True]}}),
        "[" * 100000,
    ],
)
def test_what_is_no_conversation_is_refused(engine: Engine, tmp_path: Path, content: str) -> None:
    """One line, never a traceback of ours."""
    (tmp_path / "chat.json").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        Conversation.load(tmp_path / "chat.json", engine)
    assert "\n" not in str(caught.value)


def test_a_bundle_without_a_template_has_no_conversations(tmp_path: Path) -> None:
    """It says what to use instead."""
    make_tiny_bundle(tmp_path)
    data = json.loads((tmp_path / "edgespec.json").read_text(encoding="utf-8"))
    (tmp_path / "edgespec.json").write_text(json.dumps(data | {"chat_template": None}), encoding="utf-8")
    with edgespec.load(tmp_path) as engine, pytest.raises(ConfigError, match=r"Engine\.generate"):
        Conversation(engine)
