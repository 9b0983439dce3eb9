// SPDX-License-Identifier: Apache-2.0
// From tiles to products: ranges of blocks of a matrix times packed rows, and what is done with a finished tile.
// Not here: the arithmetic (tile.h), kernels (gemv.h, gemm.h, moe_*.h).
#ifndef LILY_CPU_PRODUCT_H
#define LILY_CPU_PRODUCT_H

#include "tile.h"

// Weight blocks that stay in cache while the panels pass by, and rows that are packed at a time.
#if TILE_AMX
#define SWEEP_BLOCKS 4
#define SWEEP_ROWS 128
#else
#define SWEEP_BLOCKS 8
#define SWEEP_ROWS 512
#endif

typedef enum {
    STORE,  // y = W·x
    ADD,    // y += W·x
    SWIGLU, // y = silu(G·x)·(U·x); the blocks of U follow those of G
} epilogue;

typedef struct {
    quantised w;
    uint32_t n; // outputs
    epilogue end;
} product;

INLINE product product_of(const cpu_call *call, int arg, uint32_t n, uint32_t k, epilogue end) {
    // All matrix kernels have bits and group as their first constants, those of many rows tile_m as their third.
    return (product){{call->arg[arg], k, (uint32_t)call->constant[0], (uint32_t)call->constant[1]}, n, end};
}

typedef struct {
    uint8_t *data;
    uint32_t rows, panels; // panels differ by at most one row
} packed;

INLINE uint32_t panel_first(const packed *x, uint32_t panel) {
    return (uint32_t)((uint64_t)x->rows * panel / x->panels);
}

INLINE packed packed_at(void *memory, uint32_t rows) {
    return (packed){memory, rows, (rows + PANEL_ROWS - 1) / PANEL_ROWS};
}

INLINE size_t panel_pitch(const quantised *w, const packed *x) {
    return panel_bytes(w, x->rows < PANEL_ROWS ? x->rows : PANEL_ROWS);
}

INLINE size_t packed_bytes(const quantised *w, uint32_t rows) {
    const packed x = packed_at(NULL, rows);
    return x.panels * panel_pitch(w, &x);
}

SHARED void pack_rows(const quantised *w, const float *const *x, const packed *to) {
    const size_t pitch = panel_pitch(w, to);
    for (uint32_t i = 0; i < to->panels; i++) {
        const uint32_t first = panel_first(to, i), rows = panel_first(to, i + 1) - first;
        pack_panel(w, x + first, rows, to->data + i * pitch);
    }
}

// Writes 16 outputs, fewer at the end of the row y.
INLINE void emit(const product *p, lanes value, lanes up, uint32_t block, float *y) {
    const uint32_t left = p->n - block * BLOCK_ROWS, count = left < BLOCK_ROWS ? left : BLOCK_ROWS;
    float *at = y + (size_t)block * BLOCK_ROWS, old[BLOCK_ROWS] = {0};
    if (p->end == SWIGLU) {
        UNROLL
        for (int i = 0; i < LANES / VL; i++) value.part[i] = vf_silu(value.part[i]) * up.part[i];
    }
    if (p->end == ADD) {
        memcpy(old, at, count * sizeof *at);
        value = lanes_add(lanes_load(old), value);
    }
    if (count == BLOCK_ROWS) {
        lanes_store(at, value);
    } else {
        lanes_store(old, value);
        memcpy(at, old, count * sizeof *at);
    }
}

// Outputs of blocks [begin, end) for one packed row.
SHARED void sweep_row(const product *p, uint32_t begin, uint32_t end, const void *panel, float *y) {
    const size_t stride = block_bytes(&p->w), up = blocks_of(p->n) * stride;
    const uint32_t step = p->end == SWIGLU ? 1 : 2; // a pair is G and U, or two neighbours
    tiles_begin();
    for (uint32_t b = begin; b < end; b += step) {
        lanes out[2];
        if (b + step > end) {
            tile_one(&p->w, block_at(&p->w, b), panel, out);
            emit(p, out[0], out[0], b, y);
            break;
        }
        tile_pair(&p->w, block_at(&p->w, b), step == 1 ? up : stride, panel, out);
        emit(p, out[0], out[1], b, y);
        if (step == 2) emit(p, out[1], out[1], b + 1, y);
    }
    tiles_end();
}

