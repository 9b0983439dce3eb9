# SPDX-License-Identifier: Apache-2.0
"""The coverage of the shaders: its share, what it prints, and which sessions it is held to.

Not handled: how a kernel counts its lines (test_msl_emulator.py).
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msl_coverage import TESTS, Coverage, all_lines, is_whole, measured

HALF = Coverage({"a.metal": {1, 2, 3}, "b.h": {7}}, {"a.metal": {2}, "b.h": {7}})


def test_share_counts_lines_of_all_files() -> None:
    assert HALF.share == 0.5


def test_summary_names_the_share_and_with_the_table_each_file() -> None:
    head, *files = HALF.lines(table=True)
    assert head.startswith("line coverage of shaders/: 50.0% (2 of 4;")
    assert [" ".join(line.split()) for line in files] == ["33.3% 1 of 3 a.metal", "100.0% 1 of 1 b.h"]
    assert HALF.lines(table=False) == [head]


def test_what_several_processes_saw_is_added_up() -> None:
    lines = sorted(all_lines()["gdn.metal"])
    first, second = lines[:3], lines[2:5]
    others = {"gdn.metal": second, "a test's own": [1]}
    both = measured([{"ran": {"gdn.metal": first}, "whole": True}, {"ran": others, "whole": True}])
    assert both is not None
    assert {file: ran for file, ran in both.ran.items() if ran} == {"gdn.metal": set(lines[:5])}
    assert both.wanted["gdn.metal"] == set(lines)


def _session(left_out: str = "", args: tuple[str, ...] = ("tests",), stop: str = "", **options: Any) -> Any:
    files = [p for p in TESTS.rglob("test_*.py") if p.name != left_out]
    config = SimpleNamespace(
        args=list(args), getoption=lambda name, default: options.get(name, default),
        invocation_params=SimpleNamespace(dir=TESTS.parent),
    )  # fmt: skip
    items = [SimpleNamespace(path=Path(p)) for p in files]
    return SimpleNamespace(config=config, items=items, shouldstop=stop, shouldfail="")


@pytest.mark.parametrize(
    ("changes", "whole"),
    [
        ({}, True),
        ({"left_out": "test_cli.py"}, True),
        ({"left_out": "test_shaders_gemm.py"}, False),
        ({"left_out": "test_emulated_models.py"}, False),
        ({"markexpr": "not full"}, True),
        ({"markexpr": "full"}, False),
        ({"keyword": "gemm"}, False),
        ({"deselect": ["tests/shaders/test_shaders_gemm.py::test_x"]}, False),
        ({"args": ("tests/shaders/test_shaders_gemm.py",)}, False),
        ({"stop": "stopping after 1 failures"}, False),
    ],
    ids=str,
)
def test_only_a_run_of_all_shader_tests_is_held_to_the_minimum(changes: dict[str, Any], whole: bool) -> None:
    assert is_whole(_session(**changes)) is whole
