// SPDX-License-Identifier: Apache-2.0
// What tensor operations compute with: scratch memory, the product itself, and where cooperative tensors keep elements.
#include "runtime.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

extern "C" {

float *msl_scratch(int which, size_t count) {
    static thread_local std::vector<float> *memory;
    if (!memory) memory = new std::vector<float>[3];
    if (memory[which].size() < count) memory[which].resize(count);
    return memory[which].data();
}

// z[m][n] (+)= x·y with x [m][k], y [k][n], either of them stored transposed.
void msl_matmul(float *z, const float *x, const float *y, int m, int n, int k, bool x_transposed, bool y_transposed,
    bool accumulate) {
    static thread_local std::vector<float> *turned;
    if (!turned) turned = new std::vector<float>();
    if (y_transposed) {
        turned->resize((size_t)n * k);
        for (int j = 0; j < n; j++)
            for (int i = 0; i < k; i++) (*turned)[(size_t)i * n + j] = y[(size_t)j * k + i];
        y = turned->data();
    }
    if (!accumulate) std::fill(z, z + (size_t)m * n, 0.0f);
    for (int i = 0; i < m; i++)
        for (int l = 0; l < k; l++) {
            float a = x_transposed ? x[(size_t)l * m + i] : x[(size_t)i * k + l];
            for (int j = 0; j < n; j++) z[(size_t)i * n + j] += a * y[(size_t)l * n + j];
        }
}

} // extern "C"

namespace {

const uint32_t NONE = 0xffffffffu, NOT_COUNTED = 0xfffffffeu;

// As seen on Apple's GPUs: one simdgroup holds 16x16 fragments of 8 elements a lane; otherwise element i of thread t is
// number i·threads + t.
std::vector<uint32_t> fixed_layout(uint32_t rows, uint32_t columns, uint32_t threads, uint32_t room) {
    std::vector<uint32_t> table((size_t)threads * room, NONE);
    bool fragments = threads == 32 && rows % 16 == 0 && columns % 16 == 0;
    for (uint32_t t = 0; t < threads; t++) {
        for (uint32_t i = 0; i + 1 < room; i++) {
            uint32_t r, c;
            if (fragments) {
                uint32_t f = i / 8, k = i % 8, quad = t >> 2;
                r = f / (columns / 16) * 16 + ((quad & 4) | ((t >> 1) & 3)) + (k >> 2) * 8;
                c = f % (columns / 16) * 16 + ((quad & 2) | (t & 1)) * 4 + (k & 3);
            } else {
                uint32_t number = i * threads + t;
                r = number / columns, c = number % columns;
            }
            if (r < rows) table[(size_t)t * room + i] = r << 16 | c;
        }
        table[(size_t)t * room + room - 1] = NOT_COUNTED;
    }
    return table;
}

std::vector<uint32_t> random_layout(uint32_t rows, uint32_t columns, uint32_t threads, uint32_t room, uint32_t seed) {
    std::vector<uint32_t> table((size_t)threads * room, NONE);
    for (uint32_t i = 0; i < rows * columns; i++) table[i] = i / columns << 16 | i % columns;
    uint64_t state = seed * 0x9E3779B97F4A7C15ull + rows * 31 + columns;
    for (size_t i = table.size() - 1; i > 0; i--) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        std::swap(table[i], table[(state >> 33) % (i + 1)]);
    }
    return table;
}

} // namespace

extern "C" const uint32_t *msl_layout(uint32_t rows, uint32_t columns, uint32_t threads, uint32_t room) {
    static std::mutex guard;
    static std::map<std::tuple<uint32_t, uint32_t, uint32_t, uint32_t>, std::vector<uint32_t>> tables;
    const MslLaunch *launch = emulator::worker->launch;
    uint32_t seed = launch->flags & MSL_RANDOM_LAYOUT ? launch->seed * 2 + 1 : 0;
    std::lock_guard<std::mutex> lock(guard);
    auto &table = tables[{rows, columns, threads, seed}];
    if (table.empty())
        table = seed ? random_layout(rows, columns, threads, room, seed) : fixed_layout(rows, columns, threads, room);
    return table.data();
}
