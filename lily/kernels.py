# SPDX-License-Identifier: Apache-2.0
"""The kernel table: every kernel's name, arguments, run-time parameters and specialisation constants.

Shaders, C kernels, the plan and the tests are held to this table.  ``c_header()`` turns it into the header that the
C kernels include and that precedes the Metal sources, so that a parameter exists in one place only.
This module imports nothing but the standard library: the build loads it by its path.

Rows are ordered by subject; a heading names the two files that define its kernels.

Notation.  An argument is ``name:access:dtype[shape]``.  Accesses: r, w, rw.  Dtypes:

``act``     what crosses a kernel boundary: float32 on the CPU device, bfloat16 on GPUs (``Policy.act``)
``f32 i32 u32 bf16 u8``  as they say
``q``       a quantised matrix in the device's weight layout (``lily/device/weights.py``)
``qrows``   a quantised matrix in row-major layout on every device (embedding gather)
``Step Request Output``  the structures below

Legal shapes: ``legal`` holds on every device, ``gpu`` for the shaders as well.  ``name=4|8`` one of these, ``name<=8``
at most, ``name%16`` or ``name%group`` a multiple; names are the row's own parameters and constants, ``a*b`` is their
product.  The plan builder checks every dispatch (``lily/plan/legal.py``).

Shapes use M rows of this step, H hidden, Hq/Hkv query and KV heads of D dims, Hk/Hv key and value heads of Dk/Dv dims,
C = 2*Hk*Dk + Hv*Dv convolution channels, T conv taps, E experts, A = experts per token, I/Is widths of a routed and of
the shared expert, V rows of the vocabulary.  Formulas: Qwen3.6-35B-A3B as mlx-lm computes it, all
inside float32.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

MAX_STOP_IDS = 32
MAX_BIAS = 1024
MAX_TOP_LOGPROBS = 20
MAX_SCORE_TOP = 1024
OUTPUT_RING = 64
MAX_EXPERTS = 256  # of a layer, on GPUs: the shaders sort them in threadgroup memory

STATUS_OK, STATUS_STOP, STATUS_NONFINITE = 0, 1, 2

# Structures in device memory; every field is 4 bytes wide.
STRUCTS: dict[str, tuple[str, ...]] = {
    # One per state slot.  Written by the host before a prompt chunk and by ``advance`` for the next step.
    "Step": (
        "i32 position",  # tokens already in the caches = absolute position of row 0
        "i32 rows",  # rows of this step, 1 in decode
        "i32 count",  # tokens generated so far in this request
        "i32 stopped",  # an earlier step sampled a stop id: what follows is ignored by the host
    ),
    # Written by the host at the start of a request; of one that is held to a mask, ``masked`` before each token.
    "Request": (
        "f32 temperature",  # 0 is greedy
        "f32 top_p",  # 1 is off
        "f32 min_p",  # 0 is off
        "i32 top_k",  # 0 is off
        "f32 repetition_penalty",  # 1 is off
        "i32 repetition_window",  # last tokens of prompt and reply that count
        "f32 presence_penalty",
        "f32 frequency_penalty",
        "u32 seed_low",
        "u32 seed_high",
        "i32 vocab",  # ids >= vocab are padding rows and never drawn
        "i32 bias_count",
        "i32 stop_count",
        "i32 top_logprobs",  # 0..MAX_TOP_LOGPROBS
        "i32 masked",  # 1: ids whose bit of the mask is 0 are never drawn; 0: the mask is not read
        f"i32 stop_ids[{MAX_STOP_IDS}]",
    ),
    # One per generated token, in a ring of OUTPUT_RING entries indexed by Step.count.
    "Output": (
        "i32 token",
        "i32 position",  # of the token itself
        "i32 status",  # STATUS_*
        "i32 count",  # written last: count of this token, from 1
        "f32 logprob",  # log-softmax of the raw logits at ``token``
        "i32 top_count",
        f"i32 top_ids[{MAX_TOP_LOGPROBS}]",
        f"f32 top_logprobs[{MAX_TOP_LOGPROBS}]",
    ),
}


@dataclass(frozen=True)
class Arg:
    """One buffer argument; its position in ``Kernel.args`` is its buffer index."""

    name: str
    access: str
    dtype: str
    shape: str

    @property
    def reads(self) -> bool:
        return "r" in self.access

    @property
    def writes(self) -> bool:
        return "w" in self.access


@dataclass(frozen=True)
class Kernel:
    """One row of the table.

    ``params`` are run-time scalars (one struct after the buffers); ``constants`` specialise the pipeline (function
    constants on Metal).  ``legal`` and ``gpu`` are the module's notation for legal shapes.
    ``threads`` of a group on a GPU; 0: the policy chooses them by shape, ``max_threads`` at most.
    ``matrix``: it multiplies on a GPU's matrix unit, whose operands are bfloat16.
    ``ablation``: only the plans of this ablation have it, and a device may be without it.
    ``probe``: it measures the machine, no plan has it.
    """

    name: str
    summary: str
    args: tuple[Arg, ...]
    params: tuple[tuple[str, str], ...] = ()
    constants: tuple[str, ...] = ()
    legal: str = ""
    gpu: str = ""
    threads: int = 0
    max_threads: int = 1024
    matrix: bool = False
    ablation: str | None = None
    probe: bool = False


KERNELS: dict[str, Kernel] = {}


def kernel(name: str, summary: str, args: str, params: str = "", constants: str = "", **more: Any) -> None:
    """Adds a row to the table; ``more`` are fields of ``Kernel``."""
    parsed = []
    for item in args.split():
        m = re.fullmatch(r"(\w+):(r|w|rw):(\w+)(\[[\w+*,/-]*\])?", item)
        if m is None:
            raise ValueError(f"kernel {name}: bad argument {item!r}")
        parsed.append(Arg(m[1], m[2], m[3], m[4] or ""))
    fields = tuple((p.split(":")[0], p.split(":")[1]) for p in params.split())
    if name in KERNELS:
        raise ValueError(f"kernel {name} is in the table twice")
    KERNELS[name] = Kernel(name, " ".join(summary.split()), tuple(parsed), fields, tuple(constants.split()), **more)


_QUANTISED = "bits=4|8 group=32|64|128 k%group"
_SINGLE, _PAIR = "rows_per_group%8", "rows_per_group%4"  # shaders/gemv.h: rows of a simdgroup, halved for gate and up
_TILE = "tile_m=16|32|64 tile_n=32|64"  # shaders/gemm.h
_GDN, _GDN_GPU = "dk%16 dv%16 hv%hk", "dk=16|32|64|128|256 dv<=256 hv%2"
_ATTENTION, _ATTENTION_GPU = "dim%16 hq%hkv", "dim=64|128|256"
_ROUTED_GPU = f"experts<={MAX_EXPERTS} active<=32"  # a lane of a simdgroup for each active expert

# ---- elementwise: lily/cpu/kernels/elementwise.h, shaders/elementwise.metal -----------------------------------------
kernel(
    "embed",
    "x[m] = dequant(table[ids[m]]) for m < Step.rows. Grid: one group a row.",
    "step:r:Step ids:r:i32[M] table:r:qrows[V,H] x:w:act[M,H]",
    "hidden:u32 vocab:u32",
    "bits group",
    legal="bits=4|8 group=32|64|128 hidden%group",
    threads=256,
)
kernel(
    "rmsnorm",
    """y[m] = rmsnorm(x[m], norm), m < Step.rows. rmsnorm(x, w) = x·rsqrt(mean(x²)+eps)·w. Grid: one group a row.""",
    "step:r:Step x:r:act[M,k] norm:r:f32[k] y:w:act[M,k]",
    "k:u32 eps:f32",
    gpu="k%4",
    threads=256,
)
kernel(
    "last_row",
    "y = x[Step.rows-1]: the row whose logits are sampled. One group.",
    "step:r:Step x:r:act[M,H] y:w:act[H]",
    "hidden:u32",
    gpu="hidden%4",
    threads=256,
)
kernel(
    "swiglu",
    "y = silu(gate)·up. Grid: one group a row.",
    "gate:r:act[M,n] up:r:act[M,n] y:w:act[M,n]",
    "n:u32 rows:u32",
    ablation="expert-fusion",
    threads=256,
)

# ---- gemv: lily/cpu/kernels/gemv.h, shaders/gemv.metal --------------------------------------------------------------
kernel(
    "gemv_norm",
    "y = W·rmsnorm(x, norm). Groups share the n outputs in blocks of `rows_per_group`; each recomputes the norm.",
    "x:r:act[k] norm:r:f32[k] w:r:q[n,k] y:w:act[n]",
    "n:u32 k:u32 eps:f32 rows_per_group:u32",
    "bits group",
    legal=_QUANTISED,
    gpu=_SINGLE,
    max_threads=256,
)
kernel(
    "gemv_norm_f32",
    "As gemv_norm with float32 outputs: router logits, head.",
    "x:r:act[k] norm:r:f32[k] w:r:q[n,k] y:w:f32[n]",
    "n:u32 k:u32 eps:f32 rows_per_group:u32",
    "bits group",
    legal=_QUANTISED,
    gpu=_SINGLE,
    max_threads=256,
)
kernel(
    "gemv_norm_swiglu",
    "y = silu(G·h)·(U·h), h = rmsnorm(x, norm); w stacks G over U, each [n,k] padded to the layout's row block.",
    "x:r:act[k] norm:r:f32[k] w:r:q[2*n,k] y:w:act[n]",
    "n:u32 k:u32 eps:f32 rows_per_group:u32",
    "bits group",
    legal=_QUANTISED,
    gpu=_PAIR,
    max_threads=256,
)
kernel(
    "gemv_residual",
    "x += W·y.",
    "y:r:act[k] w:r:q[n,k] x:rw:act[n]",
    "n:u32 k:u32 rows_per_group:u32",
    "bits group",
    legal=_QUANTISED,
    gpu=_SINGLE,
    max_threads=256,
)
kernel(
    "gemv_gated_residual",
    "x += W·(o·sigmoid(gate)); gate is the second half of each head of proj (see attn_prep), k = Hq*D.",
    "o:r:act[k] proj:r:act[pitch] w:r:q[n,k] x:rw:act[n]",
    "n:u32 k:u32 dim:u32 rows_per_group:u32",
    "bits group",
    legal=_QUANTISED + " dim%16",
    gpu=_SINGLE,
    max_threads=256,
)
kernel(
    "gemv",
    "y = W·x, without a fused norm.",
    "x:r:act[k] w:r:q[n,k] y:w:act[n]",
    "n:u32 k:u32 rows_per_group:u32",
    "bits group",
    legal=_QUANTISED,
    gpu=_SINGLE,
    ablation="combine-fusion",
    max_threads=256,
)

# ---- gemm: lily/cpu/kernels/gemm.h, shaders/gemm.metal --------------------------------------------------------------
kernel(
    "gemm",
    "y[m] = W·x[m], written at column `column` of rows of `pitch`. Grid: [blocks of n, blocks of M].",
    "step:r:Step x:r:act[M,k] w:r:q[n,k] y:w:act[M,pitch]",
    "n:u32 k:u32 pitch:u32 column:u32 tile_n:u32",
    "bits group tile_m",
    legal=_QUANTISED,
    gpu=_TILE,
    threads=128,
    matrix=True,
)
kernel(
    "gemm_f32",
    """As gemm with float32 outputs: router logits, head of `score`. Only rows first <= m < min(first+limit, Step.rows),
    x read at row m, y written at row m-first; grid y covers `limit` rows.""",
    "step:r:Step x:r:act[M,k] w:r:q[n,k] y:w:f32[limit,pitch]",
    "n:u32 k:u32 pitch:u32 column:u32 first:u32 limit:u32 tile_n:u32",
    "bits group tile_m",
    legal=_QUANTISED,
    gpu=_TILE,
    threads=128,
)
kernel(
    "gemm_swiglu",
    "y[m] = silu(G·x[m])·(U·x[m]); w stacks G over U as in gemv_norm_swiglu.",
    "step:r:Step x:r:act[M,k] w:r:q[2*n,k] y:w:act[M,n]",
    "n:u32 k:u32 tile_n:u32",
    "bits group tile_m",
    legal=_QUANTISED,
    gpu=_TILE,
    threads=128,
    matrix=True,
)
kernel(
    "gemm_residual",
    "x[m] += W·y[m].",
    "step:r:Step y:r:act[M,k] w:r:q[n,k] x:rw:act[M,n]",
    "n:u32 k:u32 tile_n:u32",
    "bits group tile_m",
    legal=_QUANTISED,
    gpu=_TILE,
    threads=128,
    matrix=True,
)

# ---- gdn: lily/cpu/kernels/gdn.h, shaders/gdn.metal -----------------------------------------------------------------
kernel(
    "gdn_step",
    """One token of Gated DeltaNet, one group a value head: causal conv over (conv_in, proj q|k|v) and silu; q̂ =
    q·rsqrt(Σq²+1e-6)/√Dk, k̂ = k·rsqrt(Σk²+1e-6); β = sigmoid(b); g = exp(-exp(a_log)·softplus(a+dt_bias));
    S ← g·S; d = β(v - S·k̂); S ← S + d k̂ᵀ; o = S·q̂; y = silu(z)·rmsnorm(o, norm).
    proj = q[Hk*Dk] | k[Hk*Dk] | v[Hv*Dv] | z[Hv*Dv] | b[Hv] | a[Hv], pitch `pitch`. State S is [Hv,Dk,Dv] float32,
    conv state [T-1,C] oldest row first. The first value head of a key head writes that key head's conv rows.""",
    """proj:r:act[pitch] conv_w:r:f32[C,T] a_log:r:f32[Hv] dt_bias:r:f32[Hv] norm:r:f32[Dv]
    conv_in:r:act[T-1,C] conv_out:w:act[T-1,C] s_in:r:f32[Hv,Dk,Dv] s_out:w:f32[Hv,Dk,Dv] y:w:act[Hv*Dv]""",
    "pitch:u32 eps:f32",
    "hk hv dk dv taps",
    legal=_GDN + " taps<=8",
    gpu=_GDN_GPU + " dk*dv<=16384",
    max_threads=512,
)
kernel(
    "gdn_conv",
    """Over M rows: causal conv over (conv_in, proj q|k|v), silu, q̂ and k̂ as in gdn_step, v; gates g (decay, float32)
    and β. conv_out = the last T-1 rows of (conv_in, proj). Grid: [Hk, parts], each
    part an equal share of the rows; the group of key head j prepares q̂_j, k̂_j and the value heads and gates of j.""",
    """step:r:Step proj:r:act[M,pitch] conv_w:r:f32[C,T] a_log:r:f32[Hv] dt_bias:r:f32[Hv] conv_in:r:act[T-1,C]
    conv_out:w:act[T-1,C] q:w:act[M,Hk,Dk] k:w:act[M,Hk,Dk] v:w:act[M,Hv,Dv] gate:w:f32[M,Hv] beta:w:f32[M,Hv]""",
    "pitch:u32",
    "hk hv dk dv taps",
    legal=_GDN + " taps<=8",
    gpu=_GDN_GPU,
    max_threads=256,
)
kernel(
    "gdn_scan",
    """The recurrence of gdn_step over M rows in order, state in registers or cache. Grid: [Hv, parts], each part an
    equal share of the Dv columns of the state; the CPU device takes heads whole, in one part.""",
    """step:r:Step q:r:act[M,Hk,Dk] k:r:act[M,Hk,Dk] v:r:act[M,Hv,Dv] gate:r:f32[M,Hv] beta:r:f32[M,Hv]
    s_in:r:f32[Hv,Dk,Dv] s_out:w:f32[Hv,Dk,Dv] o:w:act[M,Hv,Dv]""",
    "",
    "hk hv dk dv",
    legal=_GDN,
    gpu=_GDN_GPU,
    threads=128,
)
kernel(
    "gdn_gate",
    "y[m,h] = silu(z[m,h])·rmsnorm(o[m,h], norm); z is in proj. Grid: one group a row.",
    "step:r:Step o:r:act[M,Hv,Dv] proj:r:act[M,pitch] norm:r:f32[Dv] y:w:act[M,Hv*Dv]",
    "pitch:u32 eps:f32",
    "hk hv dk dv",
    legal=_GDN,
    gpu=_GDN_GPU,
    threads=256,
)
kernel(
    "gdn_scan_blocked",
    "gdn_scan in blocks through memory with barriers. Grid: one group a value head.",
    """step:r:Step q:r:act[M,Hk,Dk] k:r:act[M,Hk,Dk] v:r:act[M,Hv,Dv] gate:r:f32[M,Hv] beta:r:f32[M,Hv]
    s_in:r:f32[Hv,Dk,Dv] s_out:rw:f32[Hv,Dk,Dv] o:w:act[M,Hv,Dv]""",
    "",
    "hk hv dk dv",
    legal=_GDN,
    gpu=_GDN_GPU,
    ablation="register-scan",
    threads=128,
)

