// SPDX-License-Identifier: Apache-2.0
// The product of matrix.h by Metal 4 tensor operations, for bfloat operands: what the neural accelerators of M5-class GPUs
// run.  All simdgroups of the threadgroup compute the tile together; which thread holds which sum is asked for.  Rows that
// follow each other are read where they lie.
//
// An operation may go beyond its operands' extents in rows and columns of the product, whose sums are not used, but not
// along k: what it would read there is undefined (Metal Shading Language Specification 2.22.2; on M5 it is memory).
// So k is a multiple of STEP here, or rows are staged with zeros after their end (quantised_tile_of).
//
// Not handled: float operands, which stay on simdgroup_matrix; Metal 3.2, where this file is empty.
#ifndef LILY_TENSOR_H
#define LILY_TENSOR_H

#include "matrix.h"

#if __METAL_VERSION__ >= 400 && !defined(LILY_ACT_F32) && !defined(LILY_MATRIX_F32)

#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
#include <metal_tensor>

typedef tensor<threadgroup bfloat, dextents<int, 2>, tensor_inline> StagedOperand;
typedef tensor<device bfloat, dextents<int, 2>, tensor_inline> DeviceOperand;

// `columns` of `rows` rows, `pitch` apart.  A tensor takes no pointer to const; operands are only read.
inline StagedOperand staged_operand(threadgroup bfloat *p, uint columns, uint rows, uint pitch) {
    const array<int, 2> strides = {1, int(pitch)};
    return StagedOperand(p, dextents<int, 2>(int(columns), int(rows)), strides);
}

inline DeviceOperand device_operand(device const bfloat *p, uint columns, uint rows, uint pitch) {
    const array<int, 2> strides = {1, int(pitch)};
    return DeviceOperand((device bfloat *)p, dextents<int, 2>(int(columns), int(rows)), strides);
}

template <bool GATHER> struct TensorRows {
    typedef DeviceOperand Left;

    static Left left(threadgroup bfloat *, uint, uint, TileRows rows, uint at) {
        return device_operand(rows.x + rows.first * rows.k + at, rows.k - at, rows.used, rows.k);
    }
};

template <> struct TensorRows<true> {
    typedef StagedOperand Left;

    static Left left(threadgroup bfloat *x, uint step, uint height, TileRows, uint) {
        return staged_operand(x, step, height, operand_pitch<bfloat>(step));
    }
};

template <uint PARTS, uint BM, uint BN, bool GATHER> struct TensorProduct {
    enum : uint { STEP = 64, STAGED = GATHER ? 1 : 0 };

    typedef mpp::tensor_ops::matmul2d<mpp::tensor_ops::matmul2d_descriptor(BM, BN, STEP, false, true, false,
                                          mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate),
        execution_simdgroups<PRODUCT_SIMDGROUPS>>
        Multiply;
    typedef typename TensorRows<GATHER>::Left Left;
    typedef typename Multiply::template cooperative_tensor_destination_t<Left, StagedOperand, float, int> Sum;

    void init(thread Sum &first, thread Sum &second, threadgroup float *, uint, uint) {
        clear(first);
        if (PARTS == 2) clear(second);
    }

    static void clear(thread Sum &sum) {
#pragma unroll
        for (uint i = 0; i < sum.get_capacity(); i++) sum[i] = 0.0f;
    }

    void step(
        thread Sum &first, thread Sum &second, threadgroup bfloat *x, threadgroup bfloat *w, TileRows rows, uint at) {
        constexpr uint pitch = operand_pitch<bfloat>(STEP);
        Multiply multiply;
        Left left = TensorRows<GATHER>::left(x, STEP, BM, rows, at);
        StagedOperand right = staged_operand(w, STEP, BN, pitch);
        multiply.run(left, right, first);
        if (PARTS == 2) {
            StagedOperand other = staged_operand(w + BN * pitch, STEP, BN, pitch);
            multiply.run(left, other, second);
        }
    }

    template <typename Epilogue>
    void visit(thread Sum &first, thread Sum &second, Epilogue epilogue, uint rows, uint columns) {
#pragma unroll
        for (uint i = 0; i < first.get_capacity(); i++) {
            if (!first.is_valid_element(i)) continue;
            const auto place = first.get_multidimensional_index(i);
            const uint m = uint(place[1]), n = uint(place[0]);
            float values[PARTS];
            values[0] = first[i];
            if (PARTS == 2) values[PARTS - 1] = second[i];
            if (m < rows && n < columns) epilogue(m, n, values);
        }
    }
};

template <uint PARTS, uint BM, uint BN, bool GATHER> struct ProductFor<bfloat, PARTS, BM, BN, GATHER> {
    typedef TensorProduct<PARTS, BM, BN, GATHER> type;
};

#endif
#endif
