# SPDX-License-Identifier: Apache-2.0
"""Where every weight lies on a device: a pure function of config and policy, so that a plan needs no checkpoint.

One buffer per layer, plus one for the embedding and one for the head.  Modules that one kernel reads together are
stacked by rows; modules of a stack that are quantised differently become separate matrices (segments) that write
their own columns.  How the bytes are arranged inside a matrix is the business of ``lily/weights.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from lily.checkpoint.config import FULL_ATTENTION, ModelConfig, QuantSpec
from lily.errors import CheckpointError
from lily.plan.views import Values, View
from lily.policy import Policy

ALIGN = 256  # bytes: every view of weights and scratch begins at a multiple
BYTES = {"f32": 4, "bf16": 2}  # of a number


def align(n: int, to: int = ALIGN) -> int:
    return -(-n // to) * to


def matrix_bytes(layout: str, rows: int, k: int, spec: QuantSpec) -> int:
    """Bytes of one quantised matrix [rows, k] in ``layout`` (rows16: rows padded to 16)."""
    groups = k // spec.group_size
    if layout == "rows16":
        return align(rows, 16) * groups * (spec.group_size * spec.bits // 8 + 4)
    return align(rows * k * spec.bits // 8) + 2 * align(rows * groups * 2)


@dataclass(frozen=True)
class Part:
    """A module inside a matrix: rows [first, first+rows)."""

    module: str
    first: int
    rows: int

    @property
    def name(self) -> str:
        """The last word of the module, for labels."""
        return self.module.split(".")[-1]


@dataclass(frozen=True)
class Matrix:
    """A quantised matrix, or ``experts`` of them one after the other, made of ``parts`` stacked by rows."""

    view: View
    layout: str
    n: int  # rows with padding between parts, if any
    k: int
    spec: QuantSpec
    parts: tuple[Part, ...]
    experts: int = 1
    column: int = 0  # of the stack's outputs, where this segment's outputs begin

    @property
    def expert_bytes(self) -> int:
        return self.view.nbytes // self.experts

    @property
    def name(self) -> str:
        """That of its first part."""
        return self.parts[0].name

    def used_by(self, experts: int) -> View:
        """The view, of which ``experts`` experts at most are read."""
        return self.view.using(min(experts, self.experts) * self.expert_bytes)

    @property
    def constants(self) -> Values:
        return {"bits": self.spec.bits, "group": self.spec.group_size}


def width(stack: tuple[Matrix, ...]) -> int:
    """Outputs of a stack, side by side."""
    return stack[-1].column + stack[-1].n


@dataclass(frozen=True)
class Dense:
    """An unquantised tensor, stored as float32."""

    view: View
    module: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class MoeWeights:
    norm: Dense
    router: tuple[Matrix, ...]  # E routed experts' logits, then the shared expert's gate
    gate_up: Matrix
    down: Matrix
    shared_gate_up: Matrix
    shared_down: Matrix


@dataclass(frozen=True)
class GdnWeights:
    norm: Dense
    in_proj: tuple[Matrix, ...]  # q | k | v | z | b | a
    conv: Dense
    a_log: Dense
    dt_bias: Dense
    head_norm: Dense
    out_proj: Matrix
    moe: MoeWeights


@dataclass(frozen=True)
class AttentionWeights:
    norm: Dense
    in_proj: tuple[Matrix, ...]  # (q | gate) per head, k, v
    q_norm: Dense
    k_norm: Dense
    out_proj: Matrix
    moe: MoeWeights


@dataclass(frozen=True)
class WeightsMap:
    embed: Matrix
    layers: tuple[GdnWeights | AttentionWeights, ...]
    norm: Dense
    head: Matrix
    inv_freq: View
    buffers: dict[str, int]

    @property
    def nbytes(self) -> int:
        return sum(self.buffers.values())


class _Placer:
    """Hands out aligned ranges of one buffer."""

    def __init__(self, config: ModelConfig, policy: Policy, buffer: str) -> None:
        self.config, self.policy, self.buffer, self.used = config, policy, buffer, 0

    def view(self, nbytes: int) -> View:
        v = View(self.buffer, self.used, nbytes)
        self.used = align(self.used + nbytes)
        return v

    def dense(self, module: str, *shape: int) -> Dense:
        return Dense(self.view(prod(shape) * BYTES["f32"]), module, shape)

    def matrix(
        self, modules: list[tuple[str, int]], k: int, *, experts: int = 1, column: int = 0, pad: bool = False,
        layout: str | None = None,
    ) -> Matrix:  # fmt: skip
        """Modules of one quantisation stacked; ``pad``: each part starts at a row block."""
        specs = {m: self.config.quantization_of(m) for m, _ in modules}
        spec = specs[modules[0][0]]
        for m, s in specs.items():
            if s != spec:
                raise CheckpointError(
                    f"{self.config.source}: {modules[0][0]} is quantised with {spec.bits} bits, groups of "
                    f"{spec.group_size}, but {m} with {s.bits} bits, groups of {s.group_size}; Lily computes the two "
                    "together and needs them alike. Convert the model with one setting for both."
                )
        layout = layout or self.policy.layout
        block = self.policy.row_block if pad else 1
        parts, rows = [], 0
        for m, n in modules:
            parts.append(Part(m, rows, n))
            rows += align(n, block)
        # Experts follow each other without a gap.
        one = matrix_bytes(layout, rows, k, spec)
        return Matrix(self.view(one * experts), layout, rows, k, spec, tuple(parts), experts, column)

    def stack(self, modules: list[tuple[str, int]], k: int) -> tuple[Matrix, ...]:
        """As few matrices as the quantisation allows, for modules whose outputs lie side by side."""
        out: list[Matrix] = []
        run: list[tuple[str, int]] = []
        column = start = 0
        for m, n in [*modules, ("", 0)]:
            if run and (not m or self.config.quantization_of(m) != self.config.quantization_of(run[0][0])):
                if start % 8:
                    raise CheckpointError(
                        f"{self.config.source}: {run[0][0]} differs in quantisation from the module stacked before it "
                        f"and would begin at output {start}, which is no multiple of 8. Quantise both alike."
                    )
                out.append(self.matrix(run, k, column=start))
                run, start = [], column
            run.append((m, n))
            column += n
        return tuple(out)


def _moe(p: _Placer, c: ModelConfig, base: str) -> MoeWeights:
    h, i, s = c.hidden_size, c.moe_intermediate_size, c.shared_intermediate_size
    m = base + "mlp."
    return MoeWeights(
        norm=p.dense(base + "post_attention_layernorm", h),
        router=p.stack([(m + "gate", c.num_experts), (m + "shared_expert_gate", 1)], h),
        gate_up=p.matrix(
            [(m + "switch_mlp.gate_proj", i), (m + "switch_mlp.up_proj", i)], h, experts=c.num_experts, pad=True
        ),
        down=p.matrix([(m + "switch_mlp.down_proj", h)], i, experts=c.num_experts),
        shared_gate_up=p.matrix([(m + "shared_expert.gate_proj", s), (m + "shared_expert.up_proj", s)], h, pad=True),
        shared_down=p.matrix([(m + "shared_expert.down_proj", h)], s),
    )


def _gdn(p: _Placer, c: ModelConfig, base: str) -> GdnWeights:
    h, hv = c.hidden_size, c.linear_num_value_heads
    a = base + "linear_attn."
    return GdnWeights(
        norm=p.dense(base + "input_layernorm", h),
        in_proj=p.stack(
            [
                (a + "in_proj_qkv", c.conv_dim),
                (a + "in_proj_z", c.value_dim),
                (a + "in_proj_b", hv),
                (a + "in_proj_a", hv),
            ],
            h,
        ),
        conv=p.dense(a + "conv1d", c.conv_dim, c.conv_kernel),
        a_log=p.dense(a + "A_log", hv),
        dt_bias=p.dense(a + "dt_bias", hv),
        head_norm=p.dense(a + "norm", c.linear_value_head_dim),
        out_proj=p.matrix([(a + "out_proj", h)], c.value_dim),
        moe=_moe(p, c, base),
    )


def _attention(p: _Placer, c: ModelConfig, base: str) -> AttentionWeights:
    h, d = c.hidden_size, c.head_dim
    a = base + "self_attn."
    kv = c.num_kv_heads * d
    return AttentionWeights(
        norm=p.dense(base + "input_layernorm", h),
        in_proj=p.stack([(a + "q_proj", 2 * c.num_heads * d), (a + "k_proj", kv), (a + "v_proj", kv)], h),
        q_norm=p.dense(a + "q_norm", d),
        k_norm=p.dense(a + "k_norm", d),
        out_proj=p.matrix([(a + "o_proj", h)], c.num_heads * d),
        moe=_moe(p, c, base),
    )


def map_weights(config: ModelConfig, policy: Policy) -> WeightsMap:
    """Places every weight of ``config`` in the buffers ``weights.embed``, ``weights.LAYER`` and ``weights.head``."""
    buffers: dict[str, int] = {}

    def placer(name: str) -> _Placer:
        return _Placer(config, policy, f"weights.{name}")

    p = placer("embed")
    embed = p.matrix([("embed_tokens", config.vocab_size)], config.hidden_size, layout="rows")
    inv_freq = p.view(config.rotary_dim // 2 * 4)
    buffers[p.buffer] = p.used
    layers = []
    for i, kind in enumerate(config.layer_types):
        p = placer(str(i))
        layers.append((_attention if kind == FULL_ATTENTION else _gdn)(p, config, f"layers.{i}."))
        buffers[p.buffer] = p.used
    p = placer("head")
    head_module = "embed_tokens" if config.tie_word_embeddings else "lm_head"
    norm = p.dense("norm", config.hidden_size)
    head = p.matrix([(head_module, config.vocab_size)], config.hidden_size)
    buffers[p.buffer] = p.used
    return WeightsMap(embed, tuple(layers), norm, head, inv_freq, buffers)