// Bytes that sweep_rows needs for opened blocks; a multiple of 64.
INLINE size_t sweep_scratch(const product *p) { return SWEEP_BLOCKS * (p->end == SWIGLU ? 2 : 1) * open_bytes(&p->w); }

INLINE void sweep_block(
    const product *p, uint32_t block, const uint8_t *opened, const void *panel, uint32_t rows, float *const *y) {
    lanes out[PANEL_ROWS], up[PANEL_ROWS];
    // Rows lie far apart, so nothing but this fetches the lines that will be written.
    for (uint32_t m = 0; m < rows; m++) __builtin_prefetch(y[m] + (size_t)block * BLOCK_ROWS, 1);
    tile_rows(&p->w, block_at(&p->w, block), opened, panel, rows, out);
    if (p->end == SWIGLU)
        tile_rows(&p->w, block_at(&p->w, blocks_of(p->n) + block), opened ? opened + open_bytes(&p->w) : NULL, panel,
            rows, up);
    for (uint32_t m = 0; m < rows; m++) emit(p, out[m], p->end == SWIGLU ? up[m] : out[m], block, y[m]);
}

INLINE void open_blocks(const product *p, uint32_t begin, uint32_t end, uint8_t *scratch) {
    const size_t bytes = open_bytes(&p->w);
    if (!bytes) return;
    for (uint32_t b = begin; b < end; b++) {
        open_block(&p->w, block_at(&p->w, b), scratch);
        scratch += bytes;
        if (p->end != SWIGLU) continue;
        open_block(&p->w, block_at(&p->w, blocks_of(p->n) + b), scratch);
        scratch += bytes;
    }
}

// Outputs of blocks [begin, end) for packed rows; y[m] is where row m's outputs begin.
SHARED void sweep_rows(
    const product *p, uint32_t begin, uint32_t end, const packed *x, float *const *y, uint8_t *scratch) {
    if (x->rows == 1) {
        sweep_row(p, begin, end, x->data, y[0]);
        return;
    }
    const size_t pitch = panel_pitch(&p->w, x), opened = sweep_scratch(p) / SWEEP_BLOCKS;
    if (x->panels == 1) scratch = NULL; // nothing to be had from opening blocks
    tiles_begin();
    for (uint32_t some = begin; some < end; some += SWEEP_BLOCKS) {
        const uint32_t stop = end - some < SWEEP_BLOCKS ? end : some + SWEEP_BLOCKS;
        if (scratch) open_blocks(p, some, stop, scratch);
        for (uint32_t i = 0; i < x->panels; i++) {
            const uint32_t first = panel_first(x, i), rows = panel_first(x, i + 1) - first;
            for (uint32_t b = some; b < stop; b++)
                sweep_block(p, b, scratch ? scratch + (b - some) * opened : NULL, x->data + i * pitch, rows, y + first);
        }
    }
    tiles_end();
}

// Blocks of `n` outputs that belong to groups [begin, end) of `per_group` outputs each.
typedef struct {
    uint32_t begin, end;
} block_range;

INLINE uint32_t group_block(uint32_t group, uint32_t per_group, uint32_t n) {
    const uint64_t row = (uint64_t)group * per_group;
    return blocks_of(row < n ? (uint32_t)row : n);
}

INLINE block_range blocks_of_groups(uint32_t begin, uint32_t end, uint32_t per_group, uint32_t n) {
    return (block_range){group_block(begin, per_group, n), group_block(end, per_group, n)};
}

#endif
