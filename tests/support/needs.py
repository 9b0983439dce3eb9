# SPDX-License-Identifier: Apache-2.0
"""What a test may lack on a machine, in one line each with the remedy: the only reasons to skip on Linux.

The summary at the end of a run counts tests by reason (conftest.py), so every test says it in these words.  Those of
the shim's tests are in metal/toolchain.py, those of the shaders in msl_compiler.py.
Not handled: whether the thing is there; who needs it looks.  What other systems lack is said where it is tested.
"""

from __future__ import annotations

import os
from pathlib import Path

REAL_DATA = (
    "LILY_TEST_DATA is not set; remedy: set it to a folder with the real model's config.json, "
    "model.safetensors.index.json and tokenizer/"
)
QEMU = "no qemu-aarch64, which runs the NEON kernels; remedy: apt-get install qemu-user"
CHROMIUM = "no chromium with its driver, which shows the chat page; remedy: apt-get install chromium chromium-driver"
ROUTER = (
    "no sglang_router, which shares requests among servers; remedy: "
    ".venv/bin/python -m pip install -r requirements/router.txt"
)
UNSHARE = "unshare is not permitted, which takes the network away; remedy: run the tests as root"


def sanitizer_missing(compiler: str, name: str) -> str:
    """The reason that the C compiler lacks a sanitizer."""
    return f"{compiler} cannot build and run with -fsanitize={name}; remedy: apt-get install gcc, unset CC"


def real_tokenizer() -> Path | None:
    """The real model's tokenizer folder, if LILY_TEST_DATA is set."""
    folder = os.environ.get("LILY_TEST_DATA")
    return Path(folder) / "tokenizer" if folder else None
