// SPDX-License-Identifier: Apache-2.0
// Device memory as the checks see it: regions with bitmaps of what was touched, and a launch's views of them.
#pragma once
#include "runtime.h"

namespace emulator {

// What one dispatch did to a granule of two bytes; see races.cpp.
struct Cell {
    uint64_t write, read;
};

struct Bits { // one bit a byte of a region
    uint64_t *words = nullptr;
    uint64_t first = UINT64_MAX, last = 0; // words that may be set
};

struct Region {
    uint8_t *base;
    uint64_t bytes;
    uint8_t *start; // of the mapping, with the gaps around the region
    uint64_t room;
    bool writable;                      // through some view of the running dispatch: only then are cells needed
    Cell *cells;                        // of the running dispatch
    Bits read, written;                 // by the running dispatch
    Bits earlier_read, earlier_written; // by dispatches since the last barrier
};

// One argument of the running launch.
struct View {
    uintptr_t address;
    uint64_t bytes;
    Region *region;
    uint64_t offset; // in the region
    bool writable;
    char name[32];
};

struct Counts {
    uint64_t bytes_read, bytes_written, distinct_read, distinct_written;
};
extern Counts counts;
void memory_launch_ends();

bool in_device_memory(uintptr_t address);
bool is_mapped(uintptr_t address, uint64_t bytes); // a region or the gaps around one
// The view of the launch that holds [address, address + bytes), writable if asked; null if there is none.
const View *find_view(uintptr_t address, uint64_t bytes, bool writes);
const View *nearest_view(uintptr_t address);
// Sets the bits of [first, first + count); returns how many were not set.
uint32_t set_bits(Bits &bits, uint64_t first, uint32_t count);
bool any_bit(const Bits &bits, uint64_t first, uint32_t count);

} // namespace emulator
