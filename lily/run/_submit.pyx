# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, boundscheck=False, wraparound=False
"""The host's loop around decode: keeps steps in flight, waits without the GIL, reads tokens from shared memory.

Per token it makes one device call to submit and one to wait; nothing is allocated but the result.
"""

from libc.stdint cimport int32_t, uint32_t, uint64_t, uintptr_t
from cpython.exc cimport PyErr_CheckSignals

ctypedef int (*submit_function)(void *, void **, uint32_t, uint64_t *) noexcept nogil
ctypedef int (*wait_function)(void *, uint64_t, uint64_t) noexcept nogil

cdef extern from "lily_device.h":
    enum: LILY_ETIMEOUT

cdef extern from "kernel_params.h":
    ctypedef struct Output:
        int32_t token, position, status
        float logprob

cdef enum:
    MAX_DEPTH = 4
    MAX_LISTS = 4

# Waits are cut into slices so that Ctrl-C is seen.
cdef uint64_t SLICE_NS = 50000000


cdef class DecodePipeline:
    """Decode steps of one sequence, up to ``depth`` of them in flight.

    Step lists alternate between the two state slots; ``parity`` is the slot that the next step reads.
    """

    cdef void *device
    cdef submit_function submit_lists
    cdef wait_function wait_ticket
    cdef void *lists[2][MAX_LISTS]
    cdef uint32_t list_count
    cdef char *outputs
    cdef int output_bytes, ring
    cdef uint64_t tickets[MAX_DEPTH + 1]
    cdef readonly int in_flight
    cdef readonly int parity
    cdef readonly int failed
    cdef int depth
    cdef readonly long long submitted, finished
    cdef long long limit, base

    def __init__(
        self, uintptr_t device, uintptr_t submit, uintptr_t wait, uintptr_t outputs, int output_bytes, int ring
    ):
        """Addresses of the device and of its lily_submit and lily_wait; ``outputs`` is the ring of Output records."""
        self.device = <void *> device
        self.submit_lists = <submit_function> submit
        self.wait_ticket = <wait_function> wait
        self.outputs = <char *> outputs
        self.output_bytes = output_bytes
        self.ring = ring

    def begin(self, lists_a, lists_b, int parity, int depth, long long base, long long limit):
        """Starts a burst: handles of the lists for slot A and slot B; at most ``limit`` tokens will be produced.

        ``base`` tokens of the request came before: the first output lies at that place of the ring.
        """
        if not 1 <= depth <= MAX_DEPTH or not 1 <= len(lists_a) <= MAX_LISTS or len(lists_a) != len(lists_b):
            raise ValueError("depth or number of lists out of range")
        if self.in_flight:
            raise RuntimeError("the previous request has not been drained")
        self.relist(lists_a, lists_b)
        self.parity, self.depth, self.base, self.limit = parity, depth, base, limit
        self.submitted = self.finished = 0
        self.failed = 0

    def relist(self, lists_a, lists_b):
        """Other recordings of the same lists, for the steps that follow."""
        cdef int i
        self.list_count = len(lists_a)
        for i in range(len(lists_a)):
            self.lists[0][i] = <void *> <uintptr_t> lists_a[i]
            self.lists[1][i] = <void *> <uintptr_t> lists_b[i]

    def adopt(self, uint64_t ticket):
        """Counts ``ticket``, the prompt's last chunk with its sampling, as the first step."""
        self.tickets[self.in_flight] = ticket
        self.in_flight += 1
        self.submitted += 1

    def next(self):
        """The next token as (token, position, status, logprob); None when ``limit`` tokens have come.

        After an error code of the device, which ``failed`` holds, it returns None as well.
        """
        if self.failed or self.finished >= self.limit:
            return None
        while self.in_flight < self.depth and self.submitted < self.limit:
            if self._submit():
                return None
        cdef Output *record = <Output *> (
            self.outputs + ((self.base + self.finished) % self.ring) * self.output_bytes
        )
        if self._wait():
            return None
        return record.token, record.position, record.status, record.logprob

    cdef int _submit(self) except -1:
        cdef int code
        cdef uint64_t ticket = 0
        with nogil:
            code = self.submit_lists(self.device, self.lists[self.parity], self.list_count, &ticket)
        if code:
            self.failed = code
            return 1
        self.tickets[self.in_flight] = ticket
        self.in_flight += 1
        self.submitted += 1
        self.parity ^= 1
        return 0

    cdef int _wait(self) except -1:
        cdef int code = LILY_ETIMEOUT
        cdef uint64_t ticket = self.tickets[0]
        while code == LILY_ETIMEOUT:
            with nogil:
                code = self.wait_ticket(self.device, ticket, SLICE_NS)
            if code == LILY_ETIMEOUT:
                PyErr_CheckSignals()
        cdef int i
        self.in_flight -= 1
        for i in range(self.in_flight):
            self.tickets[i] = self.tickets[i + 1]
        self.finished += 1
        if code:
            self.failed = code
            return 1
        return 0

    def drain(self):
        """Waits for whatever is in flight; returns the number of steps that had been submitted beyond those read."""
        cdef int extra = self.in_flight
        cdef int code
        cdef uint64_t ticket
        while self.in_flight:
            ticket = self.tickets[self.in_flight - 1]
            with nogil:
                code = self.wait_ticket(self.device, ticket, <uint64_t> -1)
            if code and not self.failed:
                self.failed = code
            self.in_flight -= 1
        return extra
