# SPDX-License-Identifier: Apache-2.0
"""``python -m lily`` is the ``lily`` command."""

from __future__ import annotations

from lily.cli import main

if __name__ == "__main__":
    main()
