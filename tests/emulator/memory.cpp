// SPDX-License-Identifier: Apache-2.0
// Device memory: a reserved range of addresses, so that every stray device pointer can be recognised.
//
// Around each region lie GAP bytes that may be touched without harm: an access out of bounds is reported, not fatal.
#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <vector>

namespace emulator {

static const uint64_t RESERVED = 1ull << 38, GAP = 1 << 16, PAGE = 1 << 14;
static uint8_t *reserved;
static uint64_t next_offset = PAGE;
static std::map<uintptr_t, Region> regions; // by base address
static std::vector<View> views;
static const View *last_view;
Counts counts;

static void *reserve(uint64_t bytes, int protection) {
    void *p = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        perror("emulator: mmap");
        abort();
    }
    return p;
}

static uint64_t rounded(uint64_t bytes) { return (bytes + PAGE - 1) & ~(PAGE - 1); }

bool in_device_memory(uintptr_t address) { return reserved && address - (uintptr_t)reserved < RESERVED; }

bool is_mapped(uintptr_t address, uint64_t bytes) {
    auto after = regions.upper_bound(address + GAP);
    if (after == regions.begin()) return false;
    const Region &r = std::prev(after)->second;
    return address + bytes <= (uintptr_t)r.base + r.bytes + GAP - PAGE;
}

static bool holds(const View &v, uintptr_t address, uint64_t bytes) {
    return address >= v.address && address + bytes <= v.address + v.bytes;
}

const View *find_view(uintptr_t address, uint64_t bytes, bool writes) {
    if (last_view && holds(*last_view, address, bytes) && (last_view->writable || !writes)) return last_view;
    for (const View &v : views)
        if (holds(v, address, bytes) && (v.writable || !writes)) return last_view = &v;
    return nullptr;
}

const View *nearest_view(uintptr_t address) {
    const View *best = nullptr;
    uint64_t least = UINT64_MAX;
    for (const View &v : views) {
        uint64_t distance = address < v.address ? v.address - address
            : address < v.address + v.bytes     ? 0
                                                : address - v.address - v.bytes;
        if (distance < least) least = distance, best = &v;
    }
    return best;
}

// ---- bits ----
static void allocate(Bits &b, uint64_t bytes) {
    b.words = (uint64_t *)reserve(rounded(bytes / 8 + 64), PROT_READ | PROT_WRITE);
}

static void release(Bits &b, uint64_t bytes) { munmap(b.words, rounded(bytes / 8 + 64)); }

static void clear(Bits &b) {
    if (b.first <= b.last) memset(b.words + b.first, 0, (b.last - b.first + 1) * 8);
    b.first = UINT64_MAX, b.last = 0;
}

static void add(Bits &to, const Bits &from) {
    if (from.first > from.last) return;
    for (uint64_t i = from.first; i <= from.last; i++) to.words[i] |= from.words[i];
    to.first = std::min(to.first, from.first), to.last = std::max(to.last, from.last);
}

static uint64_t mask_of(uint64_t bit, uint32_t count) { return (count >= 64 ? ~0ull : (1ull << count) - 1) << bit; }

uint32_t set_bits(Bits &b, uint64_t first, uint32_t count) {
    uint32_t fresh = 0;
    while (count) {
        uint64_t word = first / 64, bit = first % 64;
        uint32_t n = (uint32_t)std::min<uint64_t>(count, 64 - bit);
        uint64_t mask = mask_of(bit, n), old = b.words[word];
        fresh += (uint32_t)__builtin_popcountll(mask & ~old);
        b.words[word] = old | mask;
        b.first = std::min(b.first, word), b.last = std::max(b.last, word);
        first += n, count -= n;
    }
    return fresh;
}

bool any_bit(const Bits &b, uint64_t first, uint32_t count) {
    while (count) {
        uint64_t word = first / 64, bit = first % 64;
        uint32_t n = (uint32_t)std::min<uint64_t>(count, 64 - bit);
        if (b.words[word] & mask_of(bit, n)) return true;
        first += n, count -= n;
    }
    return false;
}

static Region *region_of(uintptr_t address) {
    auto after = regions.upper_bound(address);
    if (after == regions.begin()) return nullptr;
    Region &r = std::prev(after)->second;
    return address < (uintptr_t)r.base + r.bytes ? &r : nullptr;
}

static void begin_views() {
    for (View &v : views) v.region->writable = false;
    views.clear();
    last_view = nullptr;
    memset(&counts, 0, sizeof counts);
}

} // namespace emulator

using namespace emulator;

extern "C" {

// `skew` bytes beyond a page boundary, zero-filled.
MSL_EXPORT void *msl_region_new(uint64_t bytes, uint64_t skew) {
    if (!reserved) reserved = (uint8_t *)reserve(RESERVED, PROT_NONE);
    uint64_t room = rounded(bytes + skew) + 2 * GAP;
    if (next_offset + room > RESERVED) return nullptr;
    uint8_t *start = reserved + next_offset;
    next_offset += room + PAGE;
    if (mprotect(start, room, PROT_READ | PROT_WRITE)) return nullptr;
    Region r = {};
    r.start = start, r.room = room;
    r.base = start + GAP + skew;
    r.bytes = bytes;
    r.cells = (Cell *)reserve(rounded((bytes + 2) / 2 * sizeof(Cell)), PROT_READ | PROT_WRITE);
    for (Bits *b : {&r.read, &r.written, &r.earlier_read, &r.earlier_written}) allocate(*b, bytes);
    regions[(uintptr_t)r.base] = r;
    return r.base;
}

// Addresses are used again only when no region is left, so that stale pointers are found too.
MSL_EXPORT void msl_region_free(void *base) {
    auto it = regions.find((uintptr_t)base);
    if (it == regions.end()) return;
    Region &r = it->second;
    auto gone = [&r](const View &v) { return v.region == &r; };
    views.erase(std::remove_if(views.begin(), views.end(), gone), views.end());
    last_view = nullptr;
    munmap(r.cells, rounded((r.bytes + 2) / 2 * sizeof(Cell)));
    for (Bits *b : {&r.read, &r.written, &r.earlier_read, &r.earlier_written}) release(*b, r.bytes);
    mmap(r.start, r.room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    regions.erase(it);
    if (regions.empty()) next_offset = PAGE;
}

// The launch's arguments, one by one, before msl_dispatch; the first of them begins a new launch.
MSL_EXPORT int msl_view(uint32_t number, const void *address, uint64_t bytes, int writable, const char *name) {
    if (number == 0) begin_views();
    Region *r = region_of((uintptr_t)address);
    if (!r) return 1;
    r->writable |= writable != 0;
    views.push_back(
        View{(uintptr_t)address, bytes, r, (uint64_t)((const uint8_t *)address - r->base), writable != 0, {}});
    snprintf(views.back().name, sizeof views.back().name, "%s", name);
    return 0;
}

// A barrier between dispatches: what came before is ordered before what follows.
MSL_EXPORT void msl_device_barrier() {
    for (auto &entry : regions) {
        clear(entry.second.earlier_read);
        clear(entry.second.earlier_written);
    }
}

MSL_EXPORT void msl_counts(uint64_t *out) { memcpy(out, &counts, sizeof counts); }
}

namespace emulator {

void memory_launch_ends() {
    for (const View &v : views) {
        add(v.region->earlier_read, v.region->read);
        add(v.region->earlier_written, v.region->written);
    }
    for (const View &v : views) {
        clear(v.region->read);
        clear(v.region->written);
    }
}

} // namespace emulator
