// SPDX-License-Identifier: Apache-2.0
// Types and address spaces.  A line that must not pass says which error it makes; all other lines are right.
#include <metal_stdlib>
using namespace metal;

constant float table[4] = {1, 2, 3, 4};
struct pair_of {
    float first, second;
};

inline float total(device const float *p) { return p[0] + p[1]; }
inline float total_staged(threadgroup const float *p) { return p[0] + p[1]; }
inline void twice(thread float &x) { x *= 2; }
template <typename P> inline float first_of(P p) { return float(p[0]); }

kernel void spaces(device float *out [[buffer(0)]], device const bfloat *x [[buffer(1)]],
    constant pair_of &c [[buffer(2)]], device atomic_uint *counter [[buffer(3)]],
    uint tid [[thread_index_in_threadgroup]]) {
    threadgroup float staged[32];
    float mine = 1;
    staged[tid] = c.first + table[tid & 3];
    twice(mine);
    out[0] = total(out) + total_staged(staged) + first_of(x) + first_of(staged);
    out[1] = total(staged);            // no matching function
    out[2] = total(&mine);             // no matching function
    out[3] = total_staged(out);        // no matching function
    twice(out[0]);                     // no matching function
    device float *p = staged;          // cannot initialize
    threadgroup float *q = &mine;      // cannot initialize
    table[0] = 1;                      // cannot assign
    c.second = 2;                      // cannot assign
    x[0] = bfloat(1.0f);               // not assignable
    half4 narrow = float4(1, 2, 3, 4); // cannot initialize
    half4 right = half4(float4(1, 2, 3, 4));
    float4 three = float4(1, 2, 3); // static assertion failed
    out[4] = exp(x[0]);             // deleted
    out[5] = exp(float(x[0]));
    out[6] = simd_sum(x[0]);    // ambiguous
    out[7] = max(out[0], x[0]); // deleted
    out[8] = min(tid, 4);       // ambiguous
    out[9] = min(tid, 4u);
    out[10] = expm1(out[0]); // use of undeclared identifier
    out[11] = log1p(out[0]); // use of undeclared identifier
    out[12] = erf(out[0]);   // use of undeclared identifier
    atomic_fetch_add_explicit(counter, 1u, memory_order_relaxed);
    atomic_fetch_add_explicit(counter, 1u, memory_order_acq_rel); // use of undeclared identifier
    atomic_fetch_add_explicit(out, 1.0f, memory_order_relaxed);   // no matching function
    simdgroup_bfloat8x8 m;
    simdgroup_load(m, x, 8);
    simdgroup_load(m, out, 8); // no matching function
    out[13] = narrow.x + right.x + three.x + p[0] + q[0];
}
