# SPDX-License-Identifier: Apache-2.0
"""The kernel table against what depends on it: the C header, the host's records, the CPU device, every route."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace

import pytest
from paths import ROOT

from lily.checkpoint.config import ModelConfig, QuantSpec
from lily.checks.inputs import maker_of
from lily.device.device import Device
from lily.errors import CheckpointError
from lily.kernels import KERNELS, STRUCTS, c_header
from lily.plan import Builder, decode_plan, every_plan, legal, prefill_plan
from lily.policy import ABLATIONS, NEVER, POLICIES, policy_for
from lily.structs import struct_dtype

SMALL = ModelConfig(
    hidden_size=128, num_layers=4, vocab_size=512, rms_norm_eps=1e-6, max_position_embeddings=4096, num_heads=4,
    num_kv_heads=2, head_dim=64, rotary_dim=16, rope_theta=1e7, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=32, linear_value_head_dim=64, conv_kernel=4, num_experts=8, experts_per_token=2,
    moe_intermediate_size=64, shared_intermediate_size=64,
    layer_types=("linear_attention", "linear_attention", "linear_attention", "full_attention"),
    quantization=QuantSpec(4, 32),
)  # fmt: skip


def test_header_is_legal_c_with_the_sizes_that_the_host_packs(tmp_path):
    checks = []
    for name in STRUCTS:
        record = struct_dtype(name)
        checks.append(f'_Static_assert(sizeof({name}) == {record.itemsize}, "{name}");')
        for field, (kind, offset, *_) in record.fields.items():
            checks.append(f'_Static_assert(offsetof({name}, {field}) == {offset}, "{name}.{field}");')
            checks.append(f'_Static_assert(sizeof((({name} *)0)->{field}) == {kind.itemsize}, "{name}.{field}");')
    checks += [
        f'_Static_assert(sizeof({k.name}_params) == {4 * len(k.params)}, "{k.name}");'
        for k in KERNELS.values()
        if k.params
    ]
    source = tmp_path / "header.c"
    source.write_text("#include <stddef.h>\n#include <stdint.h>\n" + c_header() + "\n".join(checks) + "\n")
    command = ["cc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_arguments_and_constants_fit_the_device_interface():
    for k in KERNELS.values():
        assert len(k.args) <= 20, k.name
        assert len(k.constants) <= 16, k.name
        assert 4 * len(k.params) <= 128, k.name
        assert any(a.writes for a in k.args), f"{k.name} writes nothing"
        assert k.summary


def _sections():
    """(headings of lily/kernels.py as (title, C file, shader file), names of the kernels under each)."""
    text = (ROOT / "lily" / "kernels.py").read_text(encoding="utf-8")
    found = re.split(r"^# ---- (\w+): (\S+), (\S+) -+$", text, flags=re.MULTILINE)
    for title, c, shader, rows in zip(found[1::4], found[2::4], found[3::4], found[4::4], strict=True):
        yield title, c, shader, re.findall(r'^kernel\(\n    "(\w+)",$', rows, flags=re.MULTILINE)


def test_every_kernel_stands_under_a_heading():
    assert [name for *_, names in _sections() for name in names] == list(KERNELS)


@pytest.mark.parametrize(("title", "c", "shader", "names"), [pytest.param(*s, id=s[0]) for s in _sections()])
def test_a_heading_names_the_files_that_define_its_kernels(title, c, shader, names):
    assert (c, shader) == (f"lily/cpu/kernels/{title}.h", f"shaders/{title}.metal")
    functions = set(re.findall(r"^(?:SHARED void|#define) kernel_(\w+)", (ROOT / c).read_text(), flags=re.MULTILINE))
    kernels = set(
        re.findall(r"^(?:kernel|\[\[kernel.*\]\]) void (\w+)\(", (ROOT / shader).read_text(), flags=re.MULTILINE)
    )
    assert (functions, kernels) == (set(names), set(names))


def test_a_launch_names_its_threads_where_the_table_does_not():
    b = Builder(SMALL, policy_for("metal"))
    x, y = b.act("x", 128), b.act("y", 128)
    with pytest.raises(ValueError, match="last_row: 64 threads were given, the table says 256"):
        b.dispatch("last_row", (1,), 64, x=x, y=y)
    b.dispatch("last_row", (1,), x=x, y=y)
    assert b.dispatches[0].threads == (256, 1, 1)
    partial = {"part_o": b.f32("part_o", 128), "part_ml": b.f32("part_ml", 8), "o": y, "split": 1}
    for threads in (0, 1025):
        with pytest.raises(ValueError, match=f"attn_combine: {threads} threads were given, 1 to 1024 are allowed"):
            b.dispatch("attn_combine", (4,), threads, **partial)


def test_a_launch_gives_what_its_row_names():
    b = Builder(SMALL, policy_for("metal"))
    x, y = b.act("x", 128), b.act("y", 128)
    for given in ({"x": x}, {"x": x, "y": y, "z": y}):
        with pytest.raises(ValueError, match=re.escape("last_row takes ['hidden', 'step', 'x', 'y'], given were ['x'")):
            b.dispatch("last_row", (1,), **given)
    b.dispatch("last_row", (1,), x=x, y=y)
    (made,) = b.dispatches
    assert made.views == (b.fixed("step.in"), x, y)
    assert made.params == (128,)


def test_names_of_a_row_differ_from_each_other_and_from_what_a_launch_has_itself():
    for k in KERNELS.values():
        names = [*(a.name for a in k.args), *(name for name, _ in k.params), *k.constants]
        assert len(set(names)) == len(names), k.name
        assert not set(names) & {"kernel", "grid", "threads", "label", "host"}, k.name


def _every_plan(policy):
    far = policy.long_context if policy.long_context < NEVER else 2 * policy.kv_step
    return every_plan(SMALL, policy, kv_tokens=(policy.kv_step, far), score_top=4)


def test_every_kernel_that_a_cpu_route_asks_for_exists_there():
    with Device("cpu", threads=1) as device:
        for ablate in [(), *((name,) for name in ABLATIONS)]:
            for plan in _every_plan(policy_for("cpu", ablate)):
                for d in plan.dispatches:
                    device.kernel(d.kernel, d.constants)


@pytest.mark.parametrize("device", list(POLICIES))
def test_every_kernel_of_the_table_is_on_a_route_or_belongs_to_an_ablation(device):
    used = {d.kernel.name for plan in _every_plan(policy_for(device)) for d in plan.dispatches}
    assert {k.name for k in KERNELS.values() if k.ablation is None and not k.probe} - used == set()
    assert not any(KERNELS[name].probe for name in used)


@pytest.mark.parametrize("device", list(POLICIES))
def test_no_route_exceeds_the_threads_or_grid_of_its_kernel(device):
    for plan in _every_plan(policy_for(device)):
        for d in plan.dispatches:
            assert d.threads[0] == d.kernel.threads or 0 < d.threads[0] <= d.kernel.max_threads
            assert all(0 < g < 1 << 31 for g in d.grid)


def test_the_checks_know_what_to_give_every_argument():
    for k in KERNELS.values():
        for a in k.args:
            if a.reads and a.dtype not in ("act", "q", "qrows", "Step", "Request"):
                assert maker_of(k.name, a.name)


def test_an_argument_of_an_unknown_kernel_gets_no_other_kernels_numbers():
    for name in ("gate", "y", "weights", "ids", "logits"):
        with pytest.raises(LookupError, match=f"does not say what {name} of new_kernel holds"):
            maker_of("new_kernel", name)


# ---- legal shapes ---------------------------------------------------------------------------------------------------


def _rules():
    for k in KERNELS.values():
        for text in (k.legal, k.gpu):
            for rule in legal.rules(text):
                yield pytest.param(k, rule, id=f"{k.name}-{rule.name}{rule.relation}{'|'.join(rule.operands)}")


@pytest.mark.parametrize(("kernel", "rule"), list(_rules()))
def test_a_rule_names_what_its_row_has(kernel, rule):
    known = {*kernel.constants, *(n for n, _ in kernel.params)}
    assert {n for n in (*rule.name.split("*"), *rule.operands) if not n.isdigit()} <= known


# A broken rule each: what config.json says, the device, and the refusal.
REFUSED = [
    ({"num_experts": 257}, "metal", "num_experts is 257, Lily runs up to 256 on the metal device; use --device cpu"),
    ({"num_experts": 64, "experts_per_token": 33}, "metal", "num_experts_per_tok is 33, Lily runs up to 32 on the"),
    ({"head_dim": 96}, "metal", "head_dim is 96, Lily runs 64, 128 or 256 on the metal device; use --device cpu"),
    ({"head_dim": 40, "rotary_dim": 8}, "cpu", "head_dim is 40, Lily runs multiples of 16"),
    ({"linear_key_head_dim": 48}, "metal", "linear_key_head_dim is 48, Lily runs 16, 32, 64, 128 or 256 on the metal"),
    ({"linear_value_head_dim": 272}, "metal", "linear_value_head_dim is 272, Lily runs up to 256 on the metal"),
    (
        {"linear_key_head_dim": 256, "linear_value_head_dim": 80}, "metal",
        "linear_key_head_dim x linear_value_head_dim is 20480, Lily runs up to 16384 on the metal device",
    ),
    ({"linear_value_head_dim": 40}, "cpu", "linear_value_head_dim is 40, Lily runs multiples of 16"),
    (
        {"linear_num_key_heads": 1, "linear_num_value_heads": 3}, "metal",
        "linear_num_value_heads is 3, Lily runs multiples of 2 on the metal device; use --device cpu",
    ),
    ({"conv_kernel": 9}, "cpu", "linear_conv_kernel_dim is 9, Lily runs up to 8"),
    (
        {"moe_intermediate_size": 80}, "cpu",
        "the input width of layers.0.moe_down is 80, Lily runs multiples of 32",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "device", "words"), REFUSED, ids=lambda v: v if isinstance(v, str) else "")
def test_a_model_that_the_kernels_cannot_take_is_refused_by_name(changes, device, words):
    config = replace(SMALL, **changes, source="folder/config.json")
    policy = policy_for(device)
    with pytest.raises(CheckpointError, match=re.escape(f"folder/config.json: {words}")):
        decode_plan(Builder(config, policy, kv_tokens=policy.kv_step))


def test_what_is_illegal_on_a_gpu_runs_on_the_cpu():
    for changes in ({"num_experts": 300}, {"head_dim": 96}, {"linear_key_head_dim": 48}):
        config, policy = replace(SMALL, **changes), policy_for("cpu")
        decode_plan(Builder(config, policy, kv_tokens=policy.kv_step))
        prefill_plan(Builder(config, policy, rows=8, kv_tokens=policy.kv_step))


@pytest.mark.parametrize(
    ("text", "values", "holds", "allowed"),
    [
        ("n=4|8", {"n": 8}, True, "4 or 8"),
        ("n=4|8", {"n": 5}, False, "4 or 8"),
        ("n=1|2|3", {"n": 4}, False, "1, 2 or 3"),
        ("n<=8", {"n": 8}, True, "up to 8"),
        ("n<=8", {"n": 9}, False, "up to 8"),
        ("n<=m", {"n": 9, "m": 10}, True, "up to 10"),
        ("n%16", {"n": 24}, False, "multiples of 16"),
        ("n%m", {"n": 24, "m": 12}, True, "multiples of 12"),
        ("n*m<=100", {"n": 11, "m": 10}, False, "up to 100"),
    ],
)
def test_rules_say_what_they_allow(text, values, holds, allowed):
    (rule,) = legal.rules(text)
    assert (rule.holds(values), rule.allowed(values)) == (holds, allowed)


@pytest.mark.parametrize("text", ["n>4", "n", "n%4|8", "n<=", "=4", "n=4,8"])
def test_a_rule_that_cannot_be_read_is_an_error(text):
    with pytest.raises(ValueError, match="bad rule"):
        legal.rules(text)


def test_tiles_that_a_policy_gets_wrong_are_its_own_fault():
    policy = replace(policy_for("metal"), gemm_tiles=((0, 24),))
    with pytest.raises(ValueError, match="gemm: tile_m is 24, the kernel takes 16, 32 or 64"):
        prefill_plan(Builder(SMALL, policy, rows=8, kv_tokens=policy.kv_step))
