"""The stand-in for the DSL: threads, barriers, asynchronous copies and wgmma, as PTX defines them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from .machine import REGISTERS, Barrier, SimulationError
from .tensors import Layout, Tensor, coordinates_of, decoded, state


def _is_first_lane():
    return state.thread.lane == 0


def elect_one():
    """Run elect.sync, for which all lanes of a warp come together."""
    warp = state.thread.warp

    def note():
        warp.threads[0].follows_unordered = any(other.has_accessed for other in warp.threads[1:])

    yield from state.gpu.meet_warp("elect_one", action=note)
    return _is_first_lane()


def barrier_at(pointer):
    barrier = state.thread.block.barriers.get(pointer.address)
    if barrier is None or not state.thread.block.barriers_are_visible:
        raise SimulationError(f"no barrier was initialised at {pointer.address}, or without a fence")
    return barrier


def mbarrier_init_fence():
    state.thread.block.barriers_are_visible = True


def mbarrier_arrive(pointer, arrive_count=1):
    """Arrive at a barrier, by an elected lane for the others too, whose accesses to shared memory must have been
    ordered before."""
    thread = state.thread
    if thread.follows_unordered:
        raise SimulationError(f"{thread} arrives for lanes whose accesses may come later: no sync_warp")
    barrier_at(pointer).arrive(arrive_count)


def mbarrier_init(pointer, count):
    block = state.thread.block
    name = f"{len(block.barriers)} of block {block.index}"
    block.barriers[pointer.address] = Barrier(state.gpu, name, count)


def sync_warp():
    yield from state.gpu.meet_warp("sync_warp")


def named_barrier(kind):
    def wait(barrier_id=0, number_of_threads=None):
        number = state.gpu.num_threads if number_of_threads is None else number_of_threads
        yield from state.gpu.meet(("named", barrier_id), kind, number)

    return wait


def shuffle(source):
    def shuffle(value, lane):
        thread = state.thread
        values = yield from state.gpu.meet_warp("shuffle", value)
        return values[thread.index - thread.lane + source(thread.lane, lane)]

    return shuffle


def set_registers(sign):
    """Run setmaxnreg: to no more registers than at the start where `sign` is -1, to no fewer where it is 1."""

    def change(count):
        added = count - REGISTERS * 128 // state.gpu.num_threads // 8 * 8
        if added * sign < 0:
            raise SimulationError(f"setmaxnreg to {count}, {added} more than at the start")
        if _is_first_lane():
            state.thread.block.registers += added

    return change


def atomic(change):
    def update(pointer, value, sem=None, scope=None):
        tensor = Tensor(pointer, Layout((1,)))
        before = tensor[0]
        tensor[0] = change(before, value)
        return before

    return update


def copy_async(shared_address, address, size=None):
    if shared_address % 16 or address % 16:
        raise SimulationError("cp.async off alignment")
    if size not in (None, 0, 16):
        raise SimulationError(f"cp.async of {size} bytes")
    state.thread.copies.append((shared_address, address, 16 if size is None else size))


def arrive_when_copied(pointer):
    """cp.async.mbarrier.arrive.noinc"""
    thread, barrier = state.thread, barrier_at(pointer)
    barrier.follows_copies = True
    thread.landing.append((thread.copies, barrier))
    thread.copies = []

    def land():
        copies, barrier = thread.landing.popleft()  # of one thread, in order
        shared, memory = thread.block.shared, state.gpu.memory
        if copies:
            to, source, sizes = np.array(copies, np.int64).T
            vector = 2 * np.arange(8)
            values = np.zeros((len(to), 8), np.uint16)
            read = memory.places((source[:, None] + vector)[sizes > 0], 2)
            values[sizes > 0] = memory.of_width[2][read]
            places = shared.places(to[:, None] + vector, 2)
            shared.of_width[2][places] = values
            thread.block.copied[places] = True
        barrier.arrive()

    state.gpu.some_time(land)


class Atom:
    """Kind of copy that `copy` makes; of TMA with the box that the descriptor was made for."""

    def __init__(self, kind, box=None):
        self.kind, self.box = kind, box


def make_tma_atom(op, tensor, smem_layout, box):
    if tuple(smem_layout.shape[:2]) != tuple(box):
        raise SimulationError(f"a box of {box} to shared memory of {smem_layout.shape}")
    return Atom(op, box), Tensor(tensor.pointer, tensor.base, tensor.origin, tensor.modes, clipped=True)


def _check_boxes(atom, *sides):
    if any(side.shape != tuple(atom.box) for side in sides):
        raise SimulationError(f"TMA of {[side.shape for side in sides]} by boxes of {atom.box}")


def tma_load(atom, source, target, tma_bar_ptr):
    if not _is_first_lane():
        return
    _check_boxes(atom, source, target)
    block, barrier = state.thread.block, barrier_at(tma_bar_ptr)
    places, memory, gpu = target.shared_places(), state.gpu.memory, state.gpu

    def land():
        addresses, inside = source.box()
        values = np.zeros(addresses.shape, np.uint16)
        values[inside] = memory.of_width[2][memory.places(addresses[inside], 2)]
        block.shared.of_width[2][places] = values
        block.copied[places] = False
        barrier.land(2 * places.size)

    gpu.some_time(land)


def tma_store(atom, source, target):
    if not _is_first_lane():
        return
    _check_boxes(atom, source, target)
    thread, places = state.thread, source.shared_places()
    if thread.block.unfenced[places].any():
        raise SimulationError(f"{thread}: TMA might not see what was written to shared memory: no fence_proxy")
    thread.stores.append((places, thread.block.shared.of_width[2][places], target))


def commit_stores():
    thread = state.thread
    if thread.stores:
        thread.store_groups.append(thread.stores)
        thread.stores = []


def wait_for_stores(groups, read=False):
    thread, memory = state.thread, state.gpu.memory
    while len(thread.store_groups) > groups:
        for places, values, target in thread.store_groups.pop(0):
            if not np.array_equal(thread.block.shared.of_width[2][places], values):
                raise SimulationError(f"{thread}: shared memory was written while TMA read it")
            addresses, inside = target.box()
            memory.of_width[2][memory.places(addresses[inside], 2)] = values[inside]


def written(places):
    """Note that the thread wrote shared memory, which TMA and wgmma see after its fence alone."""
    thread = state.thread
    if isinstance(places, slice) and places.start == places.stop:
        return
    thread.has_accessed = True
    thread.block.unfenced[places] = True
    thread.unfenced.append(places)


def mbarrier_wait(pointer, parity):
    barrier = barrier_at(pointer)
    yield from state.gpu.wait(barrier, int(parity))
    if barrier.follows_copies:
        state.thread.sees_copies = False


def fence_proxy(kind, space=None):
    thread = state.thread
    thread.sees_copies = True
    for places in thread.unfenced:
        thread.block.unfenced[places] = False
    thread.unfenced.clear()


class Fragment:
    """An operand in shared memory: (extent, 16, k block, stage)."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.shape = tensor.shape[0], 1, tensor.shape[1] // 16, tensor.shape[2]

    def __getitem__(self, index):
        *_, k_block, stage = index
        rows, (mode, step, _), _ = self.tensor.modes
        if not 0 <= k_block < self.shape[2]:
            raise SimulationError(f"k block {k_block} of {self.shape[2]}")
        return self.tensor.moved((0, 16 * k_block, stage), (rows, (mode, step, 16)))


