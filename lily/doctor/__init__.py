# SPDX-License-Identifier: Apache-2.0
"""Does every kernel compute the right thing here, and how fast is it? ``lily doctor`` (README.md).

report = examine("auto")      # plain data, the document that --json writes
print(render(report))         # the same for people
"""

from __future__ import annotations

from lily.doctor.examination import SCHEMA, examine
from lily.doctor.report import explanation, render

__all__ = ["SCHEMA", "examine", "explanation", "render"]
