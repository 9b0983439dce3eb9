# SPDX-License-Identifier: Apache-2.0
"""The test suite itself: it skips with one line a lack, draws the same in every run, and runs in any order.

Not handled: whether single tests keep to that; whole runs in random order, under nohup and on one core show it.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from msl_compiler import MISSING, compiler
from published import publish, publishing

from lily.sampling import SamplingParams


def run_pytest(
    repository: Path, *arguments: str, path: str | None = None, prefix: tuple[str, ...] = ()
) -> tuple[int, str]:
    """Exit status and output of pytest on other tests."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("LILY_", "PYTEST_"))}
    environment = {**kept, "PYTHONPATH": str(repository), **({} if path is None else {"PATH": path})}
    command = [*prefix, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac lacks other things")
def test_what_a_machine_lacks_is_said_once_with_its_remedy(repository: Path, tmp_path: Path) -> None:
    files = ["tests/shim/test_metal_shim_lists.py", "tests/cpu/test_cpu_norm.py"]
    status, out = run_pytest(repository, *files, path=str(tmp_path))
    assert status == 0, out
    lines = out.partition(" skipped tests ")[2].splitlines()[1:]
    reasons = [re.sub(r"^\d+ × ", "", line) for line in lines if " × " in line]
    assert [reason.partition(";")[0] for reason in reasons] == [
        "no qemu-aarch64, which runs the NEON kernels",
        "no clang or no GNUstep, on which the shim runs",
    ]
    assert all("; remedy: " in reason for reason in reasons)


def test_tests_receive_interrupts_that_the_parent_ignores(repository: Path) -> None:
    ignoring = ("/bin/sh", "-c", 'trap "" INT; exec "$@"', "sh")
    test = "tests/cli/test_cli.py::test_an_interrupt_ends_generate_with_130"
    status, out = run_pytest(repository, test, prefix=ignoring)
    assert (status, "1 passed" in out) == (0, True), out[-2000:]


def test_requests_without_a_seed_draw_the_same_in_every_run(request: pytest.FixtureRequest) -> None:
    draws = random.Random(request.node.nodeid)
    want = [int.from_bytes(draws.randbytes(8), "little") >> 1 for _ in range(2)]
    assert [SamplingParams().with_seed().seed for _ in range(2)] == want


def test_a_seed_chooses_an_order_that_can_be_had_again(repository: Path) -> None:
    def order(*options: str) -> list[str]:
        status, out = run_pytest(repository, "--collect-only", "tests/project/test_setup_script.py", *options)
        assert status == 0, out
        return re.findall(r"^tests/\S+::.*", out, re.MULTILINE)

    def of_make(*variables: str) -> list[str]:
        # Not as a part of the make that runs the tests, with its variables.
        outer = {"MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "MFLAGS", "ORDER", "SEED"}
        environment = {k: v for k, v in os.environ.items() if k not in outer}
        command = ["make", "-n", "test", *variables]
        said = subprocess.check_output(command, cwd=repository, env=environment, text=True)
        return said.splitlines()[-1].partition("--dist loadfile")[2].split()

    assert of_make() == []
    shuffled = of_make("ORDER=random", "SEED=7")
    plain, first, again = order(), order(*shuffled), order(*shuffled)
    assert first == again
    assert first != plain
    assert sorted(first) == sorted(plain)


@pytest.mark.skipif(compiler() is None, reason=MISSING)
def test_several_processes_cover_what_one_covers(repository: Path) -> None:
    def of(*options: str) -> list[str]:
        files = ["tests/shaders/test_shaders_probe.py", "tests/shaders/test_shaders_route.py"]
        status, out = run_pytest(repository, *files, *options)
        assert status == 0, out
        return re.findall(r"^(line coverage of shaders/: .*?;|\d+ passed)", out, re.MULTILINE)

    one = of("-n", "0")
    assert len(one) == 2
    assert of("-n", "2", "--dist", "loadfile") == one


def test_a_file_of_the_build_folder_appears_whole(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "header.h"
    publish(file, "one")
    first = file.open()  # as a compiler that reads it
    assert publish(file, "one").stat().st_ino == os.fstat(first.fileno()).st_ino
    assert publish(file, "two").read_text() == "two"
    assert first.read() == "one"
    first.close()
    assert [path.name for path in file.parent.iterdir()] == ["header.h"]


def test_of_two_that_fill_a_folder_the_first_counts(tmp_path: Path) -> None:
    for text in ("first", "second"):
        with publishing(tmp_path / "folder") as part:
            (part / "file").write_text(text)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert (tmp_path / "folder" / "file").read_text() == "first"
