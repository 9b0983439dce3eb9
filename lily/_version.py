# SPDX-License-Identifier: Apache-2.0
"""The one place that holds the version."""

from __future__ import annotations

__version__ = "0.1.0"
