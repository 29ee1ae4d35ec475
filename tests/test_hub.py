"""The hub and pickled weights: what is asked for, what is refused. No network is used."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgespec.errors import ExportError
from edgespec.export.hub import HubId, parse_hub_id
from edgespec.export.source import fetch_source
from tests.export_models import save_llama

COMMIT = "0123456789abcdef"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model folder. Read only."""
    return save_llama(tmp_path_factory.mktemp("hub") / "tiny-llama")


class FakeHub:
    """Stands in for the hub's client; remembers what it was asked, and raises or answers."""

    def __init__(self, snapshot: Path, size: int, error: Exception | None) -> None:
        self.asked: list[dict[str, Any]] = []
        self.snapshot, self.size, self.error = snapshot, size, error

    def model_info(self, repository: str, revision: str | None, files_metadata: bool) -> SimpleNamespace:
        if self.error is not None:
            raise self.error
        files = [("model.safetensors", self.size), ("pytorch_model.bin", 1 << 60), ("config.json", None)]
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name, size=size) for name, size in files])

    def download(self, repository: str, revision: str | None, allow_patterns: list[str]) -> str:
        self.asked.append({"repository": repository, "revision": revision, "patterns": allow_patterns})
        return str(self.snapshot)


@pytest.fixture
def make_hub(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(size: int = 1000, error: Exception | None = None) -> FakeHub:
        shutil.copytree(llama, tmp_path / COMMIT)
        hub = FakeHub(tmp_path / COMMIT, size, error)
        monkeypatch.setattr("huggingface_hub.snapshot_download", hub.download)
        monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        return hub

    return make


def test_a_hub_id_takes_safetensors_and_texts_only(make_hub: Any, tmp_path: Path) -> None:
    """What is asked of the hub contains no pickles and no code, and the revision ends up in the origin."""
    hub = make_hub()
    source = fetch_source("somebody/some-model@v1.0", tmp_path)
    assert source.name == "some-model"
    assert source.origin == "somebody/some-model at 0123456789ab from the Hugging Face hub"
    (asked,) = hub.asked
    assert (asked["repository"], asked["revision"]) == ("somebody/some-model", "v1.0")
    assert not any(pattern.endswith((".bin", ".py", ".pt", "*")) for pattern in asked["patterns"])


def test_pickles_are_fetched_only_where_they_are_allowed(make_hub: Any, tmp_path: Path) -> None:
    """And nothing else of theirs than the weights; their size counts then."""
    make_hub()
    with pytest.raises(ExportError, match="GB free, and the export needs"):
        fetch_source("somebody/some-model", tmp_path, allow_pickle=True)


def hub_error(name: str) -> Exception:
    """One of the client's own, made without the response that its versions want in different forms."""
    from huggingface_hub import errors

    kind: type[Exception] = getattr(errors, name)
    return kind.__new__(kind, "no\nway")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("GatedRepoError", "somebody/some-model@v9 is gated; accept its terms"),
        ("RepositoryNotFoundError", "neither a folder here nor a public model"),
        ("RevisionNotFoundError", "somebody/some-model has no revision v9"),
        ("HfHubHTTPError", "could not download .* check the network"),
    ],
)
def test_each_refusal_of_the_hub_is_a_line_of_its_own(error: str, words: str, make_hub: Any, tmp_path: Path) -> None:
    """What is wrong, and what to do."""
    hub = make_hub(error=hub_error(error))
    with pytest.raises(ExportError, match=words) as caught:
        fetch_source("somebody/some-model@v9", tmp_path)
    assert "\n" not in str(caught.value)
    assert hub.asked == []


def test_without_a_network_a_hub_id_gives_one_line(make_hub: Any, tmp_path: Path) -> None:
    """Whatever class of error the hub's client raises."""
    make_hub(error=ConnectionError("Max retries exceeded\nwith url"))
    with pytest.raises(ExportError, match="check the network") as caught:
        fetch_source("somebody/some-model", tmp_path)
    assert "\n" not in str(caught.value)


def test_no_room_is_said_before_anything_is_fetched(make_hub: Any, tmp_path: Path) -> None:
    """The hub says how large the files are."""
    hub = make_hub(size=1 << 60)
    with pytest.raises(ExportError, match="GB free, and the export needs"):
        fetch_source("somebody/some-model", tmp_path)
    assert hub.asked == []


def test_a_disk_that_fills_up_meanwhile_is_the_disks_fault(make_hub: Any, tmp_path: Path) -> None:
    """It is not taken for a network that is missing; whoever called says which disk it was."""
    make_hub(error=OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(OSError, match="No space left"):
        fetch_source("somebody/some-model", tmp_path)


def test_what_a_hub_id_looks_like() -> None:
    """Owner, name, and perhaps a revision."""
    assert parse_hub_id("a/b") == HubId("a/b", None)
    assert parse_hub_id("hf:a/b@refs/pr/1") == HubId("a/b", "refs/pr/1")
    for text in ("a", "a/b/c", "/a/b", "a/b@", "https://a/b"):
        assert parse_hub_id(text) is None


def test_a_mistyped_path_does_not_go_to_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is there makes `folder/name` a path; the prefix says otherwise."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    with pytest.raises(ExportError, match="write hf:models/mine"):
        fetch_source("models/mine", tmp_path)
    assert parse_hub_id("hf:models/mine") == HubId("models/mine", None)


def pickled(llama: Path, folder: Path) -> Path:
    """The same model with pickled weights."""
    import torch
    from safetensors.torch import load_file

    shutil.copytree(llama, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(load_file(llama / "model.safetensors"), folder / "pytorch_model.bin")
    return folder


def test_pickles_are_refused_unless_they_are_allowed(llama: Path, tmp_path: Path) -> None:
    """The line names the file, the danger and the switch; with it, the weights are the same."""
    from safetensors.numpy import load_file

    folder = pickled(llama, tmp_path / "model")
    with pytest.raises(ExportError, match=r"pytorch_model\.bin.*run code.*--allow-pickle"):
        fetch_source(str(folder), tmp_path)
    source = fetch_source(str(folder), tmp_path, allow_pickle=True)
    assert source.origin == "folder model"
    found = load_file(source.folder / "pytorch_model.safetensors")
    for name, weight in load_file(llama / "model.safetensors").items():
        np.testing.assert_array_equal(found[name], weight)


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("import pathlib; pathlib.Path('was-here').touch()",))


def test_a_pickle_that_would_run_code_does_not(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even when pickles are allowed, nothing but tensors is read."""
    import torch

    monkeypatch.chdir(tmp_path)
    folder = pickled(llama, tmp_path / "model")
    torch.save({"weight": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(ExportError, match="something else than weights"):
        fetch_source(str(folder), tmp_path, allow_pickle=True)
    assert not (tmp_path / "was-here").exists()
