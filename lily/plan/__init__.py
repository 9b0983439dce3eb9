# SPDX-License-Identifier: Apache-2.0
"""The plan: one readable forward pass per phase, scheduled into levels with barriers, as pure data (README.md)."""

from __future__ import annotations

from lily.plan.builder import Builder
from lily.plan.decode import decode_plan
from lily.plan.every import every_plan
from lily.plan.prefill import prefill_plan
from lily.plan.sample import sample_plan
from lily.plan.views import Dispatch, Plan, View

__all__ = ["Builder", "Dispatch", "Plan", "View", "decode_plan", "every_plan", "prefill_plan", "sample_plan"]