class TiledMma:
    """wgmma of 64 x columns x 16."""

    def __init__(self, kind, other, major_a, major_b, accumulator, atoms, tiler_mn):
        self.kind, (_, self.columns) = kind, tiler_mn
        self.k_major = {"a": major_a, "b": major_b}

    def set(self, field, value):
        state.thread.accumulates[self] = value

    def get_slice(self, thread):
        return SimpleNamespace(
            partition_A=lambda tensor: tensor,
            partition_B=lambda tensor: tensor,
            partition_C=lambda tensor: coordinates_of(thread, tensor.shape[1]),
        )

    def _fragment(self, operand, extent, tensor):
        if tensor.shape[0] != extent or tensor.base.k_major != self.k_major[operand]:
            raise SimulationError(f"wgmma of {extent} with operand {operand} of {tensor.shape}")
        return Fragment(tensor)

    def make_fragment_A(self, tensor):
        return self._fragment("a", 64, tensor)

    def make_fragment_B(self, tensor):
        return self._fragment("b", self.columns, tensor)

    def partition_shape_C(self, shape):
        return "accumulator", shape[1]


def gemm(mma, out, a, b, accumulator):
    """Issue the MMA: lane 0 issues for its warp, which computes 16 of the 64 rows."""
    thread = state.thread
    if thread.lane:
        return
    if not thread.warp.fenced:
        raise SimulationError(f"{thread}: wgmma without a fence")
    if out.columns != mma.columns:
        raise SimulationError(f"wgmma of {mma.columns} columns into {out.columns}")
    rows = a.shared_places()[16 * (thread.warp.index % 4) :][:16]
    operands = [(places, thread.block.shared.of_width[2][places]) for places in (rows, b.shared_places())]
    if any(thread.block.unfenced[places].any() for places, _ in operands):
        raise SimulationError(f"{thread}: wgmma might not see what was written to shared memory: no fence_proxy")
    if not thread.sees_copies and any(thread.block.copied[places].any() for places, _ in operands):
        raise SimulationError(f"{thread}: wgmma might not see what cp.async wrote: no fence_proxy")
    thread.warp.issued.append((out, operands, thread.accumulates[mma], mma.kind))


def fence_wgmma():
    if _is_first_lane():
        state.thread.warp.fenced = True


def commit_wgmma():
    if _is_first_lane():
        warp = state.thread.warp
        warp.groups.append(warp.issued)
        warp.issued, warp.fenced = [], False


def wait_for_wgmma(left):
    warp = state.thread.warp
    shared = warp.block.shared.of_width[2]

    def finish():
        while len(warp.groups) > left:
            for out, operands, accumulate, kind in warp.groups.pop(0):
                if not all(np.array_equal(shared[places], values) for places, values in operands):
                    raise SimulationError(f"warp {warp.index}: an operand was written during its wgmma")
                a, b = (decoded(values, kind).astype(np.float32) for _, values in operands)
                with np.errstate(all="ignore"):
                    product = (a @ b.T).reshape(2, 8, -1, 4, 2).transpose(1, 3, 2, 0, 4).reshape(32, -1)
                    own = out.of_warp[:, : out.size]
                    own[:] = own + product if accumulate else product

    yield from state.gpu.meet_warp("wgmma wait", action=finish)
