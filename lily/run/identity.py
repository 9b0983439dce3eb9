# SPDX-License-Identifier: Apache-2.0
"""What the bits of a state depend on: they are of use to those alone for whom all of it is the same.

Not handled: what they do not depend on (threads, the size of the context, sampling).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from lily.device.device import Device
from lily.device.tuned import machine
from lily.policy import Policy

_CODE = (".py", ".so", ".dylib", ".metal", ".metallib", ".h")
_OPTIONS = ("isa", "family", "matrix", "msl", "shaders")  # of what a device says about itself


def identity(device: Device, policy: Policy, model: str) -> dict[str, str]:
    """By what it is called in messages; ``model``: the fingerprint of the checkpoint."""
    info = device.info
    options = {name: info[name] for name in _OPTIONS if name in info}
    return {
        "model": model,
        "device": json.dumps([device.name, options]),
        "machine or version of Lily": machine(),
        "build of Lily": _build(),
        "policy": json.dumps(asdict(policy), sort_keys=True, default=sorted),
    }


def key_of(identity: Mapping[str, Any]) -> str:
    """A short name of an identity."""
    return sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


@cache
def _build() -> str:
    """Of all code of the package, since any of it may change a bit."""
    package = Path(str(files("lily")))
    digest = sha256()
    for path in sorted(path for path in package.rglob("*") if path.suffix in _CODE):
        digest.update(f"{path.relative_to(package).as_posix()} {path.stat().st_size} ".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
