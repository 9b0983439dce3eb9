# SPDX-License-Identifier: Apache-2.0
"""The examination from end to end, as one document of plain data.

Whatever fails is part of the document, also that Lily is not built here: what needs compiled modules or other packages
is in examiner.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

from lily.doctor.machine import machine, scrub
from lily.errors import InvalidRequestError
from lily.kernels import KERNELS

SCHEMA = "lily-doctor/1"


def examine(
    device: str = "auto", *, quick: bool = False, threads: int | None = None, kernels: Collection[str] = (),
    sizes: Collection[str] | None = None, say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:  # fmt: skip
    """Checks and, unless ``quick``, measures ``device``; ``kernels`` and ``sizes`` restrict what is checked.

    ``threads`` are the cpu device's; ``say`` is told what is going on. ``ok`` of the document: whether nothing failed.
    Raises InvalidRequestError for a kernel that does not exist.
    """
    unknown = sorted(set(kernels) - set(KERNELS))
    if unknown:
        raise InvalidRequestError(f"there is no kernel {unknown[0]!r}; the table has {', '.join(KERNELS)}")
    start = time.monotonic()
    document: dict[str, Any] = {"schema": SCHEMA, "quick": quick, "machine": machine(), "problems": []}
    try:
        from lily.doctor.examiner import Examiner

        Examiner(document, device, threads, kernels, say).run(sizes, quick)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError)
        text = f"the module {error.name} is missing" if missing else str(error)
        remedy = "make build, or install the wheel for this system"
        document["problems"].append({"what": "build", "text": text, "remedy": remedy})
    document |= {"ok": not document["problems"], "seconds": round(time.monotonic() - start, 1)}
    cleaned: dict[str, Any] = scrub(document)
    return cleaned