# ---- attention_prep: lily/cpu/kernels/attention_prep.h, shaders/attention_prep.metal --------------------------------
kernel(
    "attn_prep",
    """q/k RMSNorm and RoPE of M rows from Step.position on, q out, k and v appended as bf16. proj = (q[D] | gate[D])
    for each of Hq heads, then k[Hkv*D], v[Hkv*D]. RoPE: pairs (i, i+rot/2), i < rot/2, angle = position·inv_freq[i].
    Grid: one group a row.""",
    """step:r:Step proj:r:act[M,pitch] q_norm:r:f32[D] k_norm:r:f32[D] inv_freq:r:f32[rot/2] q:w:act[M,Hq,D]
    k:w:bf16[n,Hkv,D] v:w:bf16[n,Hkv,D]""",
    "pitch:u32 eps:f32",
    "hq hkv dim rot",
    legal=_ATTENTION + " rot%2 rot<=dim",
    gpu=_ATTENTION_GPU,
    threads=256,
)

# ---- attention_decode: lily/cpu/kernels/attention_decode.h, shaders/attention_decode.metal --------------------------
kernel(
    "attn_decode",
    """attn_prep of one token, and softmax(q·kᵀ/√D)·v over one split of `split` positions. Grid: [splits, Hkv]; splits
    that begin beyond the position exit. Partials hold, per split and query head, the unnormalised float32 sum with its
    maximum and its sum of exponentials. k and v are rounded to bf16 by everyone; the split that holds the position
    stores them.""",
    """step:r:Step proj:r:act[pitch] q_norm:r:f32[D] k_norm:r:f32[D] inv_freq:r:f32[rot/2] k:rw:bf16[n,Hkv,D]
    v:rw:bf16[n,Hkv,D] part_o:w:f32[splits,Hq,D] part_ml:w:f32[splits,Hq,2]""",
    "pitch:u32 eps:f32 split:u32",
    "hq hkv dim rot pack fixed",
    legal=_ATTENTION + " rot%2 rot<=dim",
    gpu=_ATTENTION_GPU,
    threads=256,
)
kernel(
    "attn_combine",
    """o[h] = Σ_p exp(m_p-m)·o_p / Σ_p exp(m_p-m)·l_p over the splits up to Step.position, in order. Grid: one group a
    head.""",
    "step:r:Step part_o:r:f32[splits,Hq,D] part_ml:r:f32[splits,Hq,2] o:w:act[Hq,D]",
    "split:u32",
    "hq dim",
    legal="dim%16",
    gpu=_ATTENTION_GPU,
)
kernel(
    "attn_decode_prepared",
    "attn_decode on q prepared by attn_prep, the cache already appended.",
    """step:r:Step q:r:act[Hq,D] k:r:bf16[n,Hkv,D] v:r:bf16[n,Hkv,D] part_o:w:f32[splits,Hq,D]
    part_ml:w:f32[splits,Hq,2]""",
    "split:u32",
    "hq hkv dim pack fixed coalesced",
    legal=_ATTENTION,
    gpu=_ATTENTION_GPU,
    ablation="attention-fusion",
    threads=256,
)

