# SPDX-License-Identifier: Apache-2.0
"""How fast a kernel is at the real model's shapes, beside the ceiling that binds it.

A list of one kernel many times, a barrier before each; large arguments are another copy each time, so that they come
from memory and not from a cache.  Bytes are those of the plan, each once.  Products of many rows are held against the
matrix ceiling, everything else that moves enough against the read ceiling.
Not handled: what overlaps in a whole plan (generation.py); kernels bound by scalar arithmetic, which get no share.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lily.checks.cases import Case, numbers
from lily.checks.inputs import make_inputs
from lily.checks.runs import Rig, nbytes, why_no_memory
from lily.checks.values import Array, encoded
from lily.doctor import ceilings
from lily.doctor.ceilings import device_seconds, median_seconds
from lily.errors import DeviceError

_LARGE = 256 << 10  # bytes of an argument that a cache might hold from one dispatch to the next
_COPIES = 256
_REPEATS = 32  # of a kernel without large arguments
_CHOOSES = {"moe_gate_up": "logits", "moe_gemv": "ids", "moe_down": "ids"}  # the argument that chooses the experts
# Bound by arithmetic or by one group, or the plan counts more bytes than they touch.
_TIMED = frozenset(
    ("gdn_scan", "gdn_scan_blocked", "gdn_conv", "route_group", "sample_filter", "top_logprobs", "last_row", "advance")
)


def measure(case: Case, rig: Rig) -> dict[str, Any]:
    """Seconds of a dispatch, bytes or operations a second, and which ceiling binds it: memory, matrix, or none."""
    too_large = why_no_memory(3 * nbytes(case.tested) + 2 * ceilings.ARENA)
    if too_large:
        return {"status": "skipped", "text": too_large}
    try:
        seconds = _seconds(case, rig)
    except DeviceError as problem:
        return {"status": "error", "text": str(problem)}
    return {"status": "measured", "shape": case.shape, "seconds": seconds, **_rates(case, rig, seconds)}


def operations(case: Case) -> int:
    """Floating-point operations of products of many rows; 0 for other kernels."""
    p, rows = numbers(case.tested), case.rows
    if case.kernel == "attn_prefill":
        return int(4 * p["hq"] * p["dim"] * sum(case.position + m + 1 for m in range(rows)))
    if not case.tested.kernel.matrix and case.kernel != "gemm_f32":
        return 0
    matrices = 2 if case.kernel in ("gemm_swiglu", "moe_gemm_gate_up") else 1
    return int(2 * rows * p.get("active", 1) * matrices * p["n"] * p["k"])


def share(rate: dict[str, Any], used: dict[str, Any]) -> float | None:
    """Of a measured rate in the ceiling that binds it."""
    keys = {"memory": ("bytes_per_s", "read_bytes_per_s"), "matrix": ("flop_per_s", "matrix_flop_per_s")}
    if rate.get("bound") not in keys:
        return None
    value, ceiling = keys[rate["bound"]]
    return float(rate[value] / used[ceiling]) if used[ceiling] else None


def _rates(case: Case, rig: Rig, seconds: float) -> dict[str, Any]:
    work = operations(case)
    if work:
        # Other products are done in float32 on the cpu device, and the router's everywhere.
        unit = case.kernel != "gemm_f32" and (rig.policy.act == "bf16" or numbers(case.tested).get("bits") == 4)
        return {"bound": "matrix" if unit else "arithmetic", "flop_per_s": work / seconds}
    moved = case.tested.bytes_read + case.tested.bytes_written
    if case.kernel in _TIMED or moved < _LARGE:
        return {"bound": "start" if moved < _LARGE else "arithmetic"}
    return {"bound": "memory", "bytes": moved, "bytes_per_s": moved / seconds}


def _seconds(case: Case, rig: Rig) -> float:
    first = encoded(case.tested, make_inputs(case, rig.policy), rig.policy)
    contents = [first]
    repeats = 1 if operations(case) else _repeats(case)
    for i in range(1, repeats):
        contents.append(_varied(case, rig, first, i))
    with rig.recorded([case.tested] * repeats, contents) as (item, _):
        return median_seconds(device_seconds(rig, item)) / repeats


def _repeats(case: Case) -> int:
    """As many copies as the arena has room for; experts that are chosen anew need no copy."""
    large = sum(v.nbytes for v in case.tested.views if v.nbytes >= _LARGE)
    return _REPEATS if case.kernel in _CHOOSES or not large else max(1, min(_COPIES, ceilings.ARENA // large))


def _varied(case: Case, rig: Rig, first: dict[str, Array], turn: int) -> dict[str, Array]:
    """The arguments of dispatch ``turn``: large ones in memory of their own, other experts."""
    chooses = _CHOOSES.get(case.kernel)
    out = dict(first)
    for arg, view in zip(case.tested.kernel.args, case.tested.views, strict=True):
        if arg.name == chooses:
            out[arg.name] = first[arg.name].copy()
            _choose_others(out[arg.name], turn, case)
        elif view.nbytes >= _LARGE and not chooses:
            out[arg.name] = first[arg.name].view()
    return out


def _choose_others(raw: Array, turn: int, case: Case) -> None:
    """Logits turned by a few places, or ids counted on: experts that the turn before did not have."""
    experts, active = case.config.num_experts, case.config.experts_per_token
    if case.kernel == "moe_gate_up":
        logits = raw.view(np.float32)
        logits[:experts] = np.random.default_rng(turn).permutation(logits[:experts])
    else:
        ids = raw.view(np.int32)
        ids[:] = (np.arange(len(ids)) + turn * active) % experts
