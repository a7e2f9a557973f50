"""Which work items a block computes: each claims its next one when it begins the one before, so that a block whose tiles
have few rows takes more of them, and none waits for another at the end.

The counter of claimed items lies in global memory, is zero before a launch, and again after it. Launches that share a
counter must run one after the other, as those on one stream do.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

SLOTS = 4  # items passed on that not every warp has read yet


@dataclass(frozen=True)
class Work:
    """The items of a block, claimed by its first warp and passed on to the others through shared memory.

    An item is -1 where there is none left. `turn` counts the items a warp has had after its first. full: barriers of the
    slots, then those of empty slots.
    """

    counter: cute.Pointer
    items: Int32
    slots: cute.Tensor
    full: cute.Pointer

    @property
    def empty(self):
        return self.full + SLOTS

    def first(self):
        """(item, turn) to begin with."""
        return _within(cute.arch.block_idx()[0], self.items), Int32(0)

    def claim(self):
        """The item to be computed after this one, in lane 0 of the first warp; nothing waits for it until `pass_on`."""
        return _claim(self.counter, self.items)

    def pass_on(self, claimed, turn):
        """By the first warp: (item, turn) that come next."""
        return _pass_on(self.slots, self.full, self.empty, claimed, turn)

    def receive(self, turn):
        """By every other warp: (item, turn) that come next."""
        return _receive(self.slots, self.full, self.empty, turn)


def arrivals(readers: int):
    """How many arrive at each of a Work's barriers; `readers`: warps beside the first."""
    return [1] * SLOTS + [readers] * SLOTS


@cute.jit
def _within(item: Int32, items: Int32):
    if item >= items:
        item = Int32(-1)
    return item


@cute.jit
def _claim(counter, items: Int32):
    claimed = Int32(0)
    if cute.arch.lane_idx() == 0:
        before = cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")
        # every block stops at the first item there is not, so as many are claimed as there are, and this is the last
        if before == items - 1:
            cute.arch.atomic_exch(counter, Int32(0), sem="relaxed", scope="gpu")
        claimed = _within(before + cute.arch.grid_dim()[0], items)
    return claimed


@cute.jit
def _pass_on(slots: cute.Tensor, full, empty, claimed: Int32, turn: Int32):
    slot = turn % SLOTS
    cute.arch.mbarrier_wait(empty + slot, (turn // SLOTS & 1) ^ 1)
    if cute.arch.lane_idx() == 0:
        slots[slot] = claimed
        cute.arch.mbarrier_arrive(full + slot)
    return cute.arch.make_warp_uniform(cute.arch.shuffle_sync(claimed, 0)), turn + 1


@cute.jit
def _receive(slots: cute.Tensor, full, empty, turn: Int32):
    slot = turn % SLOTS
    cute.arch.mbarrier_wait(full + slot, turn // SLOTS & 1)
    item = cute.arch.make_warp_uniform(slots[slot])
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(empty + slot)
    return item, turn + 1