# ---- attention_prefill: lily/cpu/kernels/attention_prefill.h, shaders/attention_prefill.metal -----------------------
kernel(
    "attn_prefill",
    """o[m,h] = softmax(q·kᵀ/√D over positions ≤ Step.position+m)·v · sigmoid(gate). Positions are visited in splits of
    `split` as attn_decode does and combined in order, so that a row's result does not depend on M.
    Grid: [blocks of tile_m rows, Hkv].""",
    "step:r:Step q:r:act[M,Hq,D] proj:r:act[M,pitch] k:r:bf16[n,Hkv,D] v:r:bf16[n,Hkv,D] o:w:act[M,Hq*D]",
    "pitch:u32 split:u32 tile_m:u32",
    "hq hkv dim",
    legal=_ATTENTION,
    gpu=_ATTENTION_GPU,
    threads=256,
    matrix=True,
)

# ---- route: lily/cpu/kernels/route.h, shaders/route.metal -----------------------------------------------------------
kernel(
    "route_topk",
    """Per row, the top-A of softmax(logits[m,0:E]), ties to the lower index; weights renormalised over the A unless
    `renorm` is 0. Grid: one group a row.""",
    "step:r:Step logits:r:f32[M,E+1] ids:w:i32[M,A] weights:w:f32[M,A]",
    "experts:u32 active:u32 renorm:u32",
    legal="active<=experts",
    gpu=_ROUTED_GPU,
    threads=32,
)
kernel(
    "route_group",
    """Groups the M*A assignments by expert, rows of one expert in ascending order of m*A+a: offsets[e] is an exclusive
    scan of the histogram with offsets[E] = M*A; order[j] is the assignment m*A+a at sorted place j; blocks lists
    (expert, first place) for every tile of `tile_m` places of one expert, then (-1, 0) sentinels up to the grid's end.
    One group.""",
    "step:r:Step ids:r:i32[M,A] offsets:w:i32[E+1] order:w:i32[M*A] blocks:w:i32[B,2]",
    "experts:u32 active:u32 tile_m:u32 max_blocks:u32",
    legal="active<=experts",
    gpu=_ROUTED_GPU,
    threads=1024,
)

