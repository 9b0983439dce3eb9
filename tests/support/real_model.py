# SPDX-License-Identifier: Apache-2.0
"""The 35B model's sizes; the checks have its shapes in two layers."""

from __future__ import annotations

from dataclasses import replace

from lily.checks.cases import REAL

_LINEAR, _FULL = REAL.layer_types
WHOLE = replace(REAL, num_layers=40, layer_types=(_LINEAR, _LINEAR, _LINEAR, _FULL) * 10)
