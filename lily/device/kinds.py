# SPDX-License-Identifier: Apache-2.0
"""The kinds of device that there are: all that the host must know of one before, or besides, opening it.

A further device is a row of ``KINDS``, a policy of the same name (``lily/policy.py``) and a library behind
``lily_device.h``.  Nothing else compares a device's name.  Not handled: what only an open device can say
(``Device.info``).
"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from lily.errors import DeviceError, InvalidRequestError

_PACKAGE = Path(__file__).parents[1]
_SUFFIX = "dylib" if sys.platform == "darwin" else "so"


@dataclass(frozen=True)
class Option:
    """An option of a device, its default, and what ``lily tune`` may find to be faster."""

    name: str
    default: str
    other: str

    @property
    def values(self) -> tuple[str, str]:
        """The default first."""
        return (self.default, self.other)


@dataclass(frozen=True)
class Kind:
    """One kind of device."""

    name: str
    library: str  # its path in the package, without the suffix
    gpu: bool  # obeys the GPU's legal shapes, and the cpu device can check its results and do its work
    systems: tuple[str, ...] = ()  # sys.platform of the systems that can have it; none named: all
    needs: str = ""  # what to say on any other system
    threads: bool = False  # takes the option ``threads``
    shaders: bool = False  # is handed the shaders as one source when it opens
    own_memory: bool = False  # says itself how much memory there is; otherwise it has what the machine has left
    more_memory: str = "close other programs or use a smaller model"  # what a user can do when it is too little
    options_variable: str = ""  # environment variable with options as "key=value key=value"
    variables: tuple[str, ...] = ()  # all environment variables that change what it does
    tunable: tuple[Option, ...] = ()

    @property
    def here(self) -> bool:
        """Whether this system can have it."""
        return not self.systems or sys.platform in self.systems

    def options(self, threads: int | None) -> dict[str, object]:
        """The options to open it with when a user asks for ``threads``."""
        return {"threads": threads} if self.threads else {}


KINDS = {
    kind.name: kind
    for kind in (
        Kind("cpu", "cpu/liblily_cpu", gpu=False, threads=True, variables=("LILY_CPU",)),
        Kind(
            "metal", "metal/liblily_metal", gpu=True, systems=("darwin",), shaders=True, own_memory=True,
            needs="the metal device needs macOS 15 or later on an M1 or later",
            more_memory="use a smaller model, or let the GPU use more of this Mac's memory "
            "(sudo sysctl iogpu.wired_limit_mb=MEGABYTES)",
            options_variable="LILY_METAL",
            variables=(
                "LILY_METAL", "LILY_METAL_CAPTURE", "AGX_RELAX_CDM_CTXSTORE_TIMEOUT", "MTL_CAPTURE_ENABLED",
                "METAL_CAPTURE_ENABLED", "MTL_DEBUG_LAYER", "MTL_SHADER_VALIDATION",
            ),
            tunable=(Option("replay", "encode", "icb"),),
        ),
    )
}  # fmt: skip

# The libraries of this build, by the name of the kind.
LIBRARIES = {kind.name: _PACKAGE / f"{kind.library}.{_SUFFIX}" for kind in KINDS.values() if kind.here}


def kind_of(device: str) -> Kind:
    """The kind of that name; InvalidRequestError if there is none."""
    if device not in KINDS:
        raise InvalidRequestError(f"unknown device {device!r}; known: {', '.join(KINDS)}")
    return KINDS[device]


def choose_device(name: str) -> str:
    """The device that ``auto`` stands for on this machine, a GPU where the build has one; other names as they are."""
    if name != "auto":
        return name
    return next((library for library in LIBRARIES if KINDS[library].gpu), "cpu")


def library_path(device: str) -> Path:
    """Where the library of ``device`` is installed; DeviceError if there is none for this platform."""
    if device not in LIBRARIES:
        raise DeviceError(f"there is no {device!r} device in this build; available: {', '.join(LIBRARIES)}")
    path = LIBRARIES[device]
    if not path.exists():
        raise DeviceError(f"the library of the {device!r} device is missing ({path.name}): build it with `make build`")
    return path


def environment_options(device: str) -> dict[str, object]:
    """The options that a user has set for ``device`` in its variable; DeviceError if they cannot be read.

    LILY_METAL="key=value key=value" holds what a user may want to try on one GPU, and what tests need.
    """
    variable = kind_of(device).options_variable
    text = os.environ.get(variable, "") if variable else ""
    form = "it takes key=value, separated by spaces (objc_shim/README.md)"
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise DeviceError(f"{variable}={text} cannot be read ({error}); {form}") from None
    wrong = next((word for word in words if "=" not in word), None)
    if wrong is not None:
        raise DeviceError(f"{variable} holds {wrong!r}; {form}")
    return {key: value for key, _, value in (word.partition("=") for word in words)}