# ---- moe_decode: lily/cpu/kernels/moe_decode.h, shaders/moe_decode.metal --------------------------------------------
kernel(
    "moe_gate_up",
    """The choice of route_topk for one row, made again by every group; group (e, block) then computes
    act[e] = silu(G_i·h)·(U_i·h) for the e-th expert i, h = rmsnorm(x, norm). w holds E matrices, G over U each padded
    to the row block. Group (0,0) stores ids and weights. Grid: [blocks of rows_per_group, A].""",
    """x:r:act[k] norm:r:f32[k] logits:r:f32[E+1] w:r:q[E,2*n,k] act:w:act[A,n] ids:w:i32[A] weights:w:f32[A]""",
    "n:u32 k:u32 eps:f32 experts:u32 active:u32 renorm:u32 rows_per_group:u32",
    "bits group",
    legal=_QUANTISED + " active<=experts",
    gpu=_PAIR + " " + _ROUTED_GPU,
    max_threads=256,
)
kernel(
    "moe_down",
    """x += Σ_e weights[e]·(D_e·act[e]) + sigmoid(logits[E])·(Ds·shared). The sum over e runs in order from 0, then the
    shared expert, then the residual: r = ((Σ) + shared) + x.""",
    """act:r:act[A,k] ids:r:i32[A] weights:r:f32[A] logits:r:f32[E+1] w:r:q[E,n,k] shared:r:act[ks] w_shared:r:q[n,ks]
    x:rw:act[n]""",
    "n:u32 k:u32 ks:u32 experts:u32 active:u32 rows_per_group:u32",
    "bits group shared_bits shared_group",
    legal=_QUANTISED + " shared_bits=4|8 shared_group=32|64|128 ks%shared_group",
    gpu=_SINGLE,
    max_threads=256,
)
kernel(
    "moe_gemv",
    """y[e] = W_i·x[e] (x shared by all e when `broadcast`), i = ids[e]; one of gate, up, down alone: rows
    first..first+n of an expert's `stride` stored rows, both multiples of the row block.
    Grid: [blocks of rows_per_group, A].""",
    "x:r:act[A,k] ids:r:i32[A] w:r:q[E,stride,k] y:w:act[A,n]",
    "n:u32 k:u32 first:u32 stride:u32 broadcast:u32 rows_per_group:u32",
    "bits group",
    legal=_QUANTISED,
    gpu=_SINGLE,
    ablation="expert-fusion",
    max_threads=256,
)

