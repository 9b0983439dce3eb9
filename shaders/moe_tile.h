// SPDX-License-Identifier: Apache-2.0
// Which places of the block map a threadgroup of the experts' products computes.
#ifndef LILY_MOE_TILE_H
#define LILY_MOE_TILE_H

#include "common.h"

// What a threadgroup computes: places [first, first + used) of `expert`; used == 0: nothing.
struct ExpertTile {
    uint expert, first, used;
};

inline ExpertTile expert_tile(device const int *blocks, device const int *offsets, uint block) {
    const int expert = blocks[2 * block];
    if (expert < 0) return {0, 0, 0};
    const uint first = uint(blocks[2 * block + 1]);
    return {uint(expert), first, min(uint(C_TILE_M), uint(offsets[expert + 1]) - first)};
}

#endif
