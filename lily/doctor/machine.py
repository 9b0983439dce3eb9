# SPDX-License-Identifier: Apache-2.0
"""What this machine and this build of Lily are, without anything that names their owner.

Nothing here needs a device or a compiled module.
Not handled: the GPU, which only its device library knows (paths.py).
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

from lily._version import __version__
from lily.device import sysctl
from lily.device.host_memory import available_bytes
from lily.kernels import c_header

_CPUINFO = Path("/proc/cpuinfo")
_HOMES = re.compile(r"(?:/Users|/home)/[^/\s\"']+")


def machine() -> dict[str, Any]:
    """Operating system, processor, memory, Python, Lily; None for what cannot be found out."""
    return {
        **(_macos() if sys.platform == "darwin" else _other()),
        "architecture": platform.machine(),
        "processors": os.cpu_count(),
        "usable_processors": _usable(),
        "load_average": round(os.getloadavg()[0], 2),
        "available_bytes": available_bytes(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "lily": __version__,
        "kernel_table": fingerprint(c_header()),
    }


def fingerprint(text: str) -> str:
    """Twelve hexadecimal digits that tell one version of a text from another."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def scrub(value: Any) -> Any:
    """``value`` with every home folder in its texts replaced by ``~``."""
    if isinstance(value, str):
        home = os.path.expanduser("~")  # "~" itself for a user without a home
        return _HOMES.sub("~", value.replace(home, "~") if len(home) > 1 else value)
    if isinstance(value, dict):
        return {key: scrub(item) for key, item in value.items()}
    return [scrub(item) for item in value] if isinstance(value, list | tuple) else value


def _macos() -> dict[str, Any]:
    cores = [sysctl.number(f"hw.perflevel{i}.logicalcpu") for i in range(2)]
    return {
        "system": "macOS",
        "system_version": platform.mac_ver()[0] or None,
        "system_build": sysctl.text("kern.osversion"),
        "model": sysctl.text("hw.model"),
        "chip": sysctl.text("machdep.cpu.brand_string"),
        "performance_cores": cores[0],
        "efficiency_cores": cores[1],
        "memory_bytes": sysctl.number("hw.memsize"),
        "rosetta": sysctl.number("sysctl.proc_translated") == 1,
        "virtual_machine": sysctl.number("kern.hv_vmm_present") == 1,
    }


def _other() -> dict[str, Any]:
    return {
        "system": platform.system(),
        "system_version": platform.release(),
        "chip": _processor_name(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def _processor_name() -> str | None:
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith(("model name", "Model")):
            return " ".join(line.partition(":")[2].split()) or None
    return platform.processor() or None


def _usable() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
