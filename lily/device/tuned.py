# SPDX-License-Identifier: Apache-2.0
"""Options of a device that are off until they were measured to be faster on this machine with this model.

``lily tune`` measures and keeps what it found (``remember``); an engine asks for it when it opens (``tuned_options``).
A choice holds for one chip, system, version of Lily and model; any other is measured anew.
Not handled: measuring (``lily/tune.py``); choices for several devices of one machine, of which only one is tunable.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lily._version import __version__
from lily.device import sysctl
from lily.device.kinds import Option, environment_options, kind_of
from lily.errors import LilyError
from lily.private_files import check_private, make_private, replacing

_FILE = "tune.json"


def folder() -> Path:
    """Where choices are kept, for this user only; LilyError for a user without a home."""
    try:
        if platform.system() == "Darwin":
            return Path.home() / "Library" / "Caches" / "lily"
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lily"
    except RuntimeError:
        raise LilyError("this user has no home folder to keep choices in; set HOME") from None


def machine() -> str:
    """What a choice depends on besides the model: chip, build of the system, version of Lily."""
    chip = sysctl.text("machdep.cpu.brand_string") or platform.machine()
    return f"{chip} | {sysctl.text('kern.osversion') or platform.release()} | {__version__}"


def opening_options(device: str, model: str, threads: int | None) -> dict[str, object]:
    """All that an engine opens ``device`` with: what the user asked for, and what was found to be faster."""
    return kind_of(device).options(threads) | tuned_options(device, model)


def tuned_options(device: str, model: str) -> dict[str, str]:
    """Options for ``device`` that were measured to be faster with ``model``; none that its variable sets.

    A file that is missing, damaged or open to other users holds none.
    """
    options = kind_of(device).tunable
    if not options:
        return {}
    explicit = environment_options(device)
    try:
        known = _read().get(machine(), {}).get(model, {}).get("options", {})
        return {o.name: o.other for o in options if o.name not in explicit and known.get(o.name) == o.other}
    except (OSError, ValueError, AttributeError, LilyError):
        return {}


def remember(model: str, option: Option, winner: str, milliseconds: Mapping[str, Sequence[float]]) -> Path:
    """Keeps the winner for this machine and model, in place of an earlier one; LilyError if that is not possible.

    ``milliseconds``: of a token, by the option's value; kept for who reads the file.
    """
    try:
        choices = {machine(): _read().get(machine(), {})}  # what other versions and systems chose is of no use any more
    except ValueError:
        choices = {machine(): {}}
    except OSError as error:
        raise LilyError(f"{folder()}: {error.strerror}") from None
    won = {option.name: winner} if winner != option.default else {}
    choices[machine()][model] = {"options": won, "milliseconds": dict(milliseconds)}
    target = folder() / _FILE
    try:
        make_private(target.parent)
        with replacing(target) as file:
            file.write((json.dumps(choices, indent=1) + "\n").encode())
    except OSError as error:
        raise LilyError(f"the choice cannot be kept in {target}: {error.strerror}") from None
    return target


def _read() -> dict[str, Any]:
    """The file's contents; OSError if others can write it, ValueError if it is damaged."""
    path = folder() / _FILE
    if not path.exists():
        return {}
    check_private(path.parent)
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or not all(isinstance(models, dict) for models in found.values()):
        raise ValueError(f"{path} is damaged")
    return found
