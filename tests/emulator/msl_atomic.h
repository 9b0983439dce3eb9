// SPDX-License-Identifier: Apache-2.0
// Atomic functions with Metal's overloads: 32-bit integers and float (add and exchange only), relaxed order only.
//
// The host's operations are real ones, so that groups may run on several host threads.
#pragma once

namespace metal {

enum memory_order { memory_order_relaxed = 0, memory_order_seq_cst = 5 };
enum thread_scope {
    thread_scope_thread,
    thread_scope_simdgroup,
    thread_scope_threadgroup,
    thread_scope_device,
};
enum class mem_flags : uint;

MSL_INLINE void atomic_thread_fence(
    mem_flags flags, memory_order order, thread_scope scope = thread_scope_device, MSL_HERE) {
    msl_fence((uint)flags, (uint)order, (uint)scope, site);
}

template <class T> struct atomic {
    T msl_value;
    atomic() = default;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;
typedef atomic<ulong> atomic_ulong;

// The accesses report themselves; the sanitizer must not see them a second time.
#define MSL_ATOMIC_FUNCTION __attribute__((no_sanitize("thread"), noinline)) inline
#define MSL_ATOMIC_BASE(T) \
    MSL_ATOMIC_FUNCTION T atomic_load_explicit(const volatile atomic<T> *p, memory_order, MSL_HERE) { \
        msl_atomic(p, sizeof(T), 1, 0, site); \
        T r; \
        __atomic_load((T *)&p->msl_value, &r, __ATOMIC_RELAXED); \
        return r; \
    } \
    MSL_ATOMIC_FUNCTION void atomic_store_explicit(volatile atomic<T> *p, T v, memory_order, MSL_HERE) { \
        msl_atomic(p, sizeof(T), 0, 1, site); \
        __atomic_store((T *)&p->msl_value, &v, __ATOMIC_RELAXED); \
    } \
    MSL_ATOMIC_FUNCTION T atomic_exchange_explicit(volatile atomic<T> *p, T v, memory_order, MSL_HERE) { \
        msl_atomic(p, sizeof(T), 1, 1, site); \
        T r; \
        __atomic_exchange((T *)&p->msl_value, &v, &r, __ATOMIC_RELAXED); \
        return r; \
    } \
    MSL_ATOMIC_FUNCTION bool atomic_compare_exchange_weak_explicit( \
        volatile atomic<T> *p, T *expected, T v, memory_order, memory_order, MSL_HERE) { \
        msl_atomic(p, sizeof(T), 1, 1, site); \
        return __atomic_compare_exchange((T *)&p->msl_value, expected, &v, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED); \
    }
#define MSL_ATOMIC_UPDATE(name, T, expression) \
    MSL_ATOMIC_FUNCTION T name(volatile atomic<T> *p, T b, memory_order, MSL_HERE) { \
        msl_atomic(p, sizeof(T), 1, 1, site); \
        T a, n; \
        __atomic_load((T *)&p->msl_value, &a, __ATOMIC_RELAXED); \
        do n = (T)(expression); \
        while (!__atomic_compare_exchange((T *)&p->msl_value, &a, &n, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)); \
        return a; \
    }
#define MSL_ATOMIC_INTEGER(T) \
    MSL_ATOMIC_BASE(T) \
    MSL_ATOMIC_UPDATE(atomic_fetch_add_explicit, T, a + b) \
    MSL_ATOMIC_UPDATE(atomic_fetch_sub_explicit, T, a - b) \
    MSL_ATOMIC_UPDATE(atomic_fetch_max_explicit, T, a < b ? b : a) \
    MSL_ATOMIC_UPDATE(atomic_fetch_min_explicit, T, b < a ? b : a) \
    MSL_ATOMIC_UPDATE(atomic_fetch_and_explicit, T, a &b) \
    MSL_ATOMIC_UPDATE(atomic_fetch_or_explicit, T, a | b) \
    MSL_ATOMIC_UPDATE(atomic_fetch_xor_explicit, T, a ^ b)
MSL_ATOMIC_INTEGER(int)
MSL_ATOMIC_INTEGER(uint)
MSL_ATOMIC_BASE(float)
MSL_ATOMIC_UPDATE(atomic_fetch_add_explicit, float, a + b)
MSL_ATOMIC_UPDATE(atomic_fetch_sub_explicit, float, a - b)

} // namespace metal
