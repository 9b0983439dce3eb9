// SPDX-License-Identifier: Apache-2.0
// Switches to and fro between two fibers and checks that registers that a callee keeps survive; prints "ok".
#include "fiber.h"

#include <stdio.h>
#include <stdlib.h>

static void *main_stack, *fiber_stacks[2];
static int counts[2];

static void body(int which) {
    double kept[8];
    long whole[8];
    for (int i = 0; i < 8; i++) kept[i] = which + i * 0.5, whole[i] = which * 100 + i;
    for (;;) {
        double sum = 0;
        long total = 0;
        for (int i = 0; i < 8; i++) sum += kept[i] *= 1, total += whole[i];
        fiber_switch(&fiber_stacks[which], which == 0 ? fiber_stacks[1] : main_stack);
        for (int i = 0; i < 8; i++) sum -= kept[i], total -= whole[i];
        if (sum != 0 || total != 0) abort();
        counts[which]++;
    }
}
static void first() { body(0); }
static void second() { body(1); }

int main() {
    const size_t bytes = 1 << 17;
    void (*entries[2])() = {first, second};
    for (int i = 0; i < 2; i++) {
        char *stack = (char *)aligned_alloc(bytes, bytes);
        fiber_stacks[i] = fiber_make(stack + bytes - 256, entries[i]);
    }
    for (int i = 0; i < 1000; i++) fiber_switch(&main_stack, fiber_stacks[0]);
    puts(counts[0] == 999 && counts[1] == 999 ? "ok" : "wrong");
}
