// SPDX-License-Identifier: Apache-2.0
// Prefill attention by Metal 4 tensor operations, at head size 256.
//
// A tile is TENSOR_QUERIES rows of one query head, whose queries, keys and values are read where they lie; only scores and
// probabilities are staged.  A simdgroup computes scores of half of the queries with 16 positions, and sums of all queries
// over 32 dims.
//
// Not handled: other head sizes and float operands (attention_prefill.metal); Metal 3.2, where this file is empty.
#ifndef LILY_ATTENTION_TENSOR_H
#define LILY_ATTENTION_TENSOR_H

#include "attention_tile.h"
#include "common.h"
#include "tensor.h"

#if __METAL_VERSION__ >= 400 && !defined(LILY_ACT_F32) && !defined(LILY_MATRIX_F32)
#define LILY_TENSOR_ATTENTION 1

constant constexpr uint TENSOR_DIM = 256;
constant constexpr uint TENSOR_QUERIES = 64;

struct TensorAttention {
    enum : uint { SCORE_ROWS = 32, SCORE_KEYS = 16, SUM_DIMS = TENSOR_DIM / PREFILL_SIMDGROUPS };

    typedef mpp::tensor_ops::matmul2d<mpp::tensor_ops::matmul2d_descriptor(SCORE_ROWS, SCORE_KEYS, TENSOR_DIM, false,
                                          true, false, mpp::tensor_ops::matmul2d_descriptor::mode::multiply),
        execution_simdgroup>
        Score;
    // The last block of positions is not full: k is what the operands have.
    typedef mpp::tensor_ops::matmul2d<mpp::tensor_ops::matmul2d_descriptor(TENSOR_QUERIES, SUM_DIMS,
                                          int(dynamic_extent), false, false, false,
                                          mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate),
        execution_simdgroup>
        Add;
    typedef Add::cooperative_tensor_destination_t<StagedOperand, DeviceOperand, float, int> Sum;

    device const bfloat *query; // first row of the simdgroup's scores
    uint query_rows;            // that exist from there on
    uint first_row, first_key, first_dim;

    void init(thread Sum &sum, PrefillArguments a, Queries queries, PrefillScratch, uint, uint sg, uint) {
        const uint wanted = sg / (PREFILL_KEYS / SCORE_KEYS) * SCORE_ROWS, from = min(wanted, queries.count - 1);
        query = a.q + (queries.row(from) * C_HQ + queries.head) * TENSOR_DIM;
        query_rows = queries.count - from;
        first_row = wanted;
        first_key = sg % (PREFILL_KEYS / SCORE_KEYS) * SCORE_KEYS;
        first_dim = sg * SUM_DIMS;
#pragma unroll
        for (uint i = 0; i < sum.get_capacity(); i++) sum[i] = 0.0f;
    }

    void scores(CacheHead keys, PrefillScratch scratch, uint base) {
        const uint first = base + first_key;
        if (first > keys.last) return;
        Score multiply;
        DeviceOperand left = device_operand(query, TENSOR_DIM, query_rows, C_HQ * TENSOR_DIM);
        DeviceOperand right = device_operand(keys.at(first), TENSOR_DIM, keys.last + 1 - first, keys.stride);
        auto score = multiply.get_destination_cooperative_tensor<DeviceOperand, DeviceOperand, float>();
        multiply.run(left, right, score);
#pragma unroll
        for (uint i = 0; i < score.get_capacity(); i++) {
            if (!score.is_valid_element(i)) continue;
            const auto place = score.get_multidimensional_index(i);
            scratch.scores[(first_row + uint(place[1])) * SCORE_PITCH + first_key + uint(place[0])] = score[i];
        }
    }

    void add(thread Sum &sum, CacheHead values, PrefillScratch scratch, uint base) {
#pragma unroll
        for (uint i = 0; i < sum.get_capacity(); i++)
            if (sum.is_valid_element(i)) sum[i] *= scratch.factor[uint(sum.get_multidimensional_index(i)[1])];
        Add multiply;
        const uint keys = min(PREFILL_KEYS, values.last + 1 - base);
        StagedOperand left = staged_operand(scratch.weights, keys, TENSOR_QUERIES, WEIGHT_PITCH);
        DeviceOperand right = device_operand(values.at(base) + first_dim, SUM_DIMS, keys, values.stride);
        multiply.run(left, right, sum);
    }

    void store(thread Sum &sum, PrefillArguments a, Queries queries, PrefillScratch scratch) {
#pragma unroll
        for (uint i = 0; i < sum.get_capacity(); i++) {
            if (!sum.is_valid_element(i)) continue;
            const auto place = sum.get_multidimensional_index(i);
            const uint i_query = uint(place[1]);
            if (i_query >= queries.count) continue;
            a.store(queries, i_query, first_dim + uint(place[0]), sum[i] * scratch.factor[i_query]);
        }
    }
};

// The threadgroups share the tiles among them, whatever the grid; those that see the most positions come first.
inline void attend_tensor(PrefillArguments a, PrefillScratch scratch, uint rows, uint position, uint2 group,
    uint2 groups, uint tid, uint sg, uint lane) {
    const uint heads = C_HQ, blocks = (rows + TENSOR_QUERIES - 1) / TENSOR_QUERIES;
    for (uint t = group.x + groups.x * group.y; t < blocks * heads; t += groups.x * groups.y) {
        const uint first = (blocks - 1 - t / heads) * TENSOR_QUERIES, head = t % heads;
        const Queries queries = {first, min(TENSOR_QUERIES, rows - first), 1, head, head * C_HKV / C_HQ, position};
        attend<TensorAttention, TENSOR_QUERIES>(a, queries, scratch, tid, sg, lane);
    }
}

#endif
#endif
