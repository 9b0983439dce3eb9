# SPDX-License-Identifier: Apache-2.0
"""The tests of the Metal shim run nearly all of its lines; the share is printed at the end of the test run.

Not handled: how it is measured (metal/coverage.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from metal.coverage import measure, summary
from metal.toolchain import Missing, sources

MINIMUM = 90.0


def test_the_tests_run_nearly_every_line_of_the_shim(tmp_path: Path) -> None:
    try:
        coverage = measure(tmp_path)
    except Missing as problem:
        pytest.skip(str(problem))
    assert coverage.files.keys() == {p.name for p in sources()} | {"metal_runtime.h"}
    assert coverage.percent >= MINIMUM, "\n".join(summary())