# ---- moe_prefill: lily/cpu/kernels/moe_prefill.h, shaders/moe_prefill.metal -----------------------------------------
kernel(
    "moe_gemm_gate_up",
    """For sorted place j of expert e, row m = order[j]/A: y[j] = silu(G_e·x[m])·(U_e·x[m]); w as in moe_gate_up.
    Grid: [blocks of n, blocks of the block map].""",
    """step:r:Step x:r:act[M,k] offsets:r:i32[E+1] order:r:i32[M*A] blocks:r:i32[B,2] w:r:q[E,2*n,k] y:w:act[M*A,n]""",
    "n:u32 k:u32 experts:u32 active:u32 tile_n:u32",
    "bits group tile_m",
    legal=_QUANTISED,
    gpu=_TILE,
    threads=128,
    matrix=True,
)
kernel(
    "moe_gemm_down",
    "For sorted place j of expert e: y[order[j]] = D_e·x[j]. Grid as moe_gemm_gate_up.",
    """step:r:Step x:r:act[M*A,k] offsets:r:i32[E+1] order:r:i32[M*A] blocks:r:i32[B,2] w:r:q[E,n,k] y:w:act[M*A,n]""",
    "n:u32 k:u32 experts:u32 active:u32 tile_n:u32",
    "bits group tile_m",
    legal=_QUANTISED,
    gpu=_TILE,
    threads=128,
    matrix=True,
)
kernel(
    "moe_combine",
    "x[m] = ((Σ_a weights[m,a]·y[m*A+a]) + sigmoid(logits[m,E])·shared[m]) + x[m]. Grid: one group a row.",
    "step:r:Step y:r:act[M*A,H] weights:r:f32[M,A] logits:r:f32[M,E+1] shared:r:act[M,H] x:rw:act[M,H]",
    "hidden:u32 experts:u32 active:u32",
    gpu="hidden%4",
    threads=256,
)

