// SPDX-License-Identifier: Apache-2.0
// Matrix units: products by tensor operations and by simdgroup_matrix, and a kernel that trusts in a layout.
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
#include <metal_stdlib>
#include <metal_tensor>
using namespace metal;
using namespace mpp::tensor_ops;

typedef tensor<device bfloat, dextents<int, 2>, tensor_inline> matrix_in;
typedef tensor<device float, dextents<int, 2>, tensor_inline> matrix_out;

// c[m,n] = a[m,k]·b[n,k]ᵀ, tiles of 64x32 for four simdgroups; edges by the tensors' extents.
kernel void product(device bfloat *a [[buffer(0)]], device bfloat *b [[buffer(1)]], device float *c [[buffer(2)]],
    constant int *size [[buffer(3)]], uint2 tile [[threadgroup_position_in_grid]]) {
    const int m = size[0], n = size[1], k = size[2];
    auto ta = matrix_in(a, dextents<int, 2>(k, m)), tb = matrix_in(b, dextents<int, 2>(k, n));
    auto tc = matrix_out(c, dextents<int, 2>(n, m));
    constexpr auto shape = matmul2d_descriptor(64, 32, static_cast<int>(dynamic_extent), false, true);
    matmul2d<shape, execution_simdgroups<4>> op;
    auto left = ta.slice(0, int(tile.y) * 64);
    auto right = tb.slice(0, int(tile.x) * 32);
    auto target = tc.slice(int(tile.x) * 32, int(tile.y) * 64);
    auto sums = op.get_destination_cooperative_tensor<decltype(left), decltype(right), float>();
    op.run(left, right, sums);
    for (ushort i = 0; i < sums.get_capacity(); i++)
        if (sums.is_valid_element(i)) sums[i] *= 2;
    sums.store(target);
}

// The same for one simdgroup, from threadgroup memory, summed over steps of 16, its elements placed by hand.
kernel void staged_product(device const bfloat *a [[buffer(0)]], device const bfloat *b [[buffer(1)]],
    device float *c [[buffer(2)]], constant int *size [[buffer(3)]], uint lane [[thread_index_in_simdgroup]]) {
    threadgroup bfloat sa[16 * 16], sb[32 * 16];
    const int n = size[1], k = size[2];
    constexpr auto shape =
        matmul2d_descriptor(16, 32, 16, false, true, false, matmul2d_descriptor::mode::multiply_accumulate);
    matmul2d<shape, execution_simdgroup> op;
    auto ta = tensor<threadgroup bfloat, extents<int, 16, 16>, tensor_inline>(sa, extents<int, 16, 16>());
    auto tb = tensor<threadgroup bfloat, extents<int, 16, 32>, tensor_inline>(sb, extents<int, 16, 32>());
    auto sums = op.get_destination_cooperative_tensor<decltype(ta), decltype(tb), float>();
    for (ushort i = 0; i < sums.get_capacity(); i++) sums[i] = 0;
    for (int at = 0; at < k; at += 16) {
        for (uint i = lane; i < 256; i += 32) sa[i] = a[i / 16 * k + at + i % 16];
        for (uint i = lane; i < 512; i += 32) sb[i] = b[i / 16 * k + at + i % 16];
        simdgroup_barrier(mem_flags::mem_threadgroup);
        op.run(ta, tb, sums);
        simdgroup_barrier(mem_flags::mem_threadgroup);
    }
    for (ushort i = 0; i < sums.get_capacity(); i++)
        if (sums.is_valid_element(i)) {
            auto at = sums.get_multidimensional_index(i);
            c[at[1] * n + at[0]] = sums[i];
        }
}

// Elements taken for those of a fixed layout.
kernel void trusts_layout(device bfloat *a [[buffer(0)]], device bfloat *b [[buffer(1)]], device float *c [[buffer(2)]],
    constant int *size [[buffer(3)]], uint lane [[thread_index_in_simdgroup]]) {
    auto ta = matrix_in(a, dextents<int, 2>(16, 16)), tb = matrix_in(b, dextents<int, 2>(16, 32));
    constexpr auto shape = matmul2d_descriptor(16, 32, 16, false, true);
    matmul2d<shape, execution_simdgroup> op;
    auto sums = op.get_destination_cooperative_tensor<matrix_in, matrix_in, float>();
    op.run(ta, tb, sums);
    const uint quad = lane >> 2, row = (quad & 4) | ((lane >> 1) & 3), column = ((quad & 2) | (lane & 1)) * 4;
    for (uint i = 0; i < 16; i++) {
        const uint k = i % 8;
        c[(row + (k >> 2) * 8) * 32 + i / 8 * 16 + column + (k & 3)] = sums[i];
    }
}

// Steps of 32 along k, whatever the operands' extents.
kernel void ends_within_a_step(device bfloat *a [[buffer(0)]], device bfloat *b [[buffer(1)]],
    device float *c [[buffer(2)]], constant int *size [[buffer(3)]]) {
    const int k = size[2];
    constexpr auto shape =
        matmul2d_descriptor(16, 32, 32, false, true, false, matmul2d_descriptor::mode::multiply_accumulate);
    matmul2d<shape, execution_simdgroup> op;
    auto ta = matrix_in(a, dextents<int, 2>(k, 16)), tb = matrix_in(b, dextents<int, 2>(k, 32));
    auto sums = op.get_destination_cooperative_tensor<matrix_in, matrix_in, float>();
    for (ushort i = 0; i < sums.get_capacity(); i++) sums[i] = 0;
    for (int at = 0; at < k; at += 32) {
        auto left = ta.slice(at, 0), right = tb.slice(at, 0);
        op.run(left, right, sums);
    }
    sums.store(matrix_out(c, dextents<int, 2>(32, 16)));
}

// 16x16 by four 8x8 matrices, k a multiple of 8; b transposed by the load.
kernel void simdgroup_product(device const bfloat *a [[buffer(0)]], device const bfloat *b [[buffer(1)]],
    device float *c [[buffer(2)]], constant int *size [[buffer(3)]]) {
    const int n = size[1], k = size[2];
    simdgroup_float8x8 sums[2][2];
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 2; j++) sums[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    for (int at = 0; at < k; at += 8) {
        simdgroup_bfloat8x8 x[2], y[2];
        for (int i = 0; i < 2; i++) {
            simdgroup_load(x[i], a + i * 8 * k + at, k);
            simdgroup_load(y[i], b + i * 8 * k + at, k, ulong2(0, 0), true);
        }
        for (int i = 0; i < 2; i++)
            for (int j = 0; j < 2; j++) simdgroup_multiply_accumulate(sums[i][j], x[i], y[j], sums[i][j]);
    }
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 2; j++) simdgroup_store(sums[i][j], c + i * 8 * n + j * 8, n);
}
