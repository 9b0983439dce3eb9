# SPDX-License-Identifier: Apache-2.0
"""`lily doctor`: does every kernel compute the right thing here, and how fast is it beside what the machine can do?

    report = examine("auto")      # plain data, the document that --json writes
    print(render(report))         # the same for people

machine.py, paths.py say what is here and what is chosen; ``lily/checks`` holds every kernel against a reference;
ceilings.py, measure.py, generation.py measure; examiner.py goes through all of it, examination.py makes one document of
it; report.py makes text of that.
"""

from lily.doctor.examination import SCHEMA, examine
from lily.doctor.report import explanation, render

__all__ = ["SCHEMA", "examine", "explanation", "render"]
