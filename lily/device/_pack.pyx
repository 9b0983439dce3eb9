# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The rows16 layout of quantised matrices (see lily/weights.py), at memory speed and without the GIL."""

from libc.stdint cimport uint16_t, uint32_t, uintptr_t
from libc.string cimport memset

cdef enum:
    BLOCK = 16


def pack_rows16(
    uintptr_t out, uintptr_t words, uintptr_t scales, uintptr_t biases, Py_ssize_t rows, Py_ssize_t groups,
    Py_ssize_t words_per_group
):
    """Packs one matrix: ``words`` uint32 [rows, groups·words_per_group], ``scales`` and ``biases`` uint16 [rows, groups].

    All are addresses of C-contiguous memory; ``out`` holds whole blocks of 16 rows, absent rows become zero.
    """
    with nogil:
        _pack(<uint32_t *> out, <uint32_t *> words, <uint16_t *> scales, <uint16_t *> biases, rows, groups,
              words_per_group)


cdef void _pack(
    uint32_t *out, const uint32_t *words, const uint16_t *scales, const uint16_t *biases, Py_ssize_t rows,
    Py_ssize_t groups, Py_ssize_t wpg
) noexcept nogil:
    cdef Py_ssize_t block, group, row, count, j
    cdef Py_ssize_t pitch = groups * wpg
    cdef const uint32_t *source
    cdef uint16_t *tail
    for block in range((rows + BLOCK - 1) // BLOCK):
        count = min(BLOCK, rows - block * BLOCK)
        for group in range(groups):
            if count < BLOCK:
                memset(out, 0, wpg * BLOCK * 4 + BLOCK * 4)
            tail = <uint16_t *> (out + wpg * BLOCK)
            for row in range(count):
                source = words + (block * BLOCK + row) * pitch + group * wpg
                for j in range(wpg):
                    out[j * BLOCK + row] = source[j]
                tail[row] = scales[(block * BLOCK + row) * groups + group]
                tail[BLOCK + row] = biases[(block * BLOCK + row) * groups + group]
            out += wpg * BLOCK + BLOCK
