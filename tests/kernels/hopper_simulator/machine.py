"""A GPU in plain Python: threads as generators, memory by address, barriers, and copies that land when they like.

A thread runs until it has to wait. Which thread runs next, and when a copy lands, is drawn anew for every seed: warps
are fast or slow for a while, and some lanes lag behind their warp. What only a schedule that was not drawn would show
is found by looking twice: shared memory that a wgmma or a TMA store reads must be the same when it is issued and when
it is done.
"""

from __future__ import annotations

import heapq
import random
from collections import deque

import numpy as np

SHARED_MEMORY = 227 * 1024  # bytes of a block, on Hopper
REGISTERS = 512  # of a thread of each warpgroup together
GAP = 256  # bytes between two tensors
PREEMPTED = 1 / 32  # of the waits that need not wait
ORDERING = ("sync_warp", "sync_threads", "barrier")  # of memory; others only bring threads together
REDRAWN = 1 / 300  # of the steps after which other warps are slow


class SimulationError(Exception):
    """Error of a kernel that would hang, reads or writes what it must not, or does what is undefined on a GPU."""


class Memory:
    """Bytes by address, unwritten ones NaN; an access to what was never allocated fails, as at a guard page."""

    def __init__(self, size: int, base: int):
        self.base = self.end = base
        self.bytes = np.full(size, 0xFF, np.uint8)
        self.allocated = np.zeros(size // 2, bool)
        self.of_width = {width: self.bytes.view(f"u{width}") for width in (1, 2, 4)}
        self.one = {code: memoryview(self.bytes).cast(code) for code in "BHfi"}  # fast for single elements
        self.is_allocated = memoryview(self.allocated)

    def allocate(self, size: int, align: int = GAP) -> int:
        address = -(-self.end // align) * align
        self.end = address + size
        if self.end - self.base > len(self.bytes):
            raise SimulationError(f"{self.end - self.base} bytes, of {len(self.bytes)}")
        self.allocated[(address - self.base) // 2 : (self.end - self.base + 1) // 2] = True
        self.end += GAP if align == GAP else 0
        return address

    def places(self, addresses, width: int):
        """Compute indices into of_width[width]."""
        start = addresses - self.base
        if start.size and not (start.min() >= 0 and start.max() < len(self.bytes)):
            raise SimulationError("an address outside memory")
        if (start % width).any() or not self.allocated[start // 2].all():
            raise SimulationError("an access outside all tensors, or off alignment")
        return start // width

    def place(self, address: int, width: int) -> int:
        """Run `places` of one address."""
        start = address - self.base
        if not 0 <= start < len(self.bytes) or start % width or not self.is_allocated[start // 2]:
            raise SimulationError(f"an access to address {start}, outside all tensors or off alignment")
        return start // width


class Barrier:
    """An mbarrier: a phase ends when `count` have arrived and all announced bytes have landed."""

    def __init__(self, machine, name, count: int):
        self.machine, self.name, self.count = machine, name, count
        self.pending, self.bytes, self.phase, self.waiting = count, 0, 0, []
        self.follows_copies = False  # whether cp.async arrives at it

    def __repr__(self):
        return (
            f"barrier {self.name}, of whose {self.count} arrivals {self.pending} are missing, and {self.bytes} bytes"
        )

    def arrive(self, count=1, expected_bytes=0):
        self.pending -= count
        self.bytes += expected_bytes
        if self.pending < 0:
            raise SimulationError(f"barrier {self.name}: more than {self.count} arrivals in a phase")
        self._end_phase()

    def land(self, size):
        self.bytes -= size
        self._end_phase()

    def _end_phase(self):
        if not self.pending and not self.bytes:
            self.phase ^= 1
            self.pending = self.count
            waiting, self.waiting = self.waiting, []
            for thread in waiting:
                self.machine.wake(thread)


class Meeting:
    """Threads that wait for each other, at sync_warp or a named barrier, and what they bring."""

    def __init__(self, kind, size):
        self.kind, self.size, self.values, self.waiting, self.met = kind, size, {}, [], False

    def __repr__(self):
        return f"{self.kind}, where {len(self.values)} of {self.size} threads are"


class Block:
    def __init__(self, index):
        self.index = index
        self.shared = None  # Memory, when it is laid out
        self.barriers, self.meetings, self.barriers_are_visible = {}, {}, False
        self.registers = 0  # of a thread of each warp, added up: more than at the start
        self.unfenced = None  # by 16 bits of shared memory: whether TMA might not see what was written
        self.copied = None  # the same: whether cp.async wrote it, which wgmma sees after a fence alone


class Warp:
    def __init__(self, block, index):
        self.block, self.index, self.slow = block, index, 0.0
        self.threads, self.accumulators = [], []
        self.issued, self.groups, self.fenced = [], [], False  # wgmmas


class Thread:
    def __init__(self, warp, lane, is_slow):
        self.warp, self.block, self.lane = warp, warp.block, lane
        self.index = 32 * warp.index + lane
        self.lag = 4.0 if is_slow else 0.0
        self.waits_for = "nothing"
        self.has_accessed = False  # shared memory since its warp was in step
        self.follows_unordered = False  # accesses of other lanes, when it was elected
        self.num_accumulators = 0
        self.accumulates = {}  # the scale of D, by MMA
        self.copies, self.landing = [], deque()  # cp.async: of now, and on their way
        self.stores, self.store_groups = [], []  # TMA stores: of now, and committed
        self.unfenced = []
        self.sees_copies = False

    def check_at_end(self):
        if self.stores or self.store_groups or self.copies:
            raise SimulationError(f"{self} ends before its copies are done")
        if self.warp.issued or self.warp.groups:
            raise SimulationError(f"{self} ends before its wgmmas are done")

    def __repr__(self):
        return f"block {self.block.index} warp {self.warp.index} lane {self.lane}"


class Machine:
    """The GPU of one launch. `current` is the thread that runs."""

    current: Thread

    def __init__(self, seed: int, size: int = 1 << 23):
        self.random = random.Random(seed)
        self.memory = Memory(size, 1 << 33)  # addresses need more than 32 bits
        self.ready = []

    def run(self, kernel, blocks: int, num_threads: int = 384, lanes: int = 32):
        """Run the generator function `kernel` in every thread, to the end."""
        self.num_blocks, self.lanes, self.num_threads = blocks, lanes, num_threads
        self.ready.clear()
        running = {}
        slow_lanes = set(self.random.sample(range(lanes), min(2, lanes - 1)))
        self.warps = [Warp(block, w) for block in map(Block, range(blocks)) for w in range(num_threads // lanes)]
        for warp in self.warps:
            for lane in range(lanes):
                thread = Thread(warp, lane, lane in slow_lanes)
                warp.threads.append(thread)
                running[thread] = kernel()
                self.wake(thread)
        draw = self.random.random
        while self.ready:
            if draw() < REDRAWN:
                for warp in self.warps:
                    warp.slow = 3 * draw()
            item = heapq.heappop(self.ready)[2]
            if isinstance(item, Thread):
                self.current = item
                try:
                    next(running[item])
                except StopIteration:
                    item.check_at_end()
                    del running[item]
            else:
                item()
        if any(warp.block.registers > 0 for warp in self.warps):
            raise SimulationError("the warps ask for more registers than there are")
        if running:
            waits = {f"block {t.block.index} warp {t.warp.index} waits for {t.waits_for}" for t in running}
            raise SimulationError("deadlock: " + "; ".join(sorted(waits)))

    def wake(self, thread, later=0.0):
        draw = self.random.random()
        heapq.heappush(self.ready, (thread.warp.slow + thread.lag + later + draw, draw, thread))

    def some_time(self, event):
        """Call `event` at some later time."""
        draw = self.random.random()
        heapq.heappush(self.ready, (6 * draw, draw, event))

    def wait(self, barrier: Barrier, parity: int):
        """Wait until the barrier's phase of this parity has ended; the lanes of a warp poll together."""
        meeting, is_last = yield from self._come(("warp", self.current.warp.index), (barrier, parity), self.lanes)
        if is_last:
            thread = self.current
            if self.random.random() < PREEMPTED:
                self.wake(thread, later=6.0)
                yield
            while barrier.phase == parity:
                thread.waits_for = barrier
                barrier.waiting.append(thread)
                yield
            self._end(meeting)

    def meet(self, key, kind, size, value=None, action=None):
        """Wait until `size` threads have come to a place of the block; the last one acts. Returns what they brought."""
        meeting, is_last = yield from self._come(key, kind, size, value)
        if is_last:
            if action is not None:
                action()
            self._end(meeting)
        return meeting.values

    def _come(self, key, kind, size, value=None):
        thread = self.current
        meetings = thread.block.meetings
        meeting = meetings.get(key)
        if meeting is None:
            meeting = meetings[key] = Meeting(kind, size)
        if (meeting.kind, meeting.size) != (kind, size):
            raise SimulationError(f"{thread} is at {kind} of {size}, others at {meeting.kind} of {meeting.size}")
        meeting.values[thread.index] = value
        if len(meeting.values) == size:
            del meetings[key]
            return meeting, True
        meeting.waiting.append(thread)
        while not meeting.met:
            thread.waits_for = meeting
            yield
        return meeting, False

    def _end(self, meeting):
        meeting.met = True
        if meeting.kind in ORDERING:
            for thread in (*meeting.waiting, self.current):
                thread.has_accessed = False
        for other in meeting.waiting:
            self.wake(other)

    def meet_warp(self, kind, value=None, action=None):
        thread = self.current
        values = yield from self.meet(("warp", thread.warp.index), kind, self.lanes, value, action)
        return values
