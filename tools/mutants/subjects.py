# SPDX-License-Identifier: Apache-2.0
"""What faults are planted in: the files of a subject, how many faults are drawn there, which tests should notice.

A run of pytest is a line as a shell would take it: variables first, then pytest's arguments. Runs come in order, and
the first that fails ends the matter; so the quick ones come first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from tools.mutants.change import ROOT


@dataclass(frozen=True)
class Subject:
    """``tests``: a pattern of file names, or of paths if it has a slash, → runs of pytest; the first match counts."""

    name: str
    files: tuple[str, ...]
    drawn: int
    tests: Mapping[str, tuple[str, ...]]
    operators: tuple[str, ...] = ("comparison", "off-by-one", "statement")
    left_out: tuple[str, ...] = field(default=())

    def sources(self, root: Path = ROOT) -> Iterator[str]:
        """Its files, relative to the checkout, in order."""
        found = {path.relative_to(root).as_posix() for pattern in self.files for path in root.glob(pattern)}
        for file in sorted(found):
            if not any(_fits(file, pattern) for pattern in self.left_out):
                yield file

    def tests_of(self, file: str) -> tuple[str, ...]:
        """The runs of pytest that should notice a fault in ``file``."""
        return next((runs for pattern, runs in self.tests.items() if _fits(file, pattern)), ())


def _fits(file: str, pattern: str) -> bool:
    return fnmatch(file if "/" in pattern else file.rpartition("/")[2], pattern)


# Tests of engines on the cpu device, without those that take long and look at what others show as well.
_SLOW = "-k 'not (memory_is_flat or stop_strings_anywhere or interrupts_at or instruction_sets or held_out_text)'"


def _engine(*names: str, before: str = "", without: str = _SLOW) -> str:
    """One run of several files: each start of pytest costs as much as a hundred quick tests."""
    files = [f"tests/engine/test_{name}.py" for name in names]
    return " ".join(filter(None, ["LILY_DEVICE=cpu", before, *files, without]))


def _server(*names: str) -> tuple[str, ...]:
    return (" ".join(f"tests/server/test_server_{name}.py" for name in names),)


_METAL_FAULTS = "LILY_DEVICE=metal tests/engine/test_engine_faults.py"
_SHIM = (
    "tests/shim/test_metal_shim_failures.py tests/shim/test_metal_shim_lists.py tests/shim/test_metal_shim_open.py "
    "tests/shim/test_metal_shim_kernels.py tests/shim/test_metal_shim_memory.py tests/shim/test_metal_replay.py",
    "tests/shim/test_metal_replay_engine.py",
)


def _kernels(*files: str) -> tuple[str, ...]:
    return tuple(f"tests/{file}" for file in files)


_EXACT, _GOLDEN, _API, _CHAT = "engine_exact", "engine_golden", "engine_api", "engine_chat"
_LIMITS, _SAMPLING, _SESSIONS, _ABLATIONS = "engine_limits", "engine_sampling", "engine_sessions", "ablations"
_PARALLEL, _SAVED = "engine_parallel", "engine_saved"

SUBJECTS = (
    Subject(
        "text", ("lily/text/*.py",), 15,
        {
            "stops.py": ("tests/text/test_stops.py",),
            "detokenizer.py": ("tests/text/test_detokenizer.py",),
            "tokenizer.py": ("tests/text/test_tokenizer.py", "tests/text/test_detokenizer.py"),
            "template*.py": ("tests/text/test_template.py tests/text/test_messages.py",),
            "sandbox.py": ("tests/text/test_sandbox.py",),
            "reply_parts.py": ("tests/text/test_reply_parts.py tests/engine/test_reply_text.py",),
            "call_*.py": ("tests/text/test_call_arguments.py tests/text/test_reply_parts.py",),
            "*": ("tests/text",),
        },
    ),
    Subject(
        "checkpoint", ("lily/checkpoint/*.py", "lily/device/weights.py", "lily/device/_pack.pyx"), 10,
        {
            "weights.py": ("tests/device/test_weights.py",),
            "_pack.pyx": ("tests/device/test_weights.py",),
            "hub.py": ("tests/checkpoint/test_hub.py",),
            "resolve.py": ("tests/checkpoint/test_resolve.py tests/checkpoint/test_hub.py",),
            "*": ("tests/checkpoint tests/device/test_weights.py",),
        },
    ),
    Subject(
        "plan", ("lily/plan/*.py", "lily/policy.py", "lily/run/budget.py", "lily/run/chunks.py"), 11,
        {
            "budget.py": (_engine(_LIMITS, before="tests/plan"),),
            "ablations.py": ("tests/plan", _engine(_ABLATIONS)),
            "expanded.py": ("tests/plan", _engine(_ABLATIONS)),
            "*": ("tests/plan tests/run", _engine(_LIMITS, _GOLDEN, _EXACT)),
        },
    ),
    Subject(
        "runner",
        (
            "lily/run/*.py", "lily/run/*.pyx", "lily/engine.py", "lily/reply_text.py", "lily/streaming.py",
            "lily/session.py", "lily/private_files.py",
        ), 34,
        {
            "_routing.pyx": ("tests/run",),
            "_schedule.pyx": ("tests/run/test_schedule.py tests/run/test_scheduler.py", _engine(_PARALLEL, _API)),
            "host_steps.py": (_engine(_ABLATIONS, before="tests/run"),),
            "scheduler.py": ("tests/run/test_scheduler.py", _engine(_PARALLEL, _API, _LIMITS)),
            "requests.py": ("tests/run/test_scheduler.py", _engine(_PARALLEL, _API)),
            "residents.py": ("tests/run/test_residents.py", _engine(_PARALLEL)),
            "saved.py": ("tests/run/test_saved.py", _engine(_SAVED)),
            "shelf.py": ("tests/run/test_shelf.py", _engine(_SAVED)),
            "identity.py": (_engine(_SAVED, before="tests/run/test_saved.py"),),
            "private_files.py": ("tests/run/test_saved.py tests/run/test_shelf.py tests/engine/test_tune.py",),
            "session.py": (_engine(_SESSIONS, _CHAT, _API),),
            "reply_text.py": (_engine("reply_text", _CHAT, _API),),
            "*": (_engine(_API, _LIMITS, _SAMPLING, _EXACT, _SESSIONS, _PARALLEL, before="tests/run"), _METAL_FAULTS),
        },
        left_out=("lily/run/budget.py", "lily/run/chunks.py"),
    ),
    Subject(
        "sampling",
        (
            "lily/sampling.py", "lily/cpu/**/sample*.h", "lily/cpu/**/select*.h", "shaders/sample*.metal",
            "shaders/select.h",
        ), 10,
        {
            "sampling.py": (_engine(_SAMPLING, _LIMITS, _API),),
            "shaders/*filter*": _kernels("shaders/test_shaders_sample_filter.py"),
            "shaders/select.h": _kernels("shaders/test_shaders_sample_filter.py", "shaders/test_shaders_sample.py"),
            "shaders/*": _kernels("shaders/test_shaders_sample.py"),
            "*": (
                "tests/cpu/test_cpu_sample.py tests/cpu/test_cpu_sample_filter.py -k 'not draws_follow'",
                _engine(_SAMPLING),
                "tests/cpu/test_cpu_sample.py -k draws_follow",
            ),
        },
    ),
    Subject(
        "cpu", ("lily/cpu/**/*.h", "lily/cpu/**/*.c"), 18,
        {
            "attention*": ("tests/cpu/test_cpu_attention.py", _engine(_EXACT)),
            "gdn*": ("tests/cpu/test_cpu_gdn.py", _engine(_EXACT)),
            "norm.h": ("tests/cpu/test_cpu_norm.py", _engine(_GOLDEN)),
            "route.h": ("tests/cpu/test_cpu_route.py", _engine(_GOLDEN)),
            "*expanded.h": ("tests/cpu/test_cpu_moe.py tests/cpu/test_cpu_matmul.py",),
            "moe*": ("tests/cpu/test_cpu_moe.py", _engine(_EXACT)),
            "probe.h": ("tests/cpu/test_cpu_probe.py",),
            "*.h": (
                "tests/cpu/test_cpu_matmul.py tests/cpu/test_cpu_norm.py tests/cpu/test_cpu_moe.py", _engine(_EXACT),
            ),
            "*": ("tests/cpu/test_cpu_device.py", _engine(_GOLDEN), "tests/cpu/test_cpu_stress.py"),
        },
        left_out=("sample*.h", "select*.h", "kernel_params.h", "kernel_list.h", "isa_*.c", "tile_amx.h"),
    ),
    Subject(
        "shaders", ("shaders/*.metal", "shaders/*.h"), 18,
        {
            "attention_decode*": _kernels("shaders/test_shaders_attention_decode.py"),
            "attention_*": _kernels("shaders/test_shaders_attention_prefill.py"),
            "gdn*": _kernels("shaders/test_shaders_gdn.py"),
            "gemm.*": _kernels("shaders/test_shaders_gemm.py", "shaders/test_shaders_moe.py"),
            "matrix.h": _kernels("shaders/test_shaders_gemm.py"),
            "tensor.h": _kernels("shaders/test_shaders_gemm.py"),
            "moe_prefill*": _kernels("shaders/test_shaders_moe.py"),
            "route*": _kernels("shaders/test_shaders_route.py"),
            "probe*": _kernels("shaders/test_shaders_probe.py"),
            "group.h": _kernels(
                *(f"shaders/test_shaders_{name}.py" for name in ("route", "sample", "sample_filter"))
            ),
            "*": _kernels("shaders/test_shaders_decode.py", "shaders/test_shaders_route.py"),
        },
        ("comparison", "off-by-one", "statement", "barrier"),
        left_out=("sample*", "select.h"),
    ),
    Subject(
        "shim", ("objc_shim/**/*.m", "objc_shim/**/*.h", "objc_shim/**/*.c"), 10,
        {
            "*.c": ("tests/cpu/test_cpu_device.py", *_SHIM),  # what both devices share
            "device_common.h": ("tests/cpu/test_cpu_device.py", *_SHIM),
            "*": _SHIM,
        },
        ("comparison", "off-by-one", "statement", "barrier"),
    ),
    Subject(
        "cli", ("lily/cli/*.py",), 9,
        {
            "chat.py": ("LILY_DEVICE=cpu tests/cli/test_cli_chat.py",),
            "plan.py": ("tests/plan/test_plan_command.py",),
            "doctor.py": ("LILY_DEVICE=cpu tests/doctor/test_doctor.py",),
            "tune.py": ("LILY_DEVICE=cpu tests/engine/test_tune.py",),
            "pull.py": ("tests/checkpoint/test_hub.py",),
            "*": ("LILY_DEVICE=cpu tests/cli",),
        },
    ),
    Subject(
        "server", ("lily/server/*.py",), 15,
        {
            "guards.py": _server("guards", "errors"),
            "metrics.py": _server("metrics", "unload"),
            "on_demand.py": _server("unload"),
            "serving.py": (*_server("idle", "streams"), "tests/cli/test_cli_serve.py"),
            "responses.py": _server("responses", "dialects"),
            "messages.py": _server("messages", "dialects"),
            "relay.py": _server("streams", "errors"),
            "outgoing.py": _server("streams", "errors"),
            "page.py": _server("page"),
            "*": ("tests/server -k 'not page and not soak and not fuzz'",),
        },
    ),
    Subject(
        "checks", ("lily/checks/*.py", "lily/doctor/*.py"), 5,
        {
            "tensor_check.py": ("tests/checks", "LILY_DEVICE=cpu tests/doctor"),
            "*": ("LILY_DEVICE=cpu tests/doctor", "tests/checks"),
        },
    ),
)  # fmt: skip


def subject(name: str) -> Subject:
    """By name; KeyError for another."""
    return {s.name: s for s in SUBJECTS}[name]