# ---- moe_expanded: lily/cpu/kernels/moe_expanded.h, shaders/moe_expanded.metal --------------------------------------
kernel(
    "expand",
    "Dequantises the matrices of one module to bf16 in memory. Grid: one group a row.",
    "w:r:q[E,n,k] y:w:bf16[E,n,k]",
    "experts:u32 n:u32 k:u32",
    "bits group",
    legal=_QUANTISED,
    ablation="fused-dequantisation",
    threads=128,
)
kernel(
    "moe_gemm_expanded",
    """As moe_gemm_down on expanded bf16 matrices; with `gather` y[j] = W_e·x[order[j]/A], as moe_gemm_gate_up reads its
    rows. W_e is rows first..first+n of an expert's `stride` rows.""",
    """step:r:Step x:r:act[M*A,k] offsets:r:i32[E+1] order:r:i32[M*A] blocks:r:i32[B,2] w:r:bf16[E,stride,k]
    y:w:act[M*A,n]""",
    "n:u32 k:u32 first:u32 stride:u32 experts:u32 active:u32 gather:u32 tile_n:u32",
    "tile_m",
    legal="k%32",
    gpu=_TILE,
    ablation="fused-dequantisation",
    threads=128,
    matrix=True,
)

# ---- sample: lily/cpu/kernels/sample.h, shaders/sample.metal --------------------------------------------------------
kernel(
    "argmax",
    """Group i finds the greatest of its `slice` logits (ties: lowest id, ids >= Request.vocab excluded):
    best[i] = (value, id as bits), flags[i] = 1 if any of them is not finite (found by bits).""",
    "request:r:Request logits:r:f32[V] best:w:f32[G,2] flags:w:i32[G]",
    "slice:u32",
    threads=256,
)
kernel(
    "sample_logits",
    """Group i, its slice: y = logits + bias; then, for ids among the last Request.repetition_window of history (prompt
    and reply, positions < Step.position+Step.rows), y>0 ? y/penalty : y·penalty; then - presence·[counts>0]
    - frequency·counts; then, if Request.masked, -inf where bit id%32 of mask[id/32] is 0. Ids >= Request.vocab take no
    part. stats[i] = (max of raw logits, Σexp(raw - max), max of y, Σexp(y - max)), a sum of nothing being 0; flags as
    in argmax.""",
    """step:r:Step request:r:Request logits:r:f32[V] bias_ids:r:i32[b] bias_values:r:f32[b] history:r:i32[n]
    counts:r:u32[V] mask:r:u32[V/32] y:w:f32[V] stats:w:f32[G,4] flags:w:i32[G]""",
    "slice:u32",
    threads=256,
)
kernel(
    "sample_draw",
    """Gumbel-max draw: group i's best of y/temperature - log(-log(u)) over kept ids of its slice, u = the uniform of
    (seed, position of the new token, id) by Philox-4x32-10; temperature 0: best of y. best as in argmax.""",
    "step:r:Step request:r:Request y:r:f32[V] cut:r:f32[2] best:w:f32[G,2]",
    "slice:u32",
    threads=256,
)
kernel(
    "advance",
    """Reduces best[0:groups], then: token → outputs[count % OUTPUT_RING], next ids[0], history[position], counts;
    next Step = (position+rows, 1, count+1, stopped or token in stop_ids). Any flag set: status STATUS_NONFINITE, no
    token is appended. logprob = logit[token] - log-sum-exp of raw logits from stats when `logprobs` is 1. One
    group.""",
    f"""step:r:Step next_step:w:Step request:r:Request best:r:f32[G,2] flags:r:i32[G] logits:r:f32[V] stats:r:f32[G,4]
    top_ids:r:i32[{MAX_TOP_LOGPROBS}] top_values:r:f32[{MAX_TOP_LOGPROBS}] next_ids:w:i32[1] history:w:i32[n]
    counts:rw:u32[V] outputs:w:Output[{OUTPUT_RING}]""",
    "groups:u32 logprobs:u32",
    threads=32,
)

# ---- sample_filter: lily/cpu/kernels/sample_filter.h, shaders/sample_filter.metal -----------------------------------
kernel(
    "sample_filter",
    """Exact filters over the whole vocabulary in mlx-lm's order, on probabilities at temperature 1: top-p keeps the
    smallest set of most likely ids whose probability reaches top_p; min-p keeps p >= min_p·max p; top-k keeps k of the
    rest. Ties at a boundary: lower ids first. cut = (threshold value, highest id kept among those equal to it as bits):
    an id is kept iff y > threshold, or y == threshold and id <= that id. One group.""",
    "request:r:Request y:r:f32[V] stats:r:f32[G,4] cut:w:f32[2]",
    "count:u32 groups:u32",
    threads=1024,
)

# ---- logprobs: lily/cpu/kernels/logprobs.h, shaders/logprobs.metal --------------------------------------------------
kernel(
    "top_logprobs",
    "The Request.top_logprobs greatest raw logits in order (ties: lower id): top_ids, top_values. One group.",
    f"request:r:Request logits:r:f32[V] top_ids:w:i32[{MAX_TOP_LOGPROBS}] top_values:w:f32[{MAX_TOP_LOGPROBS}]",
    "count:u32",
    threads=1024,
)
kernel(
    "score_rows",
    """Per row m, first <= m < min(first+limit, Step.rows), of logits (row m-first): logprobs[m] = logits[target[m]] -
    log-sum-exp, and the `top` greatest log-probabilities with ids (ties: lower id); ids >= Request.vocab are left out.
    target < 0: no log-probability (0). flags[m] as in argmax. Grid: one group a row of `limit`.""",
    """step:r:Step request:r:Request logits:r:f32[limit,V] target:r:i32[M] logprobs:w:f32[M] top_ids:w:i32[M,top]
    top_logprobs:w:f32[M,top] flags:w:i32[M]""",
    "count:u32 top:u32 first:u32 limit:u32",
    threads=256,
)

# ---- probe: lily/cpu/kernels/probe.h, shaders/probe.metal -----------------------------------------------------------
kernel(
    "copy",
    "dst = src. Grid: one group per 64 KiB.",
    "src:r:u8[n] dst:w:u8[n]",
    "bytes:u32",
    legal="bytes%16",
    probe=True,
    threads=256,
)
kernel(
    "probe_level",
    "x[0] += 1: next to nothing, so that a list of these costs what its dispatches and barriers cost. One group.",
    "x:rw:u32[4]",
    probe=True,
    threads=32,
)
kernel(
    "probe_read",
    """sums[i] = the wrapping sum of the 32-bit words of block i of src; each byte is read once. Grid: one group a
    block.""",
    "src:r:u8[bytes] sums:w:u32[G]",
    "bytes:u32 block:u32",
    legal="bytes%16 block%64",
    probe=True,
    threads=256,
)
kernel(
    "probe_matrix",
    """y[i] = rounds·x·wᵀ by `rounds` accumulations on the unit that multiplies 4-bit matrices, operands in registers or
    next to them. Grid: one group an i.""",
    "x:r:act[64,64] w:r:act[64,64] y:w:f32[G,64,64]",
    "rounds:u32",
    probe=True,
    threads=128,
)

_C_TYPES = {"u32": "uint32_t", "i32": "int32_t", "f32": "float"}


def _c_struct(name: str, fields: list[str]) -> str:
    lines = []
    for f in fields:
        ctype, rest = f.split(" ", 1)
        lines.append(f"    {_C_TYPES[ctype]} {rest};")
    return f"typedef struct {name} {{\n" + "\n".join(lines) + f"\n}} {name};\n"


def c_header() -> str:
    """The table as C, legal in C11 and in the Metal Shading Language.

    For kernel ``k``: ``struct k_params``, ``enum`` of buffer indices ``k_ARG_NAME`` and of constants ``k_C_NAME``;
    plus ``LILY_KERNEL_LIST(X)`` naming all kernels, ``LILY_KERNEL_TABLE(X)`` with X(name, number of arguments, names of
    constants, bytes of params), and the structures of device memory.
    """
    guard = "LILY_KERNEL_PARAMS_H"
    out = ["// Generated from lily/kernels.py: do not edit.", f"#ifndef {guard}", f"#define {guard}"]
    for name in ("MAX_STOP_IDS", "MAX_BIAS", "MAX_TOP_LOGPROBS", "MAX_SCORE_TOP", "OUTPUT_RING", "MAX_EXPERTS"):
        out.append(f"#define LILY_{name} {globals()[name]}")
    for name in ("STATUS_OK", "STATUS_STOP", "STATUS_NONFINITE"):
        out.append(f"#define LILY_{name} {globals()[name]}")
    for name, fields in STRUCTS.items():
        out.append(_c_struct(name, list(fields)))
    for k in KERNELS.values():
        if k.params:
            out.append(_c_struct(f"{k.name}_params", [f"{t} {n}" for n, t in k.params]))
        for prefix, names in (("", [a.name for a in k.args]), ("C_", list(k.constants))):
            if names:
                values = (f"{k.name}_{prefix}{n.upper()} = {i}" for i, n in enumerate(names))
                out.append("enum { " + ", ".join(values) + " };")
    out.append("#define LILY_KERNEL_LIST(X) \\\n" + " \\\n".join(f"    X({n})" for n in KERNELS))
    rows = [f'    X({k.name}, {len(k.args)}, "{" ".join(k.constants)}", {4 * len(k.params)})' for k in KERNELS.values()]
    out.append("#define LILY_KERNEL_TABLE(X) \\\n" + " \\\n".join(rows))
    out.append("#endif")
    return "\n".join(out) + "\n"
