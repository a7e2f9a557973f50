"""Which work items a block computes: it claims its next one when it begins the one before, so that a block whose tiles
have few rows takes more of them, and none waits for another at the end. Short items are dealt out instead, but for the
last eighth: blocks that share operands then keep step. A round is dealt one place on from the one before, because a block
that always got tiles with few rows would run ahead of the others, and out of what L2 holds.

The counter of claimed items lies in global memory, is zero before a launch, and again after it. Launches that share a
counter must run one after the other, as those on one stream do.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

SLOTS = 4  # items passed on that not every warp has read yet


class Item(NamedTuple):
    """The rows first .. end of an expert, and a tile of columns or a tile of its gradient. expert -1: none left."""

    expert: Int32
    first: Int32
    end: Int32
    tile: Int32


NONE_LEFT = Item(Int32(-1), Int32(0), Int32(0), Int32(0))


@dataclass(frozen=True)
class Work:
    """The items of a block, found by its first warp and passed on to the others through shared memory.

    items: how many there are in all. slots: (4, SLOTS). full: barriers of the slots, then those of empty slots. dealt:
    whether items are dealt out. `turn` counts the items that a warp has passed on or received.
    """

    counter: cute.Pointer
    items: Int32
    slots: cute.Tensor
    full: cute.Pointer
    dealt: bool

    @property
    def empty(self):
        return self.full + SLOTS

    def first(self):
        """The number of a block's first item, -1 where there is none."""
        return _within(cute.arch.block_idx()[0], self.items)

    def claim(self):
        """By the first warp when it begins an item: the number of its next one, for `claimed`; nothing waits for it."""
        return _claim(self.counter, self.items)

    def claim_or_deal(self, number, turn):
        """`claim`, or where items are dealt out the number that follows this one, of the item begun."""
        return _deal(self.counter, self.items, number, turn) if self.dealt else self.claim()

    def claimed(self, number):
        """What `claim` returned, in every lane; -1 where there is none."""
        return cute.arch.make_warp_uniform(cute.arch.shuffle_sync(number, 0))

    def hand_round(self, warp, item, turn):
        """By the warps that produce: the first one's item, which it passes on, for all of them."""
        return _hand_round(self.slots, self.full, self.empty, warp, *item, turn)

    def receive(self, turn) -> Item:
        """By every other warp."""
        return Item(*_receive(self.slots, self.full, self.empty, turn))


def place(number, height, width: int, together: int):
    """(row, column) of the number-th of height x width places, where `together` rows at a time pass over all columns."""
    group = number // (together * width)
    in_group = number - group * (together * width)
    rows = cutlass.min(height - group * together, together)
    column = in_group // rows
    return group * together + in_group - column * rows, column


def arrivals(readers: int):
    """How many arrive at each of a Work's barriers; `readers`: warps beside the first."""
    return [1] * SLOTS + [readers] * SLOTS


@cute.jit
def _within(number: Int32, items: Int32):
    if number >= items:
        number = Int32(-1)
    return number


@cute.jit
def _claim(counter, items: Int32, rounds=1):
    number, blocks = Int32(0), cute.arch.grid_dim()[0]
    if cute.arch.lane_idx() == 0:
        before = cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")
        # every item begun from the last dealt round on claims one, so this is the last of as many
        if before == items - 1 - (rounds - 1) * blocks:
            cute.arch.atomic_exch(counter, Int32(0), sem="relaxed", scope="gpu")
        number = _within(before + rounds * blocks, items)
    return number


@cute.jit
def _deal(counter, items: Int32, number: Int32, turn: Int32):
    blocks = cute.arch.grid_dim()[0]
    rounds = cutlass.max(items * 7 // 8 // blocks, 1)
    if turn < rounds:
        number += blocks + 1
        if number >= (turn + 1) * blocks:
            number -= blocks
    else:
        number = _claim(counter, items, rounds)
    return number


@cute.jit
def _pass_on(slots: cute.Tensor, full, empty, expert: Int32, first: Int32, end: Int32, tile: Int32, turn: Int32):
    slot = turn % SLOTS
    cute.arch.mbarrier_wait(empty + slot, (turn // SLOTS & 1) ^ 1)
    if cute.arch.lane_idx() == 0:
        slots[0, slot], slots[1, slot], slots[2, slot], slots[3, slot] = expert, first, end, tile
        cute.arch.mbarrier_arrive(full + slot)
    cute.arch.sync_warp()


@cute.jit
def _hand_round(
    slots: cute.Tensor, full, empty, warp, expert: Int32, first: Int32, end: Int32, tile: Int32, turn: Int32
):
    if warp == 0:
        _pass_on(slots, full, empty, expert, first, end, tile, turn)
    else:
        expert, first, end, tile = _receive(slots, full, empty, turn)
    return expert, first, end, tile


@cute.jit
def _receive(slots: cute.Tensor, full, empty, turn: Int32):
    slot = turn % SLOTS
    cute.arch.mbarrier_wait(full + slot, turn // SLOTS & 1)
    item = [cute.arch.make_warp_uniform(slots[i, slot]) for i in range(4)]
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(empty + slot)
    return item
