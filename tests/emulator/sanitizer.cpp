// SPDX-License-Identifier: Apache-2.0
// The functions that a checked kernel calls before each access and each doubtful operation.
//
// Clang's thread sanitizer instruments every access to memory that others may see; its own runtime knows no fibers, so
// the calls end here.  Volatile accesses, which have functions of their own, are those through coherent pointers.
// The undefined-behaviour sanitizer reports indices, shifts, divisions and conversions.
#include "runtime.h"

#include <string.h>

using namespace emulator;

static MslSite caller(const void *pc) { return MslSite{nullptr, 0, 0, (const char *)pc - 1}; }
#define CALLER caller(__builtin_return_address(0))

static void access(void *p, uint32_t bytes, bool writes, bool reads, uint32_t how, MslSite site) {
    if (worker) check_access(p, bytes, writes, reads, how, site);
}

static void aligned(void *p, uint32_t bytes, MslSite site) {
    if (!worker || !((uintptr_t)p & (bytes - 1))) return;
    report("misaligned", site, "access of %u bytes at an address that is no multiple of it, by thread %u", bytes,
        msl_self()->linear);
}

extern "C" {

#define ACCESS(n) \
    MSL_EXPORT void __tsan_read##n(void *p) { \
        aligned(p, n, CALLER); \
        access(p, n, false, true, PLAIN_ACCESS, CALLER); \
    } \
    MSL_EXPORT void __tsan_write##n(void *p) { \
        aligned(p, n, CALLER); \
        access(p, n, true, false, PLAIN_ACCESS, CALLER); \
    } \
    MSL_EXPORT void __tsan_unaligned_read##n(void *p) { access(p, n, false, true, PLAIN_ACCESS, CALLER); } \
    MSL_EXPORT void __tsan_unaligned_write##n(void *p) { access(p, n, true, false, PLAIN_ACCESS, CALLER); } \
    MSL_EXPORT void __tsan_read_write##n(void *p) { \
        aligned(p, n, CALLER); \
        access(p, n, true, true, PLAIN_ACCESS, CALLER); \
    } \
    MSL_EXPORT void __tsan_unaligned_read_write##n(void *p) { access(p, n, true, true, PLAIN_ACCESS, CALLER); } \
    MSL_EXPORT void __tsan_volatile_read##n(void *p) { \
        aligned(p, n, CALLER); \
        access(p, n, false, true, COHERENT_ACCESS, CALLER); \
    } \
    MSL_EXPORT void __tsan_volatile_write##n(void *p) { \
        aligned(p, n, CALLER); \
        access(p, n, true, false, COHERENT_ACCESS, CALLER); \
    } \
    MSL_EXPORT void __tsan_unaligned_volatile_read##n(void *p) { access(p, n, false, true, COHERENT_ACCESS, CALLER); } \
    MSL_EXPORT void __tsan_unaligned_volatile_write##n(void *p) { access(p, n, true, false, COHERENT_ACCESS, CALLER); }
ACCESS(1)
ACCESS(2)
ACCESS(4) ACCESS(8) ACCESS(16)

    MSL_EXPORT void *__tsan_memcpy(void *to, const void *from, size_t n) {
    access((void *)from, (uint32_t)n, false, true, PLAIN_ACCESS, CALLER);
    access(to, (uint32_t)n, true, false, PLAIN_ACCESS, CALLER);
    return memcpy(to, from, n);
}
MSL_EXPORT void *__tsan_memmove(void *to, const void *from, size_t n) {
    access((void *)from, (uint32_t)n, false, true, PLAIN_ACCESS, CALLER);
    access(to, (uint32_t)n, true, false, PLAIN_ACCESS, CALLER);
    return memmove(to, from, n);
}
MSL_EXPORT void *__tsan_memset(void *to, int c, size_t n) {
    access(to, (uint32_t)n, true, false, PLAIN_ACCESS, CALLER);
    return memset(to, c, n);
}
MSL_EXPORT void __tsan_read_range(void *p, size_t n) { access(p, (uint32_t)n, false, true, PLAIN_ACCESS, CALLER); }
MSL_EXPORT void __tsan_write_range(void *p, size_t n) { access(p, (uint32_t)n, true, false, PLAIN_ACCESS, CALLER); }
MSL_EXPORT void __tsan_init() {}
MSL_EXPORT void __tsan_func_entry(void *) {}
MSL_EXPORT void __tsan_func_exit() {}
MSL_EXPORT void __tsan_vptr_update(void *, void *) {}

// ---- undefined behaviour: the beginning of each record is where it happens ----
struct UbLocation {
    const char *file;
    uint32_t line, column;
};

static void undefined(const void *record, const char *kind, const char *what) {
    const UbLocation *at = (const UbLocation *)record;
    if (worker) report(kind, MslSite{at->file, (int)at->line, (int)at->column, nullptr}, "%s", what);
}

MSL_EXPORT void __ubsan_handle_out_of_bounds(void *record, uintptr_t index) {
    const UbLocation *at = (const UbLocation *)record;
    if (worker)
        report("bounds", MslSite{at->file, (int)at->line, (int)at->column, nullptr},
            "index %lld of a private or threadgroup array, used or for a pointer, is out of bounds; thread %u",
            (long long)index, msl_self()->linear);
}
MSL_EXPORT void __ubsan_handle_shift_out_of_bounds(void *record, uintptr_t, uintptr_t) {
    undefined(record, "undefined", "shift by more than the width or by a negative count");
}
MSL_EXPORT void __ubsan_handle_divrem_overflow(void *record, uintptr_t, uintptr_t) {
    undefined(record, "undefined", "integer division by zero or overflow; the thread ends here");
    if (worker) stop_lane();
}
MSL_EXPORT void __ubsan_handle_float_cast_overflow(void *record, uintptr_t) {
    undefined(record, "undefined", "a float is converted to an integer that cannot hold it");
}

// ---- hooks of the headers ----
void msl_misaligned(const void *p, int bytes) {
    if (!worker || !(worker->launch->flags & MSL_CHECK)) return;
    report("misaligned", CALLER, "vector of %d bytes at an address %d beyond a multiple of its size, by thread %u",
        bytes, (int)((uintptr_t)p % (uintptr_t)(bytes == 12 ? 16 : bytes)), msl_self()->linear);
}
void msl_component(int index, int count) {
    if (worker) report("bounds", CALLER, "component %d of a vector of %d", index, count);
}
void msl_touch(const volatile void *p, uint32_t bytes, int writes) {
    if (worker) check_access(p, bytes, writes, !writes, PLAIN_ACCESS, CALLER);
}
void msl_atomic(const volatile void *p, uint32_t bytes, int reads, int writes, MslSite site) {
    if (!worker || !(worker->launch->flags & MSL_CHECK)) return;
    check_access(p, bytes, writes, reads, ATOMIC_ACCESS, site);
    check_atomic(p, writes, reads, site);
}
void msl_fence(uint32_t flags, uint32_t order, uint32_t scope, MslSite) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    bool device = flags & 1 && order == 5 && scope == 3;
    if (device && worker && worker->launch->flags & MSL_CHECK) check_fence(worker, msl_self());
}
}
