# SPDX-License-Identifier: Apache-2.0
"""Where every weight lies on a device: a pure function of config and policy, so that a plan needs no checkpoint.

One buffer per layer, plus one for the embedding and one for the head.  Modules that one kernel reads together are
stacked by rows; modules of a stack that are quantised differently become separate matrices (segments) that write
their own columns.  How the bytes are arranged inside a matrix is the business of ``lily/device/weights.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from math import prod

from lily.checkpoint.config import FULL_ATTENTION, ModelConfig, QuantSpec
from lily.checkpoint.tensors import quantized_modules
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
    """I, Is: intermediate sizes of a routed and of the shared expert."""

    norm: Dense  # [H]
    router: tuple[Matrix, ...]  # [E+1, H]: the routed experts' logits, then the shared expert's gate
    gate_up: Matrix  # E times [I | I, H]
    down: Matrix  # E times [H, I]
    shared_gate_up: Matrix  # [Is | Is, H]
    shared_down: Matrix  # [H, Is]


@dataclass(frozen=True)
class GdnWeights:
    norm: Dense  # [H]
    in_proj: tuple[Matrix, ...]  # [q Hk·Dk | k Hk·Dk | v Hv·Dv | z Hv·Dv | b Hv | a Hv, H]
    conv: Dense  # [C, T]
    a_log: Dense  # [Hv]
    dt_bias: Dense  # [Hv]
    head_norm: Dense  # [Dv]
    out_proj: Matrix  # [H, Hv·Dv]
    moe: MoeWeights


@dataclass(frozen=True)
class AttentionWeights:
    norm: Dense  # [H]
    in_proj: tuple[Matrix, ...]  # [(q D | gate D) of each of Hq heads | k Hkv·D | v Hkv·D, H]
    q_norm: Dense  # [D]
    k_norm: Dense  # [D]
    out_proj: Matrix  # [H, Hq·D]
    moe: MoeWeights


@dataclass(frozen=True)
class WeightsMap:
    """Every weight; sizes are named as in the kernel table."""

    embed: Matrix  # [V, H]
    layers: tuple[GdnWeights | AttentionWeights, ...]
    norm: Dense  # [H]
    head: Matrix  # [V, H]
    inv_freq: View  # [rot/2] float32: what RoPE turns by, for each position
    buffers: dict[str, int]  # bytes of each
    placed: tuple[Matrix | Dense, ...]  # everything above but inv_freq

    @property
    def nbytes(self) -> int:
        return sum(self.buffers.values())


class _Placer:
    """Hands out aligned ranges of buffers, one buffer after the other, and remembers what was placed."""

    def __init__(self, config: ModelConfig, policy: Policy) -> None:
        self.config, self.policy = config, policy
        self.shapes = quantized_modules(config)
        self.buffers: dict[str, int] = {}
        self.placed: list[Matrix | Dense] = []

    def open(self, buffer: str) -> None:
        """What follows lies in ``buffer``."""
        self.buffer = buffer
        self.buffers[buffer] = 0

    def view(self, nbytes: int) -> View:
        view = View(self.buffer, self.buffers[self.buffer], nbytes)
        self.buffers[self.buffer] = align(view.offset + nbytes)
        return view

    def dense(self, module: str, *shape: int) -> Dense:
        dense = Dense(self.view(prod(shape) * BYTES["f32"]), module, shape)
        self.placed.append(dense)
        return dense

    def matrix(self, *modules: str, column: int = 0, pad: bool = False, layout: str | None = None) -> Matrix:
        """Modules of one width and one quantisation, stacked by rows; ``pad``: each part starts at a row block."""
        *experts, _, k = self.shapes[modules[0]]
        spec = self._common_spec(modules)
        layout = layout or self.policy.layout
        block = self.policy.row_block if pad else 1
        parts, rows = [], 0
        for module in modules:
            n = self.shapes[module][-2]
            parts.append(Part(module, rows, n))
            rows += align(n, block)
        # Experts follow each other without a gap.
        view = self.view(matrix_bytes(layout, rows, k, spec) * prod(experts))
        matrix = Matrix(view, layout, rows, k, spec, tuple(parts), prod(experts), column)
        self.placed.append(matrix)
        return matrix

    def _common_spec(self, modules: tuple[str, ...]) -> QuantSpec:
        spec = self.config.quantization_of(modules[0])
        for module in modules:
            other = self.config.quantization_of(module)
            if other != spec:
                raise CheckpointError(
                    f"{self.config.source}: {modules[0]} is quantised with {spec.bits} bits, groups of "
                    f"{spec.group_size}, but {module} with {other.bits} bits, groups of {other.group_size}; Lily "
                    "computes the two together and needs them alike. Convert the model with one setting for both."
                )
        return spec

    def stack(self, *modules: str) -> tuple[Matrix, ...]:
        """As few matrices as the quantisation allows, for modules whose outputs lie side by side."""
        out: list[Matrix] = []
        column = 0
        for _, alike in groupby(modules, self.config.quantization_of):
            run = tuple(alike)
            if column % 8:
                raise CheckpointError(
                    f"{self.config.source}: {run[0]} differs in quantisation from the module stacked before it "
                    f"and would begin at output {column}, which is no multiple of 8. Quantise both alike."
                )
            out.append(self.matrix(*run, column=column))
            column += out[-1].n
        return tuple(out)


def _moe(p: _Placer, c: ModelConfig, base: str) -> MoeWeights:
    m = base + "mlp."
    return MoeWeights(
        norm=p.dense(base + "post_attention_layernorm", c.hidden_size),
        router=p.stack(m + "gate", m + "shared_expert_gate"),
        gate_up=p.matrix(m + "switch_mlp.gate_proj", m + "switch_mlp.up_proj", pad=True),
        down=p.matrix(m + "switch_mlp.down_proj"),
        shared_gate_up=p.matrix(m + "shared_expert.gate_proj", m + "shared_expert.up_proj", pad=True),
        shared_down=p.matrix(m + "shared_expert.down_proj"),
    )


def _gdn(p: _Placer, c: ModelConfig, base: str) -> GdnWeights:
    hv = c.linear_num_value_heads
    a = base + "linear_attn."
    return GdnWeights(
        norm=p.dense(base + "input_layernorm", c.hidden_size),
        in_proj=p.stack(a + "in_proj_qkv", a + "in_proj_z", a + "in_proj_b", a + "in_proj_a"),
        conv=p.dense(a + "conv1d", c.conv_dim, c.conv_kernel),
        a_log=p.dense(a + "A_log", hv),
        dt_bias=p.dense(a + "dt_bias", hv),
        head_norm=p.dense(a + "norm", c.linear_value_head_dim),
        out_proj=p.matrix(a + "out_proj"),
        moe=_moe(p, c, base),
    )


def _attention(p: _Placer, c: ModelConfig, base: str) -> AttentionWeights:
    a = base + "self_attn."
    return AttentionWeights(
        norm=p.dense(base + "input_layernorm", c.hidden_size),
        in_proj=p.stack(a + "q_proj", a + "k_proj", a + "v_proj"),
        q_norm=p.dense(a + "q_norm", c.head_dim),
        k_norm=p.dense(a + "k_norm", c.head_dim),
        out_proj=p.matrix(a + "o_proj"),
        moe=_moe(p, c, base),
    )


def map_weights(config: ModelConfig, policy: Policy) -> WeightsMap:
    """Places every weight of ``config`` in the buffers ``weights.embed``, ``weights.LAYER`` and ``weights.head``.

    CheckpointError where modules that are computed together are quantised differently.
    """
    p = _Placer(config, policy)
    p.open("weights.embed")
    embed = p.matrix("embed_tokens", layout="rows")
    inv_freq = p.view(config.rotary_dim // 2 * BYTES["f32"])
    layers = []
    for i, kind in enumerate(config.layer_types):
        p.open(f"weights.{i}")
        layers.append((_attention if kind == FULL_ATTENTION else _gdn)(p, config, f"layers.{i}."))
    p.open("weights.head")
    norm = p.dense("norm", config.hidden_size)
    head = p.matrix("embed_tokens" if config.tie_word_embeddings else "lm_head")
    return WeightsMap(embed, tuple(layers), norm, head, inv_freq, p.buffers, tuple(p.placed))
