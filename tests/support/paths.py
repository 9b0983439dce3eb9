# SPDX-License-Identifier: Apache-2.0
"""Where things are in the checkout."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
DATA = TESTS / "data"  # small models and golden values
EMBEDDED = ROOT / "lily" / "models" / "lily-tiny"
