# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Kernels of the kernel table that the host can run in a device's place (lily/host_steps.py): ``route_group``.

Arguments are the addresses of the row's buffers in order, then its parameters.
"""

from libc.stdint cimport int32_t, uint32_t, uintptr_t

cdef extern from "kernel_params.h":
    ctypedef struct Step:
        int32_t rows


def route_group(
    uintptr_t step, uintptr_t ids, uintptr_t offsets, uintptr_t order, uintptr_t blocks, uint32_t experts,
    uint32_t active, uint32_t tile_m, uint32_t max_blocks
):
    """Groups the assignments of rows to experts: offsets, order and block map as the kernel table's row says.

    ``ids`` must lie in [0, experts).
    """
    cdef uint32_t assignments = <uint32_t> (<Step *> step).rows * active
    with nogil:
        _offsets(<int32_t *> ids, <int32_t *> offsets, assignments, experts)
        _order(<int32_t *> ids, <int32_t *> offsets, <int32_t *> order, assignments, experts)
        _blocks(<int32_t *> offsets, <int32_t *> blocks, experts, <int32_t> tile_m, max_blocks)


cdef void _offsets(const int32_t *ids, int32_t *offsets, uint32_t assignments, uint32_t experts) noexcept nogil:
    """offsets[e] = assignments of the experts before e."""
    cdef uint32_t i
    for i in range(experts + 1):
        offsets[i] = 0
    for i in range(assignments):
        offsets[ids[i] + 1] += 1
    for i in range(experts):
        offsets[i + 1] += offsets[i]


cdef void _order(
    const int32_t *ids, int32_t *offsets, int32_t *order, uint32_t assignments, uint32_t experts
) noexcept nogil:
    """The assignments by expert, in ascending order within one. offsets serve as cursors and are put back."""
    cdef uint32_t i
    for i in range(assignments):
        order[offsets[ids[i]]] = <int32_t> i
        offsets[ids[i]] += 1
    for i in range(experts, 0, -1):
        offsets[i] = offsets[i - 1]
    offsets[0] = 0


cdef void _blocks(
    const int32_t *offsets, int32_t *blocks, uint32_t experts, int32_t tile_m, uint32_t max_blocks
) noexcept nogil:
    """(expert, first place) of every tile, then sentinels."""
    cdef uint32_t e, block = 0
    cdef int32_t place
    for e in range(experts):
        place = offsets[e]
        while place < offsets[e + 1] and block < max_blocks:
            blocks[2 * block] = <int32_t> e
            blocks[2 * block + 1] = place
            block += 1
            place += tile_m
    while block < max_blocks:
        blocks[2 * block] = -1
        blocks[2 * block + 1] = 0
        block += 1
