# SPDX-License-Identifier: Apache-2.0
"""Engines whose metal device is the real shim on the stand-in for Metal, with kernels run by the emulator.

    with emulated_metal(tmp_path) as metal:
        engine = Engine(model, device="metal")     # anything that opens the metal device
        metal.set(order=2, seed=5)                 # see standin.h

Not handled: several such engines at once with different settings; speed (half a second for a token of lily-tiny).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from metal.standin import Standin, emulate, require_standin

from lily.device import kinds


@contextmanager
def emulated_metal(folder: Path, checked: bool = False, **options: object) -> Iterator[Standin]:
    """Makes "metal" the shim on the stand-in; ``options`` go to lily_open. Skips the test where there is none.

    On leaving, no rule of Metal may have been broken and no object may exist. With ``checked``, kernels are the checked
    build: races between dispatches, accesses out of bounds … fail the command buffer.
    """
    s = require_standin()
    s.reset()
    emulate(s, checked)
    before = s.live
    # No slices: on the emulator everything takes long.
    given: dict[str, object] = {"cache": "off", "keep_s": 0, "slice_ms": 0, **options}
    words = shlex.join(f"{key}={value}" for key, value in given.items())
    with (
        mock.patch.dict(kinds.LIBRARIES, metal=s.path),
        mock.patch.dict(os.environ, LILY_METAL=words),
    ):
        yield s
    found, left = s.complaints, s.live
    s.reset()
    assert found == [], found  # the words, where pytest does not show them
    assert left == before, (left, before)
