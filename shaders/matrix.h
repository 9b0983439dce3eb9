// SPDX-License-Identifier: Apache-2.0
// The matrix units behind one interface.  A product computes, for a threadgroup of PRODUCT_SIMDGROUPS simdgroups, PARTS
// products of BM rows by BN columns at once: sum[part][m][n] += Σ_k x[m][k]·w[part·BN + n][k] over STEP values of k, x and w
// in threadgroup memory, sums float32 in registers.  Two parts make a pair (gate, up) whose elements lie in one lane.
//
//   STEP                              values of k of one step
//   STAGED                            whether rows have to be in threadgroup memory; else they are read at rows + m·k
//   Sum                               a part's sums.  Those of both parts, `first` and `second`, are variables of the
//                                     caller, for a cooperative tensor can be neither a field nor an element of an array;
//                                     with one part the second is not touched
//   init(first, second, scratch, sg, lane)        sums = 0; scratch: 64 floats for each simdgroup, free afterwards
//   step(first, second, x, w, rows, at)           adds the step at k = `at`; rows of x from `rows.used` on may be left out
//   visit(first, second, epilogue, rows, columns) epilogue(m, n, values[PARTS]) for every m < rows, n < columns
//
// A library compiled as Metal 3.2 multiplies with simdgroup_matrix; one compiled as Metal 4 multiplies bfloat operands with
// tensor operations.  The host asks for Metal 4 where the GPU has units for them and a probe compiles.
// Not here: where x and w come from (gemm.h), the product by tensor operations (tensor.h).
#ifndef LILY_MATRIX_H
#define LILY_MATRIX_H

#include "common.h"

#include <metal_simdgroup_matrix>

// Elements of matrix operands.  Apple7 and Apple8 GPUs have no bfloat arithmetic: there LILY_MATRIX_F32 is defined.
#if defined(LILY_ACT_F32) || defined(LILY_MATRIX_F32)
typedef float operand;
#else
typedef bfloat operand;
#endif

constant constexpr uint PRODUCT_SIMDGROUPS = 4;
constant constexpr uint PRODUCT_THREADS = PRODUCT_SIMDGROUPS * LANES;

// Row pitch of staged operands: 16 bytes more than a row, so that the rows of a fragment lie in different banks.
template <typename T> constexpr uint operand_pitch(uint step) { return step + 16 / sizeof(T); }

// Rows of a tile: `used` of them, in memory at x + index·k with index = gather ? order[r]/active : first + r.
struct TileRows {
    device const act *x;
    device const int *order; // null: rows first, first + 1, ...
    uint first, used, active, k;

    device const act *row(uint r) const {
        const uint at = min(r, used - 1);
        return x + (order ? uint(order[at]) / active : first + at) * k;
    }
};

// ---- fragments ------------------------------------------------------------------------------------------------------

// Row and column, inside an 8x8 fragment, of the two elements that a lane holds.  The language leaves this open, so it
// is asked for: a fragment is loaded that holds its own element numbers.
struct FragmentPlace {
    uint row[2], column[2];
};

// `numbers`: 64 elements of the simdgroup's own.
inline FragmentPlace fragment_place(threadgroup float *numbers, uint lane) {
    numbers[lane] = float(lane);
    numbers[lane + LANES] = float(lane + LANES);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_float8x8 f;
    simdgroup_load(f, numbers, 8);
    FragmentPlace place;
#pragma unroll
    for (uint e = 0; e < 2; e++) {
        const uint number = uint(f.thread_elements()[e]);
        place.row[e] = number / 8;
        place.column[e] = number % 8;
    }
    return place;
}

// ---- simdgroup_matrix -----------------------------------------------------------------------------------------------

// Every simdgroup computes all BM rows of its own columns: a tile that is partly filled costs only the fragments of
// rows that it has, and all simdgroups are done at the same time.
template <typename T, uint PARTS, uint BM, uint BN> struct SimdgroupProduct {
    enum : uint { STEP = 32, STAGED = 1, ROWS = BM / 8, COLUMNS = BN / 8 / PRODUCT_SIMDGROUPS };

    struct Sum {
        simdgroup_float8x8 at[ROWS][COLUMNS];
    };

    FragmentPlace place;
    uint first_column; // of this simdgroup

    void init(thread Sum &first, thread Sum &second, threadgroup float *numbers, uint sg, uint lane) {
        place = fragment_place(numbers + 64 * sg, lane);
        first_column = sg * COLUMNS * 8;
        clear(first);
        if (PARTS == 2) clear(second);
    }

    static void clear(thread Sum &sum) {
#pragma unroll
        for (uint i = 0; i < ROWS; i++)
#pragma unroll
            for (uint j = 0; j < COLUMNS; j++) sum.at[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }

    void step(
        thread Sum &first, thread Sum &second, threadgroup const T *x, threadgroup const T *w, TileRows rows, uint) {
        if (rows.used + 7 >= BM)
            step_rows<true>(first, second, x, w, rows.used);
        else
            step_rows<false>(first, second, x, w, rows.used);
    }

    template <bool FULL>
    void step_rows(thread Sum &first, thread Sum &second, threadgroup const T *x, threadgroup const T *w, uint rows) {
        constexpr uint pitch = operand_pitch<T>(STEP);
#pragma unroll
        for (uint k = 0; k < STEP; k += 8) {
            simdgroup_matrix<T, 8, 8> b[PARTS][COLUMNS];
#pragma unroll
            for (uint part = 0; part < PARTS; part++)
#pragma unroll
                for (uint j = 0; j < COLUMNS; j++)
                    simdgroup_load(
                        b[part][j], w + (part * BN + first_column + 8 * j) * pitch + k, pitch, ulong2(0), true);
#pragma unroll
            for (uint i = 0; i < ROWS; i++) {
                if (!FULL && 8 * i >= rows) continue;
                simdgroup_matrix<T, 8, 8> a;
                simdgroup_load(a, x + 8 * i * pitch + k, pitch);
#pragma unroll
                for (uint j = 0; j < COLUMNS; j++)
                    simdgroup_multiply_accumulate(first.at[i][j], a, b[0][j], first.at[i][j]);
                if (PARTS == 1) continue;
#pragma unroll
                for (uint j = 0; j < COLUMNS; j++)
                    simdgroup_multiply_accumulate(second.at[i][j], a, b[PARTS - 1][j], second.at[i][j]);
            }
        }
    }

    template <typename Epilogue>
    void visit(thread Sum &first, thread Sum &second, Epilogue epilogue, uint rows, uint columns) {
#pragma unroll
        for (uint i = 0; i < ROWS; i++)
#pragma unroll
            for (uint j = 0; j < COLUMNS; j++)
#pragma unroll
                for (uint e = 0; e < 2; e++) {
                    const uint m = 8 * i + place.row[e], n = first_column + 8 * j + place.column[e];
                    float values[PARTS];
                    values[0] = first.at[i][j].thread_elements()[e];
                    if (PARTS == 2) values[PARTS - 1] = second.at[i][j].thread_elements()[e];
                    if (m < rows && n < columns) epilogue(m, n, values);
                }
    }
};

// The product for operands of type T; GATHER: rows do not follow each other in memory.
template <typename T, uint PARTS, uint BM, uint BN, bool GATHER> struct ProductFor {
    typedef SimdgroupProduct<T, PARTS, BM, BN> type;
};

#endif
