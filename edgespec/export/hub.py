"""The Hugging Face hub: which repository is meant, and its files on this disk. The only file that asks the hub."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from edgespec.errors import EdgespecError, ExportError
from edgespec.export.convert import quiet
from edgespec.export.disk import is_disk_full, require_space

_HUB_ID = re.compile(r"(?:hf:)?([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
_FILES = ["*.safetensors", "model.safetensors.index.json", "*.json", "*.jinja", "tokenizer.model", "README.md"]
_PICKLES = ["pytorch_model*.bin"]
_PREFIX = "hf:"


@dataclass(frozen=True, slots=True)
class HubId:
    """A repository of models, and which state of it: a branch, a tag or a commit; None is its main branch."""

    repository: str
    revision: str | None

    @property
    def name(self) -> str:
        return self.repository.split("/")[1]

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"


def parse_hub_id(source: str) -> HubId | None:
    """What `owner/name`, `owner/name@revision` or either after `hf:` means; None for anything else.

    Raises:
        ExportError: it may as well be a folder that is missing here: a mistyped path must not go to the network.
    """
    found = _HUB_ID.fullmatch(source)
    if found is None:
        return None
    repository, revision = found.groups()
    if not source.startswith(_PREFIX) and Path(repository).parent.is_dir():
        raise ExportError(
            f"{source} does not exist here, though the folder {Path(repository).parent} does; "
            f"write {_PREFIX}{source} if you mean the Hugging Face hub"
        )
    return HubId(repository, revision)


def download_snapshot(place: HubId, *, allow_pickle: bool = False) -> Path:
    """Bring a repository's files to the hub's own cache on this disk and return their folder.

    Raises:
        ExportError: it is gated, missing, or has no such revision; no network; no room.
    """
    from huggingface_hub import errors, snapshot_download

    patterns = _FILES + (_PICKLES if allow_pickle else [])
    try:
        with quiet():
            _require_room(place, patterns)
            return Path(snapshot_download(place.repository, revision=place.revision, allow_patterns=patterns))
    except errors.GatedRepoError as error:
        raise ExportError(
            f"{place} is gated; accept its terms on its hub page and log in with `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ExportError(
            f"{place} is neither a folder here nor a public model on the hub; check the spelling"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ExportError(
            f"{place.repository} has no revision {place.revision}; check its branches and tags"
        ) from error
    except EdgespecError:
        raise
    except Exception as error:  # requests, urllib3 and the hub's own classes all mean the same to the user
        if is_disk_full(error):
            raise
        raise ExportError(
            f"could not download {place} from the Hugging Face hub ({type(error).__name__}); "
            "check the network, or name a folder on this disk"
        ) from error


def _require_room(place: HubId, patterns: list[str]) -> None:
    """Ask how large the files are before any is fetched."""
    from huggingface_hub import HfApi, constants

    files = HfApi().model_info(place.repository, revision=place.revision, files_metadata=True).siblings or []
    wanted = [file for file in files if any(fnmatch(file.rfilename, pattern) for pattern in patterns)]
    cache = Path(constants.HF_HUB_CACHE)
    held = cache / f"models--{place.repository.replace('/', '--')}"
    if not held.is_dir():  # what was fetched already needs no room
        cache.mkdir(parents=True, exist_ok=True)
        require_space(cache, sum(file.size or 0 for file in wanted))
