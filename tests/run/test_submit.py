# SPDX-License-Identifier: Apache-2.0
"""The host's loop around decode, without a device.

Not handled: what runs on devices (tests of the engine).
"""

from __future__ import annotations

import subprocess
import sys

# The pipeline calls the device's functions with the device first: abs(ETIMEOUT) says for ever that time is up.
WAITING = """
import ctypes, signal
from lily.device.device import ETIMEOUT
from lily.run._submit import DecodePipeline

def interrupt(*_):
    raise KeyboardInterrupt

never = ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p).value
pipeline = DecodePipeline(ETIMEOUT, never, never, 0, 64, 1)
pipeline.begin([1], [1], 0, 1, 0, 1)
pipeline.adopt(1)
signal.signal(signal.SIGALRM, interrupt)
signal.setitimer(signal.ITIMER_REAL, 0.05)
try:
    pipeline.next()
except KeyboardInterrupt:
    print("interrupted")
"""


def test_a_signal_breaks_into_a_step_that_does_not_end() -> None:
    done = subprocess.run([sys.executable, "-c", WAITING], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr
