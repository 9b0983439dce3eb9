# SPDX-License-Identifier: Apache-2.0
"""Every threshold and tile size, per device: shape and device → kernel, tile, layout.

Pure data and pure functions; nothing here opens a device.  A number that decides a route lives here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from lily.errors import InvalidRequestError

# Ablations (Engine(ablate=...), --ablate): each takes one mechanism away; the text is what runs instead.
ABLATIONS: dict[str, str] = {
    "overlap": "a barrier before every dispatch instead of only where a later kernel needs an earlier result",
    "handoff": "the host reads each token before it submits the next step",
    "gdn-fusion": "decode: convolution, recurrence and gated norm of a GDN layer as three kernels",
    "attention-fusion": "decode: q/k norm, RoPE and the KV append as a kernel of their own before attention",
    "expert-fusion": "decode: gate, up and activation of the routed experts as kernels of their own",
    "combine-fusion": "decode: the experts' down projections and their weighted sum as kernels of their own",
    "gqa-packing": "decode attention: every query head loads K and V for itself",
    "coalesced-kv": "decode attention: each thread reads whole rows of K and V (implies attention-fusion off)",
    "fixed-blocks": "decode attention: the general split at every context length",
    "register-scan": "prefill: the recurrence in blocks through memory",
    "fused-dequantisation": "prefill: expert matrices are expanded to bfloat16 in memory before they are multiplied",
    "resident-routing": "prefill: the host groups rows by expert, so every MoE layer stops and waits for it",
    "adaptive-tiles": "prefill: expert tiles of 16 rows whatever the load",
}


NEVER = 1 << 62  # a number of tokens or bytes that nothing reaches
SIMD = 32  # threads of a simdgroup
GEMV_ROWS = 8  # rows of a matrix that a simdgroup computes; GEMV_ROWS in shaders/gemv.h
GEMV_COLUMNS = 512  # columns it takes at a time
GEMV_PARTS = 4  # simdgroups that share columns, at most


@dataclass(frozen=True)
class Policy:
    """Choices for one device.

    ``rows_invariant``: kernels give the same bits for any number of rows, so a state made by decode may serve another
    request and chunk edges are free (architecture.md, Reuse).
    """

    device: str
    gpu: bool  # its kernels are those of shaders/, with their legal shapes
    act: str  # dtype of what crosses a kernel boundary: f32 or bf16
    layout: str  # of quantised matrices: rows16 or rows (lily/weights.py)
    row_block: int  # rows a matrix is padded to
    rows_invariant: bool
    gemv_rows: int  # outputs a group of a decode projection computes, where there are plenty
    gemv_threads: int
    moe_rows: int  # outputs a group of a decode expert kernel computes
    gemv_simdgroups: int  # a decode projection should have: else several share columns; 0: there are none
    conv_rows: int  # rows a group of gdn_conv takes
    scan_columns: int  # columns of a head's state that a group of gdn_scan takes
    attention_split: int  # positions of the cache that a group of decode attention reads, at least
    attention_splits: int  # groups that share a cache, at most: each costs partial results
    long_context: int  # from here on the fixed-block layout of decode attention
    long_split: int
    pack: int  # query heads that share one KV row load
    gemm_tiles: tuple[tuple[int, int], ...]  # (rows from, rows of a dense GEMM tile), ascending
    moe_tiles: tuple[tuple[int, int], ...]  # (rows per expert from, tile rows), ascending
    tile_n: int  # outputs of a tile
    narrow_tiles: bool  # tiles of up to 16 rows, and tiles of two matrices, have half of tile_n outputs
    attention_queries: int  # rows times query heads of one KV head in a prefill attention tile
    sample_slice: int  # logits one group of the sampler reads
    chunks: tuple[tuple[int, int], ...]  # (position from, rows of a prefill chunk that begins there), ascending
    part_rows: int  # a bucket; a chunk with more rows goes in parts of about as much work, others run between them
    # Rows run once, before the first larger chunk, to measure the rate by which submissions are cut; 0: never.
    calibration_rows: int
    buckets: tuple[int, ...]  # rows a prefill list is recorded for, ascending
    message_gap: int  # tokens from one edge of a prompt to a message that begins on the next one, at least
    kv_step: int  # the KV cache grows to multiples of this many tokens
    score_rows: int  # rows of logits that ``score`` holds at once
    canonical: bool  # a prompt is cut where its tokens alone say it (run/chunks.py); it must be if not rows_invariant
    ablate: frozenset[str] = frozenset()

    def ablated(self, name: str) -> bool:
        """Whether the ablation ``name`` was asked for."""
        return name in self.ablate

    def bucket(self, rows: int) -> int:
        """The smallest recorded row count that holds ``rows``."""
        return next(b for b in self.buckets if b >= rows)

    def parts(self, rows: int) -> int:
        """In how many parts a chunk goes whose list is recorded for ``rows`` rows."""
        return -(-rows // self.part_rows)

    def chunk_edges(self, tokens: int) -> list[int]:
        """Where a prompt of ``tokens`` tokens is cut: a grid of absolute positions, without its start and end.

        Far from the start chunks are small, because one dispatch of attention reads all that came before, and macOS
        stops what takes too long: 2,048 rows at 32,768 positions are 1.1 TFLOP in a layer of the 35B model.
        """
        edges, at = [], 0
        while (at := at + _from(self.chunks, at)) < tokens:
            edges.append(at)
        return edges

    def gemv_shape(self, n: int, k: int, *, pair: bool = False, matrices: int = 1) -> tuple[int, int]:
        """(outputs, threads) of a group of a decode projection from ``k`` columns to ``n`` outputs.

        ``pair``: an output needs a row of two matrices; ``matrices`` run side by side.
        """
        if not self.gemv_simdgroups:
            return self.gemv_rows, self.gemv_threads
        outputs = GEMV_ROWS // 2 if pair else GEMV_ROWS
        blocks, parts = matrices * -(-n // outputs), 1
        while parts < GEMV_PARTS and blocks * parts < self.gemv_simdgroups and GEMV_COLUMNS * parts < k:
            parts *= 2
        return (2 * outputs, 2 * SIMD) if parts == 1 else (outputs, parts * SIMD)

    @property
    def head_shape(self) -> tuple[int, int]:
        """(outputs, threads) of a group of the head, which has plenty of outputs."""
        return self.gemv_rows, self.gemv_threads

    def moe_down_shape(self, active: int) -> tuple[int, int]:
        """(outputs, threads) of a group of moe_down, whose simdgroups share ``active`` experts and the shared one."""
        if not self.gemv_simdgroups:
            return self.moe_rows, self.gemv_threads
        parts = min(range(1, GEMV_PARTS + 1), key=lambda p: (-(-(active + 1) // p), p))
        return GEMV_ROWS, parts * SIMD

    def gdn_step_threads(self, dk: int, dv: int) -> int:
        """Threads of a group of gdn_step: a simdgroup holds 32 by 32 elements of the state (gdn_place in gdn.metal)."""
        return min(512, SIMD * -(-dk // 32) * -(-dv // 32))

    def gdn_conv_threads(self, heads_per_key: int) -> int:
        """Threads of a group of gdn_conv: a simdgroup for q, one for k, and one for each value head of the key head."""
        return min(256, SIMD * (2 + heads_per_key))

    def combine_threads(self, head_dim: int) -> int:
        """Threads of a group of attn_combine: a thread adds up four dims, and several walk over the splits."""
        return min(1024, 4 * head_dim)

    def gemm_tile(self, rows: int) -> int:
        """Tile rows of a dense GEMM over ``rows`` rows."""
        return _from(self.gemm_tiles, rows)

    def moe_tile(self, rows: int, experts: int, active: int) -> int:
        """Tile rows of the grouped GEMM, by the mean number of rows an expert gets."""
        return 16 if self.ablated("adaptive-tiles") else _from(self.moe_tiles, rows * active / experts)

    def tile_columns(self, tile_m: int, parts: int = 1) -> int:
        """Outputs of a GEMM tile of ``tile_m`` rows; ``parts``: matrices computed together (2 for gate and up)."""
        return self.tile_n // 2 if self.narrow_tiles and (tile_m <= 16 or parts == 2) else self.tile_n

    def attention_rows(self, heads_per_kv: int) -> int:
        """Rows of a prefill attention tile."""
        return max(1, self.attention_queries // heads_per_kv)

    def split(self, kv_tokens: int, head_dim: int, heads_per_kv: int) -> tuple[int, bool]:
        """(positions of a split, fixed-block layout?) of decode attention for a cache of ``kv_tokens`` tokens."""
        long = kv_tokens >= self.long_context and not self.ablated("fixed-blocks")
        if long and head_dim == 256 and heads_per_kv == 8:
            return self.long_split, True
        split = self.attention_split
        while split * self.attention_splits < kv_tokens:
            split *= 2
        return split, False

    def kv_tokens(self, tokens: int) -> int:
        """Tokens to reserve when ``tokens`` must fit: steps grow with the size, so that few copies are made."""
        step = self.kv_step
        while step * 8 < tokens:
            step *= 2
        return -(-tokens // step) * step


def _from(table: tuple[tuple[int, int], ...], value: float) -> int:
    """The choice of the last entry that begins at or below ``value``."""
    return [choice for start, choice in table if value >= start][-1]


_BUCKETS = (8, 32, 64, 128, 256, 512)

POLICIES: dict[str, Policy] = {
    "cpu": Policy(
        device="cpu", gpu=False, act="f32", layout="rows16", row_block=16, rows_invariant=True,
        gemv_rows=16, gemv_threads=1, moe_rows=16, gemv_simdgroups=0, conv_rows=1, scan_columns=NEVER,
        attention_split=256, attention_splits=NEVER, long_context=NEVER, long_split=256, pack=8,
        gemm_tiles=((0, 512),), moe_tiles=((0, 32),), tile_n=16, narrow_tiles=False, attention_queries=64,
        sample_slice=16384, chunks=((0, 512),), part_rows=512, calibration_rows=0, buckets=_BUCKETS, message_gap=256,
        kv_step=1024, score_rows=64, canonical=False,
    ),
    "metal": Policy(
        device="metal", gpu=True, act="bf16", layout="rows", row_block=1, rows_invariant=False,
        gemv_rows=16, gemv_threads=64, moe_rows=8, gemv_simdgroups=1024, conv_rows=16, scan_columns=16,
        attention_split=128, attention_splits=64, long_context=32768, long_split=512, pack=4,
        gemm_tiles=((0, 16), (17, 32), (256, 64)), moe_tiles=((0, 16), (12, 32), (48, 64)), tile_n=64,
        narrow_tiles=True, attention_queries=32,
        sample_slice=4096, chunks=((0, 2048), (32768, 1024), (65536, 512)), part_rows=512, calibration_rows=256,
        buckets=(*_BUCKETS, 1024, 2048), message_gap=256, kv_step=4096, score_rows=256, canonical=True,
    ),
}  # fmt: skip


def policy_for(device: str, ablate: Iterable[str] = ()) -> Policy:
    """The policy of ``device`` with some mechanisms switched off; InvalidRequestError for an unknown name."""
    if device not in POLICIES:
        raise InvalidRequestError(f"unknown device {device!r}; known: {', '.join(POLICIES)}")
    ablate = frozenset(ablate)
    for name in ablate:
        if name not in ABLATIONS:
            raise InvalidRequestError(f"unknown ablation {name!r}; known: {', '.join(ABLATIONS)}")
    policy = POLICIES[device]
    # Decode multiplies by the weights as they are, prefill then by rounded ones.
    invariant = policy.rows_invariant and "fused-dequantisation" not in ablate
    return replace(policy, ablate=ablate, rows_invariant=invariant, canonical=policy.canonical or not invariant)
