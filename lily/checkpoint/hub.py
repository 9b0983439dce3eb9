# SPDX-License-Identifier: Apache-2.0
"""``lily pull``: download the files of a checkpoint that Lily reads into the Hugging Face cache.

The only module that touches the network, through the optional package huggingface_hub. Files that are complete in the
cache are not downloaded again. Not handled: logging in; huggingface_hub reads HF_TOKEN or its own stored token.
"""

from __future__ import annotations

import errno
import importlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lily.checkpoint.resolve import REQUIRED_FILES, HubModel, hub_cache, missing_files, parse_hub_model
from lily.checkpoint.safetensors_file import INDEX_NAME, SINGLE_NAME, read_weight_map
from lily.errors import LilyError

OPTIONAL_FILES = ("generation_config.json", "tokenizer_config.json", "chat_template.jinja", INDEX_NAME)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_DISK_REMEDY = "free some space, or set HF_HOME to a folder on a larger disk"
_SPARE_BYTES = 64 << 20  # for small files, locks and file system overhead


def pull(spec: str, *, progress: bool = True) -> Path:
    """Downloads ORG/NAME[@REVISION] unless it is there already; returns the snapshot's folder.

    Raises LilyError: huggingface_hub absent, no connection, unknown or gated model, disk too small, files missing.
    """
    model = parse_hub_model(spec)
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise LilyError("lily pull needs huggingface_hub; install it with: pip install '.[hub]'") from None
    with _plain_errors(model), _progress_bars(progress):
        api = HfApi()
        info = api.model_info(model.repo, revision=model.revision, files_metadata=True)
        commit = str(info.sha)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
        names = _needed_files(api, model, commit, sizes)
        _require_disk(model, sum(sizes[name] for name in names if not _is_cached(model, commit, name)))
        # By branch or tag, not by commit: only so does the cache learn what the name stands for.
        folder = Path(
            api.snapshot_download(model.repo, revision=model.revision, allow_patterns=names, cache_dir=str(hub_cache()))
        )
    if missing := missing_files(folder):
        raise LilyError(f"{model}: {', '.join(missing[:5])} did not arrive in {folder}; run lily pull {model} again")
    return folder


def _needed_files(api: Any, model: HubModel, commit: str, sizes: dict[str, int]) -> list[str]:
    """Names of the files to have, in the order of their size; the index is downloaded to learn the shards."""
    required = list(REQUIRED_FILES)
    if INDEX_NAME in sizes:
        index = api.hf_hub_download(model.repo, INDEX_NAME, revision=commit, cache_dir=str(hub_cache()))
        required += sorted(set((read_weight_map(Path(index).parent) or {}).values()))
    else:
        required.append(SINGLE_NAME)
    absent = [name for name in required if name not in sizes]
    if absent:
        raise LilyError(f"{model}: not a checkpoint Lily can run: the repository has no {', '.join(absent[:5])}")
    return sorted({*required, *(name for name in OPTIONAL_FILES if name in sizes)}, key=lambda name: sizes[name])


def _is_cached(model: HubModel, commit: str, name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model.repo, name, cache_dir=str(hub_cache()), revision=commit)
    return isinstance(found, str) and os.path.exists(found)


def _require_disk(model: HubModel, needed: int) -> None:
    """Refuses before the first byte what would fill the disk after an hour."""
    if not needed:
        return
    cache = hub_cache()
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed + _SPARE_BYTES > free:
        raise LilyError(f"{model}: {_size(needed)} to download, but {existing} has {_size(free)} free; {_DISK_REMEDY}")


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


def _disk_is_full(error: BaseException | None) -> bool:
    """Whether that is what ``error``, or one that it was made of, says; libraries wrap it, some as text only."""
    while error is not None:
        if (isinstance(error, OSError) and error.errno in _FULL) or os.strerror(errno.ENOSPC) in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def _progress_bars(wanted: bool) -> Iterator[None]:
    bars: Any = importlib.import_module("huggingface_hub.utils")
    if wanted or bars.are_progress_bars_disabled():
        yield
        return
    bars.disable_progress_bars()
    try:
        yield
    finally:
        bars.enable_progress_bars()


@contextmanager
def _plain_errors(model: HubModel) -> Iterator[None]:
    """Turns what huggingface_hub and its HTTP client raise into one line each; they differ from version to version."""
    from huggingface_hub import errors

    try:
        yield
    except LilyError:
        raise
    except errors.GatedRepoError:
        raise LilyError(f"{model}: access is restricted; accept the terms on its page, then set HF_TOKEN") from None
    except errors.RevisionNotFoundError:
        raise LilyError(f"{model}: the repository exists, but has no such revision") from None
    except errors.RepositoryNotFoundError:
        raise LilyError(f"{model}: no such repository, or a private one; check the name, or set HF_TOKEN") from None
    except errors.OfflineModeIsEnabled:
        raise LilyError(f"{model}: HF_HUB_OFFLINE is set; unset it to download") from None
    except Exception as error:
        if _disk_is_full(error):
            raise LilyError(
                f"{model}: the disk of {hub_cache()} is full; {_DISK_REMEDY}. Then run the command again: what has "
                "arrived whole is kept"
            ) from None
        reason = next(iter(str(error).strip().splitlines()), "no details")
        raise LilyError(f"{model}: download failed: {type(error).__name__}: {reason}; run the command again") from None
