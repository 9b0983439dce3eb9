# SPDX-License-Identifier: Apache-2.0
"""From what a user calls a model to a folder on disk: the embedded model, a path, or the Hugging Face cache.

Looks at the local disk only and never touches the network; ``hub.py`` downloads. Whether a folder holds a sound
checkpoint is for ``checkpoint.py`` to say; of a cached snapshot it is only checked that no file is missing.
"""

from __future__ import annotations

import importlib.resources
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lily.checkpoint.safetensors_file import INDEX_NAME, SINGLE_NAME, read_weight_map
from lily.errors import CheckpointError, show

EMBEDDED_MODEL = "lily-tiny"
REQUIRED_FILES = ("config.json", "tokenizer.json")

_REPO = re.compile(r"[A-Za-z0-9_][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)
_REVISION = re.compile(r"[\w.-]+(/[\w.-]+)*", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SPEC_FORMS = "a folder, or ORG/NAME or ORG/NAME@REVISION of a Hugging Face model"
_MAX_LISTED = 20


@dataclass(frozen=True)
class ResolvedModel:
    """Where a model lies. ``revision`` is the commit of a snapshot from the Hugging Face cache."""

    path: Path
    name: str
    revision: str | None = None
    embedded: bool = False

    @property
    def key(self) -> str:
        """What tells this model from every other one on this machine."""
        if self.embedded:
            return self.name
        return f"{self.name}@{self.revision}" if self.revision else str(self.path.resolve())


@dataclass(frozen=True)
class HubModel:
    """A parsed ORG/NAME[@REVISION]."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


def resolve_model(spec: str | None) -> ResolvedModel:
    """Finds a model: None is the embedded one, an existing folder itself, ORG/NAME[@REVISION] lies in the cache.

    Raises CheckpointError: for a model that is not (completely) there its last line is ``lily pull ORG/NAME[@REV]``.
    """
    if spec is None:
        return _embedded()
    path = _expand_home(spec) if spec.startswith("~/") else Path(spec)
    if spec and os.path.exists(path):  # unlike Path.exists, false for names that no file can have
        if not path.is_dir():
            raise CheckpointError(f"{spec}: is a file, expected the folder that holds config.json and *.safetensors")
        return ResolvedModel(path, path.resolve().name or str(path))
    return _cached(parse_hub_model(spec))


def parse_hub_model(spec: str) -> HubModel:
    """Parses ORG/NAME[@REVISION]; raises CheckpointError for any other form."""
    repo, at, revision = spec.partition("@")
    if spec.startswith(("/", "./", "../", "~")) or spec in (".", ".."):
        raise CheckpointError(f"{show(spec, 200)}: no such folder")
    if not _REPO.fullmatch(repo) or "--" in repo or ".." in repo or repo.endswith((".git", ".", "-")):
        raise CheckpointError(f"model {show(spec, 200)}: no such folder; expected {_SPEC_FORMS}")
    if at and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise CheckpointError(
            f"model {show(spec, 200)}: {show(revision)} is no revision; expected a branch, tag or commit"
        )
    return HubModel(repo, revision if at else None)


def hub_cache() -> Path:
    """The Hugging Face cache folder, found as huggingface_hub finds it; CheckpointError where that needs a home."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return _expand(os.environ[variable])
    if os.environ.get("HF_HOME"):
        return _expand(os.environ["HF_HOME"]) / "hub"
    return _expand(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface" / "hub"


def missing_files(folder: Path) -> list[str]:
    """Names of the files that a downloaded checkpoint lacks; a link whose target is gone counts as lacking."""
    missing = _absent(folder, REQUIRED_FILES)
    if os.path.lexists(folder / INDEX_NAME) and not (folder / INDEX_NAME).exists():
        return [*missing, INDEX_NAME]
    weight_map = read_weight_map(folder)
    if weight_map is not None:
        return missing + _absent(folder, sorted(set(weight_map.values())))
    if any(folder.glob("model-*.safetensors")):
        return [*missing, INDEX_NAME]
    return missing + _absent(folder, (SINGLE_NAME,))


def _embedded() -> ResolvedModel:
    path = Path(str(importlib.resources.files("lily") / "models" / EMBEDDED_MODEL))
    if not path.is_dir():
        raise CheckpointError(f"{path}: the embedded model is missing; install Lily again")
    return ResolvedModel(path, EMBEDDED_MODEL, embedded=True)


def _cached(model: HubModel) -> ResolvedModel:
    repo_folder = hub_cache() / f"models--{model.repo.replace('/', '--')}"
    snapshots = repo_folder / "snapshots"
    commit = _commit(repo_folder, model.revision or "main")
    if commit is None or not (snapshots / commit).is_dir():
        others = sorted(path.name for path in snapshots.glob("*") if path.is_dir())
        known = f" (there: {', '.join(others[:3])})" if others else ""
        raise _pull_needed(model, f"is neither a folder nor in the Hugging Face cache {hub_cache()}{known}")
    missing = missing_files(snapshots / commit)
    if missing:
        listed = "".join(f"\n  {name}" for name in missing[:_MAX_LISTED])
        more = f"\n  and {len(missing) - _MAX_LISTED} more" if len(missing) > _MAX_LISTED else ""
        raise _pull_needed(model, f"is incomplete in {snapshots / commit}; missing:{listed}{more}")
    return ResolvedModel(snapshots / commit, model.repo, commit)


def _pull_needed(model: HubModel, what: str) -> CheckpointError:
    return CheckpointError(f"{model}: {what}\nDownload it with:\nlily pull {model}")


def _commit(repo_folder: Path, revision: str) -> str | None:
    """The commit that a branch, tag or commit stands for in the cache; None where the cache does not know it."""
    reference = repo_folder / "refs" / revision
    if reference.is_file():
        try:
            commit = reference.read_text("ascii").strip()
        except (OSError, ValueError):
            commit = ""
        if not _COMMIT.fullmatch(commit):
            raise CheckpointError(f"{reference}: holds {show(commit)}, expected a commit hash; remove the file")
        return commit
    return revision if _COMMIT.fullmatch(revision) else None


def _absent(folder: Path, names: Iterable[str]) -> list[str]:
    return [name for name in names if not (folder / name).is_file()]


def _expand(path: str) -> Path:
    return _expand_home(os.path.expandvars(path))


def _expand_home(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:  # neither HOME nor an entry in the table of users, as in many containers
        raise CheckpointError(
            f"{show(path, 200)}: this user has no home folder; set HOME, or set HF_HOME or HF_HUB_CACHE to the folder "
            "of the Hugging Face cache, or give the model's folder with its whole path"
        ) from None
