# SPDX-License-Identifier: Apache-2.0
"""The names of the Metal Shading Language that Lily's shaders may use: everything else is a finding.

A name is added here when a shader needs it, after its existence in MSL 3.2 (or 4, for tensors) has been looked up, and
then to the emulator's headers, with exactly the overloads that Metal has.
"""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


KEYWORDS = _words(
    """
    alignas alignof auto bool break case char const constexpr continue decltype default do else enum explicit false
    float for friend if inline int kernel long namespace nullptr operator private protected public return short
    signed sizeof static static_assert static_cast struct switch template this true typedef typename union unsigned
    using void volatile while requires concept device constant thread threadgroup coherent device_scope mutable
    reinterpret_cast const_cast
    """
)
TYPES = _words(
    """
    half bfloat uchar ushort uint ulong size_t int8_t uint8_t int16_t uint16_t int32_t uint32_t int64_t uint64_t
    ptrdiff_t vec array atomic atomic_uint atomic_int atomic_float mem_flags simd_vote vote_t simdgroup_matrix
    simdgroup_float8x8 simdgroup_half8x8 simdgroup_bfloat8x8 tensor tensor_inline tensor_handle tensor_offset
    extents dextents dynamic_extent cooperative_tensor execution_thread execution_simdgroup execution_simdgroups
    matmul2d matmul2d_descriptor is_same_v conditional_t enable_if_t integral_constant remove_cv_t element_type
    value_type numeric_limits
    """
) | {
    f"{packed}{element}{count}"
    for packed in ("", "packed_")
    for element in (
        "float",
        "half",
        "bfloat",
        "int",
        "uint",
        "short",
        "ushort",
        "char",
        "uchar",
        "long",
        "ulong",
        "bool",
    )
    for count in "234"
}
FUNCTIONS = _words(
    """
    exp exp2 exp10 log log2 log10 sin cos tan tanh sqrt rsqrt floor ceil round rint trunc fract fabs abs sign
    saturate pow fmin fmax fmod copysign divide fma mix min max clamp select isnan isinf isfinite all any dot ldexp
    popcount clz ctz reverse_bits mulhi rotate extract_bits insert_bits as_type is_function_constant_defined
    threadgroup_barrier simdgroup_barrier atomic_thread_fence atomic_load_explicit atomic_store_explicit
    atomic_exchange_explicit atomic_compare_exchange_weak_explicit atomic_fetch_add_explicit
    atomic_fetch_sub_explicit atomic_fetch_max_explicit atomic_fetch_min_explicit atomic_fetch_and_explicit
    atomic_fetch_or_explicit atomic_fetch_xor_explicit simd_sum simd_product simd_max simd_min simd_and simd_or
    simd_xor simd_shuffle simd_shuffle_xor simd_shuffle_up simd_shuffle_down simd_broadcast simd_broadcast_first
    simd_prefix_inclusive_sum simd_prefix_exclusive_sum simd_ballot simd_any simd_all simd_is_first
    simd_active_threads_mask make_filled_simdgroup_matrix simdgroup_load simdgroup_store simdgroup_multiply
    simdgroup_multiply_accumulate
    """
)
MEMBERS = _words(
    """
    x y z w thread_elements get_capacity is_valid_element get_multidimensional_index store load run slice
    cooperative_tensor_destination_t get_destination_cooperative_tensor get_left_input_cooperative_tensor
    get_right_input_cooperative_tensor begin end mode multiply multiply_accumulate mem_none mem_device mem_threadgroup
    max min lowest infinity get_extent type
    """
)
OTHERS = _words(
    """
    metal precise fast mpp tensor_ops INFINITY NAN FLT_MAX FLT_MIN FLT_EPSILON M_PI_F M_E_F M_LN2_F M_LOG2E_F
    UINT_MAX INT_MAX INT_MIN memory_order_relaxed memory_order_seq_cst thread_scope_device METAL_FUNC
    """
)
ALLOWED = KEYWORDS | TYPES | FUNCTIONS | OTHERS
