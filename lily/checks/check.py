# SPDX-License-Identifier: Apache-2.0
"""One kernel, two devices, the same inputs: are the results the same?

Integers, bits of ids and places that were not written have to be equal.  A number's error is measured against its own
size or the root mean square of the result, whichever is greater; both the worst and the root mean square of the errors
have a tolerance (``tolerance_of``), which follow from what a device rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lily.checks.cases import ROUNDING_ISAS, Case, numbers
from lily.checks.inputs import make_inputs
from lily.checks.runs import Rig, nbytes, why_no_memory
from lily.checks.values import Array, Value
from lily.errors import DeviceError
from lily.kernels import Arg

# Sums in single precision in another order, and functions that are not correctly rounded: up to 4096 terms, an error of
# 2^-24 at each.  Seen: a tenth of this.
_SINGLE = (5e-5, 1e-5)
# Results stored as bfloat16: half of its last place, 2^-8 of a number; evenly spread, a good half of that.
_STORED = (2.0**-8, 2.0**-9)
# Neighbouring bfloat16 numbers: where k and v are appended, a sum that differs in its last bit may round to the other.
_NEIGHBOURS = (2.0**-7, 2.0**-9)
# Operands of a product rounded to bfloat16: 2^-9 of each of its terms, which add up like noise to the size of the
# result; among a million results the worst lies at five times that.  gate and up are multiplied, hence twice.
_OPERANDS = (16 * 2.0**-9, 3 * 2.0**-9)

Tolerance = tuple[float, float]


@dataclass(frozen=True)
class Result:
    """What became of one case. ``status``: pass, fail, error or skipped."""

    case: Case
    status: str
    text: str = ""  # what went wrong, or why it was skipped
    error: float | None = None  # worst
    error_rms: float | None = None
    tolerance: float = 0.0
    tolerance_rms: float = 0.0
    failed: Rig | None = None  # the device that gave the error

    def document(self) -> dict[str, Any]:
        found = {"status": self.status, "shape": self.case.shape}
        if self.text:
            found["text"] = self.text
        if self.error is None:
            return found
        return {
            **found, "error": _number(self.error), "error_rms": _number(self.error_rms or 0.0),
            "tolerance": self.tolerance, "tolerance_rms": self.tolerance_rms,
        }  # fmt: skip


def check(case: Case, tested: Rig, reference: Rig) -> Result:
    """Runs ``case`` on both; nothing that a device does is raised."""
    too_large = why_no_memory(4 * max(nbytes(case.tested), nbytes(case.reference)))
    if too_large:
        return Result(case, "skipped", too_large)
    inputs = make_inputs(case, tested.policy)
    try:
        want = reference.run(case.reference, inputs)
    except DeviceError as problem:
        return Result(case, "error", f"on the reference device: {problem}", failed=reference)
    try:
        got = tested.run(case.tested, inputs)
    except DeviceError as problem:
        return Result(case, "error", str(problem), failed=tested)
    isa = tested.device.info.get("isa")
    return compare(case, got, want, inputs, lambda arg: tolerance_of(case, arg, tested.policy.act, isa))


def tolerance_of(case: Case, arg: Arg, act: str, isa: object) -> Tolerance:
    """(worst, root mean square) relative error of a written argument that rounding explains.

    ``act``: type of the device's activations; ``isa``: the cpu device's path.
    """
    parts = [_SINGLE]
    if (act == "bf16" and case.tested.kernel.matrix) or (isa in ROUNDING_ISAS and _multiplies_4_bits(case)):
        parts.append(_OPERANDS)
    if act == "bf16" and arg.dtype == "act":
        parts.append(_STORED)
    if arg.dtype == "bf16":
        parts.append(_NEIGHBOURS)
    return sum(p[0] for p in parts), sum(p[1] for p in parts)


def _multiplies_4_bits(case: Case) -> bool:
    widths = numbers(case.tested)
    return any(a.dtype == "q" for a in case.tested.kernel.args) and 4 in (widths["bits"], widths.get("shared_bits"))


def compare(
    case: Case,
    got: Mapping[str, Array],
    want: Mapping[str, Array],
    inputs: Mapping[str, Value],
    tolerance: Callable[[Arg], Tolerance],
) -> Result:
    """Holds written arguments against the reference's; of several, the one nearest to its tolerance counts."""
    closest, result = -1.0, Result(case, "pass")
    for arg in case.tested.kernel.args:
        if not arg.writes:
            continue
        for name, g, w in _columns(arg, got[arg.name], want[arg.name], inputs):
            exact = w.dtype.kind != "f"
            wrong = _first_difference(name, g, w, g != w if exact else np.isnan(g) != np.isnan(w))
            if wrong:
                return Result(case, "fail", wrong)
            if exact:
                continue
            error, rms, at = _errors(g, w)
            most, most_rms = tolerance(arg)
            share = max(error / most, rms / most_rms)
            if share > closest:
                status = "pass" if share <= 1 else "fail"
                text = "" if share <= 1 else f"{name}[{at}] is {g[at]:.6g}, the reference has {w[at]:.6g}"
                closest, result = share, Result(case, status, text, error, rms, most, most_rms)
    return result


def _columns(
    arg: Arg, got: Array, want: Array, inputs: Mapping[str, Value]
) -> Iterator[tuple[str, Array, Array]]:  # fmt: skip
    """The parts of an argument that are compared by themselves, with names."""
    if want.dtype.names:
        for field in want.dtype.names:
            yield f"{arg.name}.{field}", got[field].reshape(-1), want[field].reshape(-1)
    elif arg.name == "best":  # (number, id as bits)
        yield "best", got[0::2], want[0::2]
        yield "best ids", got[1::2].copy().view(np.int32), want[1::2].copy().view(np.int32)
    elif arg.name == "cut":  # counts for what it keeps; several ids may say the same
        yield "kept", _kept(got, inputs["y"]), _kept(want, inputs["y"])
    elif arg.name in ("part_ml", "stats"):  # maxima and sums of exponentials differ in size
        for i in range(2):
            yield f"{arg.name} column {i}", got[i::2], want[i::2]
    else:
        yield arg.name, got, want


def _kept(cut: Array, y: Any) -> Array:
    """Which ids a cut of sample_filter keeps."""
    last = cut[1:].copy().view(np.int32)[0]
    return np.asarray((y > cut[0]) | ((y == cut[0]) & (np.arange(len(y)) <= last)))


def _errors(got: Array, want: Array) -> tuple[float, float, int]:
    """(worst error, root mean square of errors, where the worst is) of two arrays that are NaN in the same places."""
    at = np.flatnonzero(~np.isnan(want))
    if not len(at):
        return 0.0, 0.0, 0
    g, w = got[at].astype(np.float64), want[at].astype(np.float64)
    same = g == w  # infinities too
    finite = np.isfinite(w)
    size = float(np.sqrt(np.mean(w[finite] ** 2))) if finite.any() else 0.0
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        errors = np.where(same, 0.0, np.abs(g - w) / np.maximum(np.abs(w), size))
    errors[~np.isfinite(errors)] = np.inf
    worst = int(errors.argmax())
    return float(errors[worst]), float(np.sqrt(np.mean(errors**2))), int(at[worst])


def _first_difference(name: str, got: Array, want: Array, differs: Array) -> str:
    if not differs.any():
        return ""
    at = int(differs.argmax())
    return f"{name}[{at}] is {got[at]}, the reference has {want[at]} ({int(differs.sum())} of {got.size} differ)"


def _number(value: float) -> float | str:
    """For JSON, which has no infinity."""
    return value if np.isfinite(value) else "infinite"
