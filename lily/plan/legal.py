# SPDX-License-Identifier: Apache-2.0
"""Legal shapes of kernels: the notation of the kernel table, and the check of every dispatch of a plan.

A plan is built before a device opens, so a model that a device's kernels cannot take is refused there, by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from lily.errors import CheckpointError
from lily.kernels import Kernel
from lily.policy import Policy

# What config.json calls the sizes that the table has short names for.  A broken rule of any other name is Lily's fault.
MODEL_SIZES = {
    "active": "num_experts_per_tok",
    "bits": "the number of bits",
    "dim": "head_dim",
    "dk": "linear_key_head_dim",
    "dk*dv": "linear_key_head_dim x linear_value_head_dim",
    "dv": "linear_value_head_dim",
    "experts": "num_experts",
    "group": "the quantization group",
    "hidden": "hidden_size",
    "hq": "num_attention_heads",
    "hv": "linear_num_value_heads",
    "k": "the input width",
    "ks": "the input width",
    "rot": "the rotary dimension",
    "taps": "linear_conv_kernel_dim",
}


@dataclass(frozen=True)
class Rule:
    """``name`` (of a parameter or constant, or a product of two) relates to numbers, or to another name."""

    name: str
    relation: str
    operands: tuple[str, ...]

    def value(self, values: Mapping[str, float]) -> int:
        """What ``values`` hold for the name."""
        return math.prod(int(values[n]) for n in self.name.split("*"))

    def holds(self, values: Mapping[str, float]) -> bool:
        """Whether ``values`` obey."""
        seen, allowed = self.value(values), [_number(o, values) for o in self.operands]
        if self.relation == "=":
            return seen in allowed
        return seen <= allowed[0] if self.relation == "<=" else seen % allowed[0] == 0

    def allowed(self, values: Mapping[str, float]) -> str:
        """In words, behind "Lily runs"."""
        numbers = [str(_number(o, values)) for o in self.operands]
        if self.relation == "=":
            return " or ".join(filter(None, (", ".join(numbers[:-1]), numbers[-1])))
        return ("up to " if self.relation == "<=" else "multiples of ") + numbers[0]


def _number(operand: str, values: Mapping[str, float]) -> int:
    return int(operand) if operand.isdigit() else int(values[operand])


@cache
def rules(text: str) -> tuple[Rule, ...]:
    """The rules of a row's ``legal`` or ``gpu``."""
    found = []
    for item in text.split():
        m = re.fullmatch(r"([\w*]+?)(<=|=|%)(\w+(?:\|\w+)*)", item)
        if m is None or (m[2] != "=" and "|" in m[3]):
            raise ValueError(f"bad rule {item!r}")
        found.append(Rule(m[1], m[2], tuple(m[3].split("|"))))
    return tuple(found)


def check(kernel: Kernel, values: Mapping[str, float], *, policy: Policy, source: str, label: str) -> None:
    """CheckpointError unless ``kernel`` can run with these parameters and constants on the policy's device."""
    for rule in rules(kernel.legal):
        if not rule.holds(values):
            raise _refusal(kernel, rule, values, source, label, "")
    for rule in rules(kernel.gpu) if policy.gpu else ():
        if not rule.holds(values):
            raise _refusal(kernel, rule, values, source, label, f" on the {policy.device} device; use --device cpu")


def _refusal(
    kernel: Kernel, rule: Rule, values: Mapping[str, float], source: str, label: str, where: str
) -> CheckpointError | ValueError:
    seen, allowed = rule.value(values), rule.allowed(values)
    if rule.name not in MODEL_SIZES:
        return ValueError(f"{kernel.name}: {rule.name} is {seen}, the kernel takes {allowed}")
    of = f" of {label}" if rule.name in ("bits", "group", "k", "ks") else ""
    return CheckpointError(f"{source}: {MODEL_SIZES[rule.name]}{of} is {seen}, Lily runs {allowed}{where}")
