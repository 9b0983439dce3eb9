# SPDX-License-Identifier: Apache-2.0
"""A dispatch of every kernel, at a small shape and at the real model's, as the plans of Lily itself have it.

A case is the same dispatch twice: with grid and layout of the device under test, and with those of the reference.  The
reference takes over what shows in results or in a case's name: how caches and vocabularies are cut, and tiles.
Not handled: what the arguments hold (inputs.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from lily.checkpoint.config import FULL_ATTENTION, LINEAR_ATTENTION, ModelConfig, QuantSpec
from lily.kernels import KERNELS
from lily.plan import Builder, Dispatch, Plan, View, decode_plan, every_plan, prefill_plan
from lily.plan.weights_map import BYTES
from lily.policy import ABLATIONS, POLICIES, Policy, policy_for

# Paths of the cpu device that round the operands of products with 4-bit matrices to bfloat16.
ROUNDING_ISAS = ("amx", "avx512bf16")

_KINDS = (LINEAR_ATTENTION, FULL_ATTENTION)

SMALL = ModelConfig(
    hidden_size=256, num_layers=2, vocab_size=640, rms_norm_eps=1e-6, max_position_embeddings=65536, num_heads=4,
    num_kv_heads=2, head_dim=64, rotary_dim=16, rope_theta=1e7, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=32, linear_value_head_dim=64, conv_kernel=4, num_experts=8, experts_per_token=2,
    moe_intermediate_size=64, shared_intermediate_size=64, layer_types=_KINDS, quantization=QuantSpec(4, 64),
    quantization_overrides={f"layers.{i}.mlp.gate": QuantSpec(8, 64) for i in range(2)}
    | {f"layers.{i}.mlp.shared_expert_gate": QuantSpec(8, 64) for i in range(2)},
)  # fmt: skip

# A layer of each kind of Qwen3.6-35B-A3B, its embedding and its head.
REAL = replace(
    SMALL, hidden_size=2048, vocab_size=248320, max_position_embeddings=262144, num_heads=16, head_dim=256,
    rotary_dim=64, linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
    linear_value_head_dim=128, num_experts=256, experts_per_token=8, moe_intermediate_size=512,
    shared_intermediate_size=512,
)  # fmt: skip


@dataclass(frozen=True)
class Size:
    """Shapes of one size: how many tokens are in the cache, and rows of a prompt chunk.

    ``rows`` are real of the ``bucket`` that the list is recorded for, so that the last tile is not full. Other tiles,
    those of lists for up to ``tiled`` rows, are cases of their own. Copies and probes move ``copied`` bytes.
    """

    name: str
    config: ModelConfig
    context: int
    rows: int
    bucket: int
    copied: int
    tiled: int = 0


SIZES = {
    "small": Size("small", SMALL, context=300, rows=29, bucket=32, copied=(1 << 16) + 4096, tiled=512),
    "real": Size("real", REAL, context=1024, rows=63, bucket=64, copied=8 << 20),
}
MEASURED = Size("real", REAL, context=4096, rows=512, bucket=512, copied=8 << 20)

# Plans of ablations, some of which keep matrices in bfloat16, are for a few experts.
_FEW_EXPERTS = 32
_SCORE_TOP = 4  # ids of a scored row

# A kernel occurs once for each of its tiles, but for these: (kernel, label) → name of a second case.
_VARIANTS = {("gemv_norm_f32", "lm_head"): "head", ("attn_decode", "long"): "long"}


@dataclass(frozen=True)
class Case:
    """``tested`` and ``reference`` compute the same; ``rows`` and ``position`` go into their Step.

    ``variant`` tells cases of one kernel apart; ``config`` is that of the plan that they are from.
    """

    kernel: str
    variant: str
    size: Size
    config: ModelConfig
    tested: Dispatch
    reference: Dispatch
    rows: int
    position: int

    @property
    def name(self) -> str:
        return f"{self.kernel} ({self.variant})" if self.variant else self.kernel

    @property
    def shape(self) -> str:
        """The sizes that matter, for people."""
        return describe(self.tested, self.rows, self.position)


def reference_policy(tested: Policy) -> Policy:
    """The cpu device's policy, with everything that shows in a kernel's results as ``tested`` has it."""
    shared = (
        "attention_split", "attention_splits", "long_context", "long_split", "sample_slice", "gemm_tiles", "moe_tiles",
        "buckets", "kv_step", "score_rows", "ablate",
    )  # fmt: skip
    return replace(POLICIES["cpu"], **{name: getattr(tested, name) for name in shared})


def cases(device: str, size: Size) -> list[Case]:
    """Those for ``device``, in the order of the kernel table."""
    tested = _first_of_each(policy_for(device), size)
    reference = _first_of_each(reference_policy(policy_for(device)), size)
    found = [
        Case(*key, size, at.config, at.dispatch, reference[key].dispatch, at.rows, max(0, size.context - at.rows))
        for key, at in tested.items()
    ]
    order = {name: i for i, name in enumerate(KERNELS)}
    return sorted(found, key=lambda case: (order[case.kernel], case.variant))


class _Planned(NamedTuple):
    plan: Plan
    config: ModelConfig
    rows: int = 1
    long: bool = False  # for long contexts: only what is different there is wanted
    ablation: bool = False  # only the kernels of the ablation are wanted


class _Found(NamedTuple):
    dispatch: Dispatch
    config: ModelConfig
    rows: int


def _first_of_each(policy: Policy, size: Size) -> dict[tuple[str, str], _Found]:
    """(kernel, variant) → its first dispatch."""
    found: dict[tuple[str, str], _Found] = {}
    for plan, config, rows, long, ablation in _plans(policy, size):
        for dispatch in plan.dispatches:
            variant = _variant(dispatch, long)
            if (variant or not long) and (dispatch.kernel.ablation or not ablation):
                found.setdefault((dispatch.kernel.name, variant), _Found(dispatch, config, rows))
    for name, dispatch in unplanned(size.copied, BYTES[policy.act]).items():
        found.setdefault((name, ""), _Found(dispatch, size.config, 1))
    return found


def _variant(dispatch: Dispatch, long: bool) -> str:
    if "tile_m" in dispatch.kernel.constants:
        return f"tile {numbers(dispatch)['tile_m']}"
    return _VARIANTS.get((dispatch.kernel.name, "long" if long else dispatch.label.split(".")[-1]), "")


def _plans(policy: Policy, size: Size) -> Iterator[_Planned]:
    """Every route first, then the ablations, then other tiles."""
    config, kv_tokens = size.config, policy.kv_tokens(size.context)

    def plans(c: ModelConfig, p: Policy) -> Iterator[_Planned]:
        for plan in every_plan(
            c, p, kv_tokens=(kv_tokens,), rows=(size.bucket,), context=size.context, score_top=_SCORE_TOP
        ):
            yield _Planned(plan, c, 1 if plan.name.startswith(("decode", "sample")) else size.rows)

    yield from plans(config, policy)
    if policy.long_context <= config.max_position_embeddings:
        long = Builder(config, policy, kv_tokens=policy.long_context, context=size.context)
        yield _Planned(decode_plan(long), config, long=True)
    few = replace(config, num_experts=min(_FEW_EXPERTS, config.num_experts))
    for name in ABLATIONS:
        for planned in plans(few, replace(policy, ablate=frozenset((name,)))):
            yield planned._replace(ablation=True)
    # The largest list first: there most experts have several tiles.
    for bucket in sorted((b for b in policy.buckets if b <= size.tiled), reverse=True):
        rows = bucket * 3 // 4 - 3  # some tiles are empty, and one is not full
        for p in (policy, replace(policy, ablate=frozenset(("fused-dequantisation",)))):
            tiles = Builder(config, p, rows=bucket, kv_tokens=kv_tokens, context=size.context)
            yield _Planned(prefill_plan(tiles), config, rows)


def unplanned(nbytes: int = 1 << 16, act: int = 4) -> dict[str, Dispatch]:
    """Kernels that no plan has: copies, and the probes, of ``nbytes``; activations have ``act`` bytes."""
    block, side = 1 << 14, 64 * 64
    blocks = -(-nbytes // block)
    made = [
        _dispatch("copy", (-(-nbytes // 65536),), {"src": nbytes, "dst": nbytes}, bytes=nbytes),
        _dispatch("probe_level", (1,), {"x": 16}),
        _dispatch("probe_read", (blocks,), {"src": nbytes, "sums": 4 * blocks}, bytes=nbytes, block=block),
        _dispatch("probe_matrix", (2,), {"x": side * act, "w": side * act, "y": 2 * side * 4}, rounds=3),
    ]
    return {dispatch.kernel.name: dispatch for dispatch in made}


def _dispatch(kernel: str, grid: tuple[int, ...], sizes: dict[str, int], **params: int) -> Dispatch:
    row = KERNELS[kernel]
    views = tuple(View(a.name, 0, sizes[a.name]) for a in row.args)
    values = tuple(params[name] for name, _ in row.params)
    x, y, z = (*grid, 1, 1)[:3]
    return Dispatch(row, kernel, (), views, values, (x, y, z), (row.threads, 1, 1))


def describe(dispatch: Dispatch, rows: int, position: int) -> str:
    """Rows, matrix and what else tells one shape of a kernel from another."""
    p = numbers(dispatch)
    takes = {a.name for a in dispatch.kernel.args}
    parts = [f"{rows} rows"] if "step" in takes and rows > 1 else []
    if "n" in p and "k" in p:
        parts.append(f"{p['n']}×{p['k']}")
    if "experts" in p:
        parts.append(f"{p['active']} of {p['experts']} experts" if "active" in p else f"{p['experts']} experts")
    if {"k", "v"} <= takes and dispatch.kernel.name.startswith("attn"):
        parts.append(f"{position + rows} positions")
    if "bytes" in p:
        parts.append(f"{p['bytes'] / 1e6:.1f} MB")
    if "hv" in p:
        parts.append(f"{p['hv']} heads {p['dk']}×{p['dv']}")
    elif "hq" in p:
        parts.append(f"{p['hq']} heads of {p['dim']}")
    for name in ("hidden", "vocab", "count", "slice"):
        if name in p:
            parts.append(f"{name} {p[name]}")
    return ", ".join(parts)


def numbers(dispatch: Dispatch) -> dict[str, Any]:
    """Run-time parameters and constants by name."""
    names = [*(name for name, _ in dispatch.kernel.params), *dispatch.kernel.constants]
    return dict(zip(names, (*dispatch.params, *dispatch.constants), strict=True))
