# SPDX-License-Identifier: Apache-2.0
"""Options of the GPU device that are off until they were measured to be faster on this machine with this model.

`lily tune` measures (``measure``) and keeps what it found (``remember``); an engine asks for it when it opens
(``tuned_options``).  A choice holds for one chip, system, version of Lily and model; any other is measured anew.
Not handled: several options at once, of which there is only one; prompts (the measure is decode).
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lily._version import __version__
from lily.device import sysctl
from lily.device.device import environment_options
from lily.errors import DeviceError, InvalidRequestError, LilyError

if TYPE_CHECKING:
    from lily.engine import Engine

MARGIN = 0.02  # a gain below it is not worth another path
WARM_UP = 8  # tokens before the clock counts
PROMPT = "Once upon a time"
_FILE = "tune.json"


@dataclass(frozen=True)
class Option:
    """An option of the Metal device, its default and what may beat it."""

    name: str
    default: str
    other: str

    @property
    def values(self) -> tuple[str, str]:
        return (self.default, self.other)


OPTIONS = (Option("replay", "encode", "icb"),)


@dataclass
class Result:
    """Milliseconds per token of each round by the option's value; ``problem``: why the other value could not run."""

    option: Option
    milliseconds: dict[str, list[float]] = field(default_factory=dict)
    problem: str | None = None

    @property
    def gain(self) -> float:
        """By how much of the default's median the other value is faster; negative if it is slower."""
        default, other = (statistics.median(self.milliseconds[v]) for v in self.option.values)
        return 1 - other / default

    @property
    def winner(self) -> str:
        """The other value only where its slowest round beats the default's fastest, and by a margin in the median."""
        if self.problem is not None:
            return self.option.default
        default, other = (self.milliseconds[v] for v in self.option.values)
        return self.option.other if max(other) < min(default) and self.gain >= MARGIN else self.option.default


# ---- measuring
Opener = Callable[[], "Engine"]


def measure(option: Option, open_engine: Opener, *, rounds: int = 3, tokens: int = 128) -> Result:
    """Decodes with both values in turn, each round in an engine of its own; the first of a round alternates.

    ``open_engine`` opens the model on the metal device. DeviceError if that fails with the default value.
    """
    if rounds < 2:
        raise InvalidRequestError(f"{rounds} rounds tell nothing about noise; at least 2 are needed")
    if option.name in environment_options("metal"):
        raise InvalidRequestError(f"LILY_METAL sets {option.name}, which is to be measured; take it out of LILY_METAL")
    result = Result(option, {value: [] for value in option.values})
    replies: set[tuple[int, ...]] = set()
    for number in range(rounds):
        for value in option.values if number % 2 == 0 else reversed(option.values):
            try:
                milliseconds, reply = _decode(option, value, open_engine, tokens)
            except DeviceError as error:
                if value == option.default:
                    raise
                result.problem = str(error)
                return result
            result.milliseconds[value].append(milliseconds)
            replies.add(reply)
    if len(replies) > 1:  # the same kernels on the same numbers: something was not waited for
        result.problem = f"the replies differ with {option.name}={option.other}"
    return result


def _decode(option: Option, value: str, open_engine: Opener, tokens: int) -> tuple[float, tuple[int, ...]]:
    """(milliseconds per token, the tokens) with the option's value."""
    before = os.environ.get("LILY_METAL")
    os.environ["LILY_METAL"] = f"{before or ''} {option.name}={value}"
    try:
        with open_engine() as engine:
            greedy: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
            engine.generate(PROMPT, max_tokens=WARM_UP, **greedy)
            reply = engine.generate(PROMPT, max_tokens=tokens, **greedy)
            return 1e3 / reply.timings.generation_tokens_per_second, tuple(reply.token_ids)
    finally:
        if before is None:
            del os.environ["LILY_METAL"]
        else:
            os.environ["LILY_METAL"] = before


# ---- choices that are kept
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


def tuned_options(device: str, model: str) -> dict[str, str]:
    """Options for ``device`` that were measured to be faster with ``model``; none where LILY_METAL sets them.

    A file that is missing, damaged or open to other users holds none.
    """
    if device != "metal":
        return {}
    explicit = environment_options(device)
    try:
        known = _read().get(machine(), {}).get(model, {}).get("options", {})
        return {o.name: o.other for o in OPTIONS if o.name not in explicit and known.get(o.name) == o.other}
    except (OSError, ValueError, AttributeError, LilyError):
        return {}


def remember(model: str, result: Result) -> Path:
    """Keeps the winner for this machine and model, in place of an earlier one; LilyError if that is not possible."""
    option = result.option
    try:
        choices = {machine(): _read().get(machine(), {})}  # what other versions and systems chose is of no use any more
    except ValueError:
        choices = {machine(): {}}
    except OSError as error:
        raise LilyError(f"{folder()}: {error.strerror}") from None
    won = {option.name: result.winner} if result.winner != option.default else {}
    choices[machine()][model] = {"options": won, "milliseconds": result.milliseconds}
    target = folder() / _FILE
    part = target.with_name(f"{_FILE}.{os.getpid()}")
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(target.parent)
        part.write_text(json.dumps(choices, indent=1) + "\n", encoding="utf-8")
        part.chmod(0o600)
        part.replace(target)
    except OSError as error:
        raise LilyError(f"the choice cannot be kept in {target}: {error.strerror}") from None
    return target


def _read() -> dict[str, Any]:
    """The file's contents; OSError if others can write it, ValueError if it is damaged."""
    path = folder() / _FILE
    if not path.exists():
        return {}
    _check_private(path.parent)
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or not all(isinstance(models, dict) for models in found.values()):
        raise ValueError(f"{path} is damaged")
    return found


def _check_private(path: Path) -> None:
    """OSError unless only this user can read and write the folder."""
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(0, f"the folder is open to other users (chmod 700 {path})", str(path))
