# SPDX-License-Identifier: Apache-2.0
"""The document of ``examine`` as text for people: tables, what failed and what to do, and what each figure means."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill
from typing import Any

from lily.units import gb

_NOTES = (
    """check: the kernel's results beside the reference's on the same inputs. error: the worst difference, relative
    to the number or to the root mean square of the result, whichever is greater; tolerance: what rounding explains.
    The root mean square of the differences has a tolerance too (--json). Integers, and places that must not be
    written, have to be equal.""",
    """time: of one dispatch at the measured shape, by the device's clock: the median of at least 3 lists of 1 to
    256 dispatches, a barrier before each included. Large arguments are another copy each time, so that no cache
    has them.""",
    """rate: GB/s are the bytes that the plan says are read and written, each once (10^9 bytes), over the time.
    TFLOP/s count two operations for a multiply-accumulate and none for dequantisation. Kernels bound by the
    start of a dispatch, or by arithmetic that the matrix unit does not do, have no rate.""",
    """share: of the ceiling in its better measurement, before and after the kernels. GB/s are held against `read`,
    TFLOP/s against `matrix`. More than 100 %: a cache helped, or something else used the machine while the
    ceiling was measured.""",
    """ceilings: read is one pass over the arena, added up; copy counts bytes read and bytes written; matrix is
    products of 64 by 64 by 64 whose operands are in registers or next to them, on the unit that the kernels
    use. level: a dispatch among 256 that wait for each other; dispatch: the same without barriers; submit: from
    the call until a list of one dispatch is reported done.""",
    """embedded model: greedy replies to prompts of 16 tokens, as the caller of a stream sees them; medians of 3,
    after rest of 2. The model is small: its figures say what a token costs besides reading weights, not how
    fast a large model is.""",
)


def render(document: dict[str, Any]) -> str:
    """The whole report; ends with a line break."""
    parts = [_machine(document["machine"]), _device(document)]
    if document.get("kernels"):
        parts.append(_kernels(document))
    if document.get("ceilings"):
        parts.append(_ceilings(document["ceilings"]))
    if document.get("generation"):
        parts.append(_generation(document["generation"]))
    parts.append(_problems(document))
    if document.get("kernels"):
        parts.append(["What the figures mean: lily doctor --explain"])
    lines = [line for part in parts for line in [*part, ""]]
    return "\n".join(lines)


def explanation(width: int) -> str:
    """What the figures of a report mean, in lines of at most ``width`` characters."""
    notes = (fill(" ".join(n.split()), width, initial_indent="  ", subsequent_indent="    ") for n in _NOTES)
    return "\n".join(["What the figures mean", *notes]) + "\n"


def _machine(m: dict[str, Any]) -> list[str]:
    cores = f"{m['processors']} processors, {m['usable_processors']} usable"
    if m.get("performance_cores"):
        cores = f"{m['performance_cores']} performance and {m.get('efficiency_cores') or 0} efficiency cores"
    build = f" ({m['system_build']})" if m.get("system_build") else ""
    lines = [
        f"Lily {m['lily']}, kernel table {m['kernel_table']}, {m['python']}",
        f"{m['system']} {m['system_version']}{build}, {m['architecture']}",
        f"{m.get('chip') or 'unknown processor'}{', ' + m['model'] if m.get('model') else ''}: {cores}",
        f"memory {gb(m['memory_bytes'])}, available {gb(m['available_bytes'])}; load average {m['load_average']}",
    ]
    if m["load_average"] > m["usable_processors"]:
        lines.append("the machine is busy with other work: figures are lower than they could be, and unsteady")
    if m.get("rosetta"):
        lines.append("Python runs under Rosetta: install one for arm64")
    if m.get("virtual_machine"):
        lines.append("macOS runs in a virtual machine: figures are not those of the Mac")
    return ["Machine", *(f"  {line}" for line in lines)]


def _device(document: dict[str, Any]) -> list[str]:
    d = document.get("device")
    if d is None:
        return ["Device", "  none: Lily is not built here"]
    lines = [f"{d['name']}: {d['why']}"]
    lines += [f"{name}={value} is set" for name, value in d["environment"].items()]
    lines += [
        f"{way['what']}: {way['value']}" + (f" ({way['why']})" if way["why"] else "") for way in d.get("ways", ())
    ]
    if "tensor_check" in d:
        lines.append(f"check of tensor operations: {d['tensor_check']}")
    if d.get("library"):
        lines.append(f"library {d['library']}, interface {d['abi']}")
    if "error" in d:
        lines.append(("stopped: " if d.get("opened") else "cannot be opened: ") + d["error"])
    reference = document.get("reference")
    if reference:
        lines.append(f"reference: cpu device, path {reference['isa']}, {reference['threads']} threads")
    return ["Device", *(f"  {line}" for line in lines)]


def _kernels(document: dict[str, Any]) -> list[str]:
    sizes = list(dict.fromkeys(size for row in document["kernels"] for size in row["checks"]))
    head = ["kernel", *(f"{size} shape" for size in sizes), "error", "tolerance"]
    timed = any("rate" in row for row in document["kernels"])
    if timed:
        head += ["measured shape", "time", "rate", "share"]
    table = [head]
    for row in document["kernels"]:
        name = f"{row['kernel']} ({row['variant']})" if row["variant"] else row["kernel"]
        checks = [row["checks"].get(size, {}) for size in sizes]
        line = [name, *map(_status, checks), *_errors(checks)]
        table.append(line + (_rate(row.get("rate", {})) if timed else []))
    counts: dict[str, int] = {}
    for row in document["kernels"]:
        for c in row["checks"].values():
            counts[c["status"]] = counts.get(c["status"], 0) + 1
    said = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    return ["Kernels", *(f"  {line}" for line in _columns(table)), f"  checks: {said}", *_skipped(document["kernels"])]


def _status(check: dict[str, Any]) -> str:
    status: str = check.get("status", "")
    return status.upper() if status in ("fail", "error") else status


def _errors(checks: Sequence[dict[str, Any]]) -> list[str]:
    """Error and tolerance of the check that comes nearest to its tolerance."""
    known = [c for c in checks if isinstance(c.get("error"), float)]
    if not known:
        exact = any(c.get("status") == "pass" for c in checks)
        return ["0" if exact else "", "0" if exact else ""]
    worst = max(known, key=lambda c: c["error"] / c["tolerance"])
    return [f"{worst['error']:.1e}" if worst["error"] else "0", f"{worst['tolerance']:.1e}"]


def _rate(rate: dict[str, Any]) -> list[str]:
    if rate.get("status") != "measured":
        return ["", rate.get("status", ""), "", ""]
    value = ""
    if "flop_per_s" in rate:
        value = f"{rate['flop_per_s'] / 1e12:.3f} TFLOP/s"
    elif "bytes_per_s" in rate:
        value = f"{rate['bytes_per_s'] / 1e9:.1f} GB/s"
    share = f"{rate['share']:.0%}" if rate.get("share") else ""
    return [rate["shape"], _time(rate["seconds"]), value, share]


def _skipped(rows: Sequence[dict[str, Any]]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for row in rows:
        for item in (*row["checks"].values(), row.get("rate", {})):
            if item.get("status") == "skipped":
                names = reasons.setdefault(item["text"], [])
                if row["kernel"] not in names:
                    names.append(row["kernel"])
    return [f"  skipped: {text}: {', '.join(names)}" for text, names in reasons.items()]


def _ceilings(found: dict[str, Any]) -> list[str]:
    before, after = found["before"], found["after"]
    table = [["ceiling", "before", "after"]]
    for name, key, scale, unit in (
        ("read", "read_bytes_per_s", 1e9, "GB/s"), ("copy", "copy_bytes_per_s", 1e9, "GB/s"),
        ("matrix", "matrix_flop_per_s", 1e12, "TFLOP/s"),
    ):  # fmt: skip
        values = [f"{v[key] / scale:.4g} {unit}" if v[key] else "not measured" for v in (before, after)]
        table.append([name, *values])
    for name, key in (("level", "level_s"), ("dispatch", "dispatch_s"), ("submit", "submit_s")):
        table.append([name, *(_time(v[key]) if v[key] else "not measured" for v in (before, after))])
    return [f"Ceilings, measured over {gb(before['arena_bytes'])}", *(f"  {line}" for line in _columns(table))]


def _generation(g: dict[str, Any]) -> list[str]:
    if "error" in g:
        return ["Embedded model", f"  failed: {g['error']}"]
    return [
        f"Embedded model ({g['model']})",
        f"  {g['tokens_per_s']:.1f} tokens/s, {_time(g['token_s'])} a token; loaded in {g['load_s']:.2f} s",
        f"  first token {_time(g['first_token_s'])} after the request; after {g['rest_s']:.0f} s of rest "
        f"{_time(g['first_token_after_rest_s'])}, then {_time(g['token_after_rest_s'])} a token",
    ]


def _problems(document: dict[str, Any]) -> list[str]:
    if document["ok"]:
        what = "every check passed" if document.get("kernels") else "nothing was checked"
        return [f"No problem found: {what} ({document['seconds']} s)"]
    lines = []
    for problem in document["problems"]:
        lines += [f"  {problem['what']}: {problem['text']}", f"    -> {problem['remedy']}"]
    return [f"Problems ({document['seconds']} s)", *lines]


def _columns(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]


def _time(seconds: float) -> str:
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= scale:
            return f"{seconds / scale:.2f} {unit}"
    return f"{seconds * 1e9:.0f} ns"
