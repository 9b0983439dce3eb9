# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, boundscheck=False, wraparound=False
"""What the engine's thread does for every token beside the token itself: is a turn over, is the reader to be woken.

Waking a thread takes longer than making a small model's token, so events are handed over a few at a time; none waits
for another one that the device has not made yet, by the pace of those before.
Not handled: who has a turn (scheduler.py); how a reader waits (requests.py).
"""

from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec


cdef double seconds() noexcept nogil:
    cdef timespec time
    clock_gettime(CLOCK_MONOTONIC, &time)
    return time.tv_sec + 1e-9 * time.tv_nsec


cdef class Outbox:
    """A request's events on their way to its reader, and the turn of the engine's thread that makes them.

    ``give`` takes a list of events. ``ahead``: events that are made before anybody reads them. ``batch``: events that
    are handed over at a time, at most, and ``hold`` the seconds for which one of them may wait.
    """

    cdef object give
    cdef list events
    cdef double handed, put_last, hold  # times at which something was handed over, and put
    cdef double turn_end
    cdef long long turn_left  # tokens; below 0: without a limit
    cdef object interrupted
    cdef int ahead, batch
    cdef public bint cancelled
    cdef public bint hurried  # others wait for what the request holds: it goes on, however much is unread
    cdef public bint whole  # only the end is wanted: nobody is woken for every token
    cdef public bint paused  # the engine waits until its reader has read all
    cdef readonly long long made
    cdef public long long taken  # the reader's count

    def __init__(self, give, *, int ahead, int batch, double hold):
        self.give, self.ahead, self.batch, self.hold = give, ahead, batch, hold
        self.events = []

    def put(self, event, bint more=False):
        """Something for the reader. ``more``: it may be held back while others follow at once."""
        cdef double now = seconds()
        self.made += 1
        self.events.append(event)
        # The next one is expected after as long as it took to make this one.
        if not more or len(self.events) >= self.batch or (now - self.handed) + (now - self.put_last) >= self.hold:
            self.handed = now
            self.flush()
        self.put_last = now

    cpdef flush(self):
        """Hands over what is there."""
        cdef list events = self.events
        if events:
            self.events = []
            self.give(events)

    cpdef bint pause(self):
        """Whether its reader should read first; the engine is woken when all has been read."""
        if self.hurried or self.made - self.taken < self.ahead:
            return False
        self.paused = True
        return self.made - self.taken >= self.ahead  # it may have read on meanwhile, and seen nothing of the pause

    def begin_turn(self, long long tokens, double length, interrupted):
        """A turn of at most ``tokens`` and ``length`` seconds; of 0 tokens: until ``interrupted()`` says so."""
        self.turn_left = tokens or -1
        self.turn_end = seconds() + length
        self.interrupted = interrupted

    def turn_over(self):
        """Whether somebody else has a turn now. To be asked after every token."""
        if self.cancelled or self.pause():
            return True
        if self.turn_left < 0:
            return self.interrupted()
        self.turn_left -= 1
        return self.turn_left <= 0 or seconds() >= self.turn_end
