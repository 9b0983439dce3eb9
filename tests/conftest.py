# SPDX-License-Identifier: Apache-2.0
"""What all tests share: where things are, the same draws in every run, coverage of the shaders, what was skipped.

Not handled: data for single tests; it lies with them.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings
from needs import REAL_DATA
from paths import ROOT

# Before numpy is imported: its threads and those of the device would crowd each other out on two cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

pytest_plugins = ["engine_device", "metal.shim"]
pytest.register_assert_rewrite(
    "sampling_tests", "sampling_filter_tests", *(path.stem for path in (ROOT / "tests/support").glob("shader_*.py"))
)

_COVERAGE = pytest.StashKey[list[str]]()  # lines about the shaders
_PARTS = pytest.StashKey[list[Any]]()  # what each process has seen of them, if there are several
_SEEN = "shader lines"

# Under nohup, or in the background of a script, an interrupt is ignored, in children too; tests send interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Zig keeps its C++ library in the home folder; where nothing can be written there, beside the other build results.
_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME") or "/nowhere", ".cache")).absolute()
if not os.access(next(folder for folder in (_cache, *_cache.parents) if folder.exists()), os.W_OK):
    os.environ.setdefault("ZIG_GLOBAL_CACHE_DIR", str(ROOT / "build" / "zig"))

# The same examples on every machine: a failure seen once is seen by everyone.
settings.register_profile("lily", derandomize=True, database=None, deadline=None)
settings.load_profile("lily")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_PARTS] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """Requests without a seed draw the same in every run, and other things in other tests."""
    with mock.patch.object(os, "urandom", random.Random(item.nodeid).randbytes):
        return (yield)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def real_metadata() -> Path:
    """The folder with the real model's metadata and tokenizer (README, "Tests")."""
    folder = os.environ.get("LILY_TEST_DATA")
    if not folder:
        pytest.skip(REAL_DATA)
    path = Path(folder)
    missing = [
        name for name in ("config.json", "model.safetensors.index.json", "tokenizer") if not (path / name).exists()
    ]
    assert not missing, f"LILY_TEST_DATA={folder} lacks {', '.join(missing)}"
    return path


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run of all tests fails when they leave out too many lines of the shaders (msl_coverage.py)."""
    parts = session.config.stash[_PARTS]  # of the other processes, if there are any
    if not parts and "msl_build" not in sys.modules:  # no shader ran
        return
    import msl_coverage

    own = msl_coverage.of_session(session)
    if hasattr(session.config, "workeroutput"):  # one of several processes: the first one adds up what they saw
        session.config.workeroutput[_SEEN] = own
        return
    parts = parts or [own]
    coverage = msl_coverage.measured(parts)
    if coverage is None:
        return
    coverage.write_uncovered()
    whole = any(part["whole"] for part in parts) and not (session.shouldstop or session.shouldfail)
    lines = coverage.lines(table=whole)
    if whole and coverage.share < msl_coverage.MINIMUM:
        lines.append(f"FAILED: that is less than {msl_coverage.MINIMUM:.0%}")
        if session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
    session.config.stash[_COVERAGE] = lines


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_testnodedown(node: Any) -> None:
    """Takes what one of several processes has seen of the shaders."""
    part = getattr(node, "workeroutput", {}).get(_SEEN)
    if part:
        node.config.stash[_PARTS].append(part)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the coverage of the shaders, every reason for which tests were skipped, and how many, none included."""
    coverage = terminalreporter.config.stash.get(_COVERAGE, [])
    if coverage:
        terminalreporter.section("shaders")
    for line in coverage:
        terminalreporter.line(line)
    skipped = terminalreporter.stats.get("skipped", [])
    reasons: dict[str, int] = {}
    for report in skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[reason] = reasons.get(reason, 0) + 1
    terminalreporter.section("skipped tests")
    for reason, count in sorted(reasons.items(), key=lambda item: (-item[1], item[0])):
        terminalreporter.line(f"{count} × {reason.removeprefix('Skipped: ')}")
    terminalreporter.line(f"skipped: {len(skipped)}")
