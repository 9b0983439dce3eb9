# SPDX-License-Identifier: Apache-2.0
"""The shaders keep the rules for shaders; the rules find what breaks them, and only that."""

from __future__ import annotations

import re
from math import prod
from pathlib import Path

import pytest
from msl_build import shader_source
from msl_harness import needs_clang
from msl_lint import lint
from msl_spaces import space_errors
from msl_survey import survey

from lily.kernels import KERNELS

BAD = Path(__file__).parent / "bad"
VERSIONS = [320, 400]


def _check_against_comments(name: str, findings: list[str]) -> None:
    """Every finding stands on a line whose comment quotes it, and every such line has a finding."""
    lines = (BAD / name).read_text().splitlines()
    wanted = {n: m[1].strip() for n, line in enumerate(lines, 1) if (m := re.search(r"\S.*// (.+)$", line))}
    found: dict[int, list[str]] = {}
    for finding in findings:
        place, message = finding.split(": ", 1)
        found.setdefault(int(place.rsplit(":", 1)[1]), []).append(message)
    for n, words in wanted.items():
        assert any(words in message for message in found.get(n, [])), f"line {n}: {lines[n - 1]!r} got {found.get(n)}"
    unexpected = {n: m for n, m in found.items() if n not in wanted}
    assert not unexpected, "\n".join(f"{n}: {lines[n - 1].strip()}  {m}" for n, m in unexpected.items())


def test_rules_find_what_breaks_them_and_nothing_else() -> None:
    _check_against_comments("rules.metal", lint((BAD / "rules.metal").read_text()))


@needs_clang
def test_wrong_types_and_address_spaces_are_found_and_right_ones_pass() -> None:
    _check_against_comments("spaces.metal", space_errors((BAD / "spaces.metal").read_text()))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("act", ["bf16", "f32"])
def test_shaders_keep_the_rules(version: int, act: str) -> None:
    assert lint(shader_source(act), version) == []


@needs_clang
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("act", ["bf16", "f32"])
def test_shaders_keep_types_and_address_spaces(version: int, act: str) -> None:
    assert space_errors(shader_source(act), version) == []


@pytest.mark.parametrize("version", VERSIONS)
def test_kernels_are_those_of_the_kernel_table(version: int) -> None:
    names = {f.name for f in survey(shader_source(), version).functions if f.is_kernel}
    assert names - set(KERNELS) == set()
    assert {k.name for k in KERNELS.values() if k.ablation is None} - names == set()


def test_kernels_declare_the_threads_that_the_kernel_table_allows() -> None:
    """A larger group than declared is an error at launch; a kernel that declares none may have what the GPU gives."""
    source = shader_source()
    values = dict(re.findall(r"constant constexpr uint (\w+) = ([^;]+);", source))

    def value(text: str) -> int:
        factors = [f.strip() for f in text.split("*")]
        return prod(int(f) if f.isdigit() else value(values[f]) for f in factors)

    pairs = re.findall(r"max_total_threads_per_threadgroup\((\w+)\)\]\]\s*void\s+(\w+)", source)
    declared = {name: value(text) for text, name in pairs}
    by_policy = {name: k.max_threads for name, k in KERNELS.items() if not k.threads}
    assert by_policy == {name: declared.get(name, 1024) for name in by_policy}
    assert {name for name, most in declared.items() if most < KERNELS[name].threads} == set()
    assert {k.name for k in KERNELS.values() if k.matrix or k.threads == 1024} <= set(declared)
