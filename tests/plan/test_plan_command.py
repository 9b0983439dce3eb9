# SPDX-License-Identifier: Apache-2.0
"""The plan as data: its targets at real size, its hazards, its places, its routes, and the ``plan`` command.

Hazards, places and minimum traffic are computed here once more, from sizes written out by hand.
Not handled: what kernels compute.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

from lily.checkpoint.config import ModelConfig
from lily.cli import run
from lily.errors import InvalidRequestError
from lily.kernels import KERNELS
from lily.plan import Builder, Dispatch, Plan, View, decode_plan, prefill_plan, sample_plan
from lily.plan.hazards import schedule
from lily.plan.report import minimum_bytes, plan_report
from lily.policy import ABLATIONS, policy_for

# Sizes of Qwen3.6-35B-A3B as mlx-community publishes it at 4 bits.
REAL: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "full_attention_interval": 4,
    "vocab_size": 248320,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "rope_parameters": {"rope_theta": 10000000, "partial_rotary_factor": 0.25, "rope_type": "default"},
    "tie_word_embeddings": False,
    "quantization": {
        "group_size": 64,
        "bits": 4,
        **{
            f"model.layers.{layer}.mlp.{gate}": {"group_size": 64, "bits": 8}
            for layer in range(40)
            for gate in ("gate", "shared_expert_gate")
        },
    },
}
# As wide as the real model, but small enough to run in a test: every kernel and tile must be the real model's.
PRODUCTION_WIDTH = {**REAL, "num_hidden_layers": 4, "num_experts": 16, "vocab_size": 4096}
DEVICES = ("cpu", "metal")


def config_of(values: dict[str, Any]) -> ModelConfig:
    return ModelConfig.from_dict(values, "test")


@pytest.fixture(scope="module")
def real() -> ModelConfig:
    return config_of(REAL)


def plans_of(config: ModelConfig, device: str, ablate: tuple[str, ...] = (), kv_tokens: int = 4096) -> list[Plan]:
    policy = policy_for(device, ablate)

    def builder(rows: int) -> Builder:
        return Builder(config, policy, rows=rows, kv_tokens=kv_tokens)

    samples = [sample_plan(builder(1), greedy=g, logprobs=p) for g, p in ((True, False), (False, False), (False, True))]
    prefills = [prefill_plan(builder(8)), prefill_plan(builder(256)), prefill_plan(builder(64), score_top=5)]
    return [decode_plan(builder(1)), *samples, *prefills]


# ---- targets at real size
def test_the_sizes_above_are_those_of_the_real_checkpoint(real: ModelConfig, real_metadata: Path) -> None:
    found = ModelConfig.from_file(real_metadata / "config.json")
    different = {n for n in ModelConfig.__dataclass_fields__ if getattr(found, n) != getattr(real, n)}
    assert different <= {"eos_token_ids", "source"}


def test_greedy_decode_at_4096_meets_its_targets(real: ModelConfig) -> None:
    report = plan_report(real, policy_for("metal"))
    assert report["levels"] <= 260
    assert report["dispatches"] <= 320
    assert report["bytes"] <= 1.03 * 1.8815e9
    assert report["bytes"] <= 1.03 * report["minimum_bytes"]
    assert report["barriers"] == report["levels"] - 1


def test_levels_of_decode_are_the_designed_ones(real: ModelConfig) -> None:
    # 30 GDN layers of 6, 10 attention layers of 7; embedding, head, argmax, advance.
    assert plan_report(real, policy_for("metal"))["levels"] == 30 * 6 + 10 * 7 + 4
    assert plan_report(real, policy_for("metal"), greedy=False)["levels"] == 30 * 6 + 10 * 7 + 4 + 2


def test_minimum_bytes_of_decode(real: ModelConfig) -> None:
    group = 64 * 4 // 8 + 4  # bytes of 64 weights of 4 bits with scale and bias
    q4, q8 = group / 64, (64 + 4) / 64
    gdn = 2048 * (8192 + 4096 + 32 + 32) * q4 + 4096 * 2048 * q4
    small = (8192 * 4 + 32 + 32 + 128) * 2
    attention = 2048 * (2 * 4096 + 2 * 512) * q4 + 4096 * 2048 * q4 + 2 * 256 * 2
    moe = 2048 * 257 * q8 + (8 + 1) * 3 * 2048 * 512 * q4
    weights = (
        30 * (gdn + small) + 10 * attention + 40 * (moe + 2 * 2048 * 2) + 2048 * q4 + 2048 * 2 + 248320 * 2048 * q4
    )
    assert weights == 1_669_561_728
    state = 30 * (3 * 8192 * 2 + 32 * 128 * 128 * 4)
    kv_token = 10 * 2 * 2 * 256 * 2
    assert (2 * state, kv_token) == (128_778_240, 20_480)
    assert minimum_bytes(real, context=4096) == weights + 2 * state + 4096 * kv_token
    assert minimum_bytes(real, context=1) == weights + 2 * state + kv_token


# Weight bytes of one pass over T tokens with uniform routing, and distinct experts a layer (256·(1−(31/32)^T)).
@pytest.mark.parametrize(("rows", "experts"), [(1, 8.0), (8, 57.4), (32, 163.3), (128, 251.6), (512, 256.0)])
def test_minimum_bytes_of_prefill(real: ModelConfig, rows: int, experts: float) -> None:
    expert = 3 * 2048 * 512 * 36 // 64
    head = 248320 * 2048 * 36 // 64 + 2048 * 2
    fixed = 1_669_561_728 - 40 * 8 * expert - head - 1152
    rest = 128_778_240 + 4096 * 20_480 + rows * 1152
    expected = fixed + 40 * experts * expert + rest
    assert minimum_bytes(real, phase="prefill", rows=rows, context=4096) == pytest.approx(expected, rel=4e-4)


def test_more_context_costs_exactly_its_keys_and_values(real: ModelConfig) -> None:
    # Both fill the same cache, so only what is read differs: K and V, and one partial result a head and split.
    split, _ = policy_for("metal").split(4096, 256, 8)
    short, long = (plan_report(real, policy_for("metal"), context=n)["bytes"] for n in (1024, 4096))
    partial = (256 + 2) * 16 * 4 * 2  # written once, read once
    assert long - short == 3072 * 20_480 + 10 * (3072 // split) * partial


# ---- hazards
def copy(source: tuple[int, int], target: tuple[int, int]) -> Dispatch:
    """A dispatch that reads and writes byte ranges (start, end) of one buffer."""
    views = tuple(View("b", start, end - start) for start, end in (source, target))
    return Dispatch(KERNELS["copy"], "", (), views, (16,), (1, 1, 1), (1, 1, 1))


@pytest.mark.parametrize(
    ("first", "second", "waits"),
    [
        (((0, 16), (16, 32)), ((16, 32), (48, 64)), True),  # read after write
        (((0, 16), (16, 32)), ((48, 64), (0, 16)), True),  # write after read
        (((0, 16), (16, 32)), ((48, 64), (16, 32)), True),  # write after write
        (((0, 16), (16, 32)), ((0, 16), (48, 64)), False),  # both read
        (((0, 16), (16, 32)), ((32, 48), (48, 64)), False),  # ranges that only touch
        (((0, 16), (16, 32)), ((31, 47), (48, 64)), True),  # one byte in common
        (((0, 64), (64, 128)), ((128, 144), (16, 32)), True),  # inside
        (((16, 32), (64, 80)), ((128, 144), (0, 17)), True),  # begins before, and reaches into the first
        (((16, 32), (64, 80)), ((128, 144), (0, 16)), False),  # begins before, and ends where the first begins
        (((16, 32), (64, 80)), ((128, 144), (0, 64)), True),  # around
    ],
)
def test_what_makes_a_dispatch_wait(first: Any, second: Any, waits: bool) -> None:
    done = schedule([copy(*first), copy(*second)])
    assert [(d.level, d.barrier) for d in done] == [(0, False), (int(waits), waits)]


def test_what_the_host_runs_is_a_level_of_its_own() -> None:
    """Even where it shares no memory with what is beside it: the device has to stop for it."""
    before, at, after = copy((0, 16), (16, 32)), copy((32, 48), (48, 64)), copy((64, 80), (80, 96))
    assert [d.level for d in schedule([before, at, after])] == [0, 0, 0]
    assert [d.level for d in schedule([before, replace(at, host=True), after])] == [0, 1, 2]


def overlapping(a: View, b: View) -> bool:
    return a.buffer == b.buffer and max(a.offset, b.offset) < min(a.offset + a.nbytes, b.offset + b.nbytes)


def conflict(a: Dispatch, b: Dispatch) -> bool:
    pairs = [(x, y) for x in zip(a.kernel.args, a.views, strict=True) for y in zip(b.kernel.args, b.views, strict=True)]
    return any(overlapping(v, w) and "w" in p.access + q.access for (p, v), (q, w) in pairs)


def levels_of(plan: Plan) -> list[list[Dispatch]]:
    levels: list[list[Dispatch]] = [[]]
    for dispatch in plan.dispatches:
        if dispatch.barrier:
            levels.append([])
        levels[-1].append(dispatch)
    return levels


def any_conflict(level: list[Dispatch]) -> bool:
    return any(conflict(a, b) for i, b in enumerate(level) for a in level[:i])


@pytest.mark.parametrize("device", DEVICES)
def test_no_level_has_a_conflict_and_every_barrier_is_needed(device: str) -> None:
    for plan in plans_of(config_of(PRODUCTION_WIDTH), device):
        levels = levels_of(plan)
        assert [d.level for d in plan.dispatches] == [i for i, level in enumerate(levels) for _ in level], plan.name
        assert not any(any_conflict(level) for level in levels), plan.name
        assert all(any_conflict(a + b) for a, b in pairwise(levels)), plan.name
        assert (plan.levels, plan.barriers) == (len(levels), len(levels) - 1)


def longest_chain(dispatches: Sequence[Dispatch]) -> int:
    """Dispatches of the longest chain in which each conflicts with the one before it."""
    chains: list[int] = []
    for i, dispatch in enumerate(dispatches):
        chains.append(1 + max((chains[j] for j in range(i) if conflict(dispatches[j], dispatch)), default=0))
    return max(chains)


@pytest.mark.parametrize("device", DEVICES)
def test_no_order_needs_fewer_levels(device: str) -> None:
    for plan in plans_of(config_of(PRODUCTION_WIDTH), device):
        assert plan.levels == longest_chain(plan.dispatches), plan.name


@pytest.mark.parametrize("device", DEVICES)
def test_without_overlap_every_dispatch_is_a_level(device: str) -> None:
    for plan in plans_of(config_of(PRODUCTION_WIDTH), device, ablate=("overlap",)):
        assert plan.levels == len(plan.dispatches)
    report = plan_report(config_of(REAL), policy_for(device, ("overlap",)))
    assert report["levels"] == report["dispatches"]
    assert report["barriers"] == report["dispatches"] - 1
    assert report["ablate"] == ["overlap"]


# ---- places
def sizes_by_hand(config: ModelConfig, device: str, plan: Plan, kv_tokens: int) -> dict[str, int]:
    """Bytes of every buffer but those of weights and scratch."""
    policy = policy_for(device)
    act, vocab, hidden = {"cpu": 4, "metal": 2}[device], config.vocab_size, config.hidden_size
    gdn = 3
    state = gdn * (3 * 8192 * act + 32 * 128 * 128 * 4)
    rows = policy.buckets[-1]
    sizes = {"state.in": state, "state.out": state, "ids.in": rows * 4, "ids.out": rows * 4, "counts": vocab * 4}
    sizes |= {"step.in": 16, "step.out": 16, "hidden": hidden * act, "logits": vocab * 4}
    sizes |= {f"kv.3.{which}": kv_tokens * 2 * 256 * 2 for which in "kv"}
    sizes |= {f"score.{name}": 64 * 4 for name in ("targets", "logprobs", "flags")}
    sizes |= {f"score.{name}": 64 * 5 * 4 for name in ("ids", "values")}
    return sizes | {"scratch": plan.scratch_bytes}


@pytest.mark.parametrize("device", DEVICES)
def test_every_view_lies_in_its_buffer(device: str) -> None:
    config = config_of(PRODUCTION_WIDTH)
    weights = Builder(config, policy_for(device)).weights.buffers
    for plan in plans_of(config, device):
        sizes = sizes_by_hand(config, device, plan, 4096) | weights
        for dispatch in plan.dispatches:
            for arg, view in zip(dispatch.kernel.args, dispatch.views, strict=True):
                where = (plan.name, dispatch.label, arg.name, view)
                assert view.offset >= 0, where
                assert view.nbytes > 0, where
                assert view.offset % 2 == 0 if view.buffer == "scratch" else view.offset % 256 == 0, where
                if view.buffer in sizes:
                    assert view.offset + view.nbytes <= sizes[view.buffer], where
                else:
                    assert view.buffer in (
                        "request",
                        "outputs",
                        "bias.ids",
                        "bias.values",
                        "mask",
                        "history",
                        "sampler",
                    ), where


@pytest.mark.parametrize("device", DEVICES)
def test_weights_and_states_share_no_bytes(device: str) -> None:
    plan = plans_of(config_of(PRODUCTION_WIDTH), device)[0]
    kept = [v for d in plan.dispatches for v in d.views if v.buffer.startswith(("weights.", "state."))]
    places = sorted({(v.buffer, v.offset, v.nbytes) for v in kept})
    for (buffer, offset, nbytes), (other, start, _) in pairwise(places):
        assert buffer != other or offset + nbytes <= start
    assert (
        sum(nbytes for buffer, _, nbytes in places if buffer == "state.out")
        == sizes_by_hand(config_of(PRODUCTION_WIDTH), device, plan, 4096)["state.out"]
    )


def test_only_the_new_token_is_appended_to_the_cache(real: ModelConfig) -> None:
    plan = decode_plan(Builder(real, policy_for("metal"), kv_tokens=4096))
    args = [pair for d in plan.dispatches for pair in zip(d.kernel.args, d.views, strict=True)]
    written = [view.written for arg, view in args if arg.writes and view.buffer.startswith("kv.")]
    assert written == [2 * 256 * 2] * 20


# ---- routes
SIZES = {"n", "vocab", "groups", "count", "experts", "max_blocks", "pitch", "column", "limit"}


def routes(plans: Iterable[Plan]) -> set[Any]:
    """Kernels with their constants, threads and everything but the sizes that may differ between models."""
    found = set()
    for plan in plans:
        for d in plan.dispatches:
            params = zip((name for name, _ in d.kernel.params), d.params, strict=True)
            kept = tuple((name, value) for name, value in params if name not in SIZES)
            found.add((d.kernel.name, d.constants, d.threads, kept))
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_tokens", [4096, 65536])
def test_the_production_width_model_takes_the_real_models_decode_routes(device: str, kv_tokens: int) -> None:
    small, large = (
        [
            plan
            for plan in plans_of(config_of(values), device, kv_tokens=kv_tokens)
            if plan.name == "decode" or plan.name.startswith("sample")
        ]
        for values in (PRODUCTION_WIDTH, REAL)
    )
    assert routes(small) == routes(large)


@pytest.mark.parametrize("device", DEVICES)
def test_the_production_width_model_takes_the_real_models_prefill_routes(device: str) -> None:
    """Over all buckets: tiles follow the rows and the rows per expert, which 16 experts reach with fewer rows."""
    policy = policy_for(device)
    small, large = (
        [prefill_plan(Builder(config_of(values), policy, rows=rows, kv_tokens=4096)) for rows in policy.buckets]
        for values in (PRODUCTION_WIDTH, REAL)
    )
    assert routes(small) == routes(large)


def test_a_narrower_model_takes_other_routes(real: ModelConfig) -> None:
    """What the comparison above would miss if it compared too little."""
    narrow = config_of({**PRODUCTION_WIDTH, "num_attention_heads": 8})
    decode = [decode_plan(Builder(c, policy_for("metal"), kv_tokens=4096)) for c in (narrow, real)]
    assert routes(decode[:1]) != routes(decode[1:])


# ---- the command
def report_of(args: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert run(["plan", "--json", *args]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    report: dict[str, Any] = json.loads(out)
    return report


def test_the_report_sums_its_list(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(REAL))
    report = report_of(["--model", str(tmp_path)], capsys)
    assert report == report_of(["--model", str(tmp_path / "config.json")], capsys) | {"model": str(tmp_path)}
    wanted = {"device": "metal", "phase": "decode", "rows": 1, "context": 4096, "ablate": []}
    assert {name: report[name] for name in wanted} == wanted
    entries = report["list"]
    assert report["dispatches"] == len(entries)
    assert report["levels"] == entries[-1]["level"] + 1 == len({entry["level"] for entry in entries})
    assert report["barriers"] == sum(entry["barrier"] for entry in entries)
    assert report["bytes"] == sum(entry["bytes_read"] + entry["bytes_written"] for entry in entries)
    assert [entry["level"] for entry in entries] == sorted(entry["level"] for entry in entries)
    assert all(entry["kernel"] in KERNELS for entry in entries)
    # The sample list follows the forward list, behind a barrier.
    (first,) = (b for a, b in pairwise(entries) if a["plan"] != b["plan"])
    assert (first["plan"], first["barrier"], first["label"]) == ("sample-greedy", True, "lm_head")


def test_prefill_is_counted_for_its_bucket(capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(["--phase", "prefill", "--rows", "100", "--context", "300", "--device", "cpu"], capsys)
    assert (report["rows"], report["bucket"], report["context"], report["device"]) == (100, 128, 300, "cpu")
    assert report["model"] == "lily-tiny"
    assert {entry["plan"] for entry in report["list"]} == {"prefill-128"}
    assert report["minimum_bytes"] < report["bytes"]


@pytest.mark.parametrize("columns", [64, 80, 200])
def test_the_table_fits_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    assert run(["plan"]) == 0
    whole = capsys.readouterr().out.splitlines()
    monkeypatch.setattr("lily.cli.plan.terminal_width", lambda stream: columns)
    assert run(["plan"]) == 0
    table = capsys.readouterr().out.splitlines()
    rows = whole.index("")
    assert max(map(len, table[:rows])) <= columns
    assert [row.split()[-1] for row in table[:rows]] == [row.split()[-1] for row in whole[:rows]]  # numbers are kept
    assert table == whole or columns < 80


def test_the_table_ends_with_the_sums(capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(["--sample", "--ablate", "overlap"], capsys)
    assert run(["plan", "--sample", "--ablate", "overlap"]) == 0
    *table, _, title, counts, traffic = capsys.readouterr().out.splitlines()
    assert len(table) == 1 + report["dispatches"]
    assert "lily-tiny on metal, decode" in title
    assert "without overlap" in title
    assert f"{report['dispatches']} dispatches in {report['levels']} levels" in counts
    assert f"{report['bytes'] / 1e6:.1f} MB" in traffic


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["--rows", "3"], 1, "prefill"),
        (["--phase", "prefill", "--rows", "5000"], 1, "5000"),
        (["--phase", "prefill", "--rows", "512", "--context", "100"], 1, "512"),
        (["--context", "32769"], 1, "32768"),
        (["--device", "auto"], 2, "metal"),
        (["--phase", "train"], 2, "decode"),
        (["--ablate", "magic"], 2, "overlap"),
        (["--model", "/no/such/model"], 1, "/no/such/model"),
    ],
)
def test_bad_input_is_named(args: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *args]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("lily: error: ")
    assert words in err


def test_a_report_for_impossible_rows_is_refused(real: ModelConfig) -> None:
    with pytest.raises(InvalidRequestError, match="9999"):
        plan_report(real, policy_for("metal"), phase="prefill", rows=9999, context=10000)


def test_the_documentation_lists_every_mechanism() -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    assert [row for row in rows if row[0].strip("`") in ABLATIONS] == [[f"`{n}`", t] for n, t in ABLATIONS.items()]
