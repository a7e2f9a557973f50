"""HostMemory: memory of this host for experts, of this process alone or one copy for all ranks of the host."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from transformers.utils import logging

from ..kernels.packed import Quantized
from .copies import page_aligned

logger = logging.get_logger(__name__)
FILE = "sonicmoe_hf experts"  # as /proc/PID/maps names the memory
COLUMNS = 4096  # words of eight bytes, of the table whose sums make a digest
A_COPY_EACH = (
    "sonicmoe_hf: the {count} ranks of this host hold a copy each of the experts in host memory, because they cannot "
    "share one: {cause}"
)
NOT_INITIALIZED = (
    "torch.distributed is not initialised; make TrainingArguments, or call init_process_group, before the model"
)
OTHER_WEIGHTS = (
    "ranks {ranks} of this host have other weights in {name} than rank {rank}, so they cannot share host memory; load "
    "the same checkpoint in each with the same options, or make random weights from the same seed"
)


class HostMemory:
    """Memory for experts that every rank of this host places at the same time.

    Such ranks hold the same experts (DDP), so they share one copy. A layer's memory is a pair of anonymous files of the
    rank that fills it, which the others open through /proc. The kernel frees it when the last process that maps it has
    ended, also by a kill. torchrun's environment says which ranks are of one host, and they meet in the store of their
    process group, whose timeout holds. A process without other ranks on its host has memory of its own.

    has_one_copy: whether there is one copy for all ranks, known once `open` has returned.
    """

    meetings = itertools.count()

    def __init__(self) -> None:
        self.ranks, self.rank = _ranks_of_host()
        self.has_one_copy = False
        self._opened: list[torch.Tensor] = []
        if len(self.ranks) > 1:
            store: Any = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
            self._store = dist.PrefixStore(f"experts in host memory {next(self.meetings)}", store)

    @property
    def num_copies(self) -> int:
        """The number of copies of the experts that this host is to hold."""
        return 1 if self.has_one_copy else len(self.ranks)

    def fills(self, number: int) -> bool:
        """Tell whether this rank fills the memory of a weight. The two of a layer are one rank's."""
        layer = number // 2
        return not self.has_one_copy or self.ranks[layer % len(self.ranks)] == self.rank

    def gather_from_ranks(self, subject: str, own: Any) -> list[Any]:
        """Gather the contributions of this host's ranks to a subject, once all have come here. Raises torch's
        DistStoreError where one does not within the process group's timeout."""
        if len(self.ranks) == 1:
            return [own]
        self._store.set(f"{subject} of rank {self.rank}", json.dumps(own))
        return [json.loads(self._store.get(f"{subject} of rank {rank}")) for rank in self.ranks]

    def open(self, sizes: Sequence[int]) -> None:
        """Map memory for weights of so many bytes, if the ranks can share it. It takes none before it is pinned or
        written."""
        if len(self.ranks) == 1:
            return
        self.has_one_copy = True
        with contextlib.ExitStack() as files:
            causes = self._map(sizes, files)
        if causes:
            self.has_one_copy, self._opened = False, []
            logger.warning(A_COPY_EACH.format(count=len(self.ranks), cause=causes[0]))

    def _map(self, sizes: Sequence[int], opened: contextlib.ExitStack) -> list[str]:
        """Map memory as `open`, and return what keeps ranks from sharing it. opened: closes this rank's files."""
        cause, files = None, {}
        try:
            for number in filter(self.fills, range(len(sizes))):
                file = os.memfd_create(FILE)
                opened.callback(os.close, file)
                os.ftruncate(file, sizes[number])
                files[number] = file
        except (AttributeError, OSError) as error:  # a system without memfd, or one that does not permit it
            cause = str(error)
        offers = self.gather_from_ranks(
            "memory", [os.getpid(), {number: [file, *_id(file)] for number, file in files.items()}]
        )
        offered = {int(number): (pid, *file) for pid, of_rank in offers for number, file in of_rank.items()}
        try:
            if len(offered) == len(sizes):
                self._opened = [page_aligned(size, _open(*offered[number])) for number, size in enumerate(sizes)]
        except OSError as error:
            cause = str(error)
        return [cause for cause in self.gather_from_ranks("what keeps it", cause) if cause is not None]

    def allocate(self, sizes: Sequence[int], pin: Callable[[int, torch.Tensor], None]) -> None:
        """Hand the memory of each weight to `pin`, with its number. Memory that this rank fills comes first, and the
        others' once they have theirs, so that each takes its share of the host's pages.

        Raises:
            MemoryError: on every rank of this host, where one of them does not get its memory.
        """
        opened, self._opened = self._opened, []
        for is_own in (True, False):
            error = None
            try:
                for number, size in enumerate(sizes):
                    if self.fills(number) is is_own:
                        pin(number, opened[number] if self.has_one_copy else page_aligned(size))
            except (MemoryError, OSError, RuntimeError) as caught:  # the driver's, the system's, torch's
                error = caught
            causes = self.gather_from_ranks(f"pinned {is_own}", None if error is None else str(error))
            failed = [(rank, cause) for rank, cause in zip(self.ranks, causes) if cause is not None]
            if failed:
                rank, cause = failed[0]
                raise MemoryError(cause if len(self.ranks) == 1 else f"rank {rank} of this host: {cause}") from error

    def agree(self, subject: str, digests: dict[str, str]) -> None:
        """Wait for the ranks of this host, and compare the digests of weights by their names.

        Raises:
            ValueError: ranks have other weights than this one.
        """
        of_ranks = dict(zip(self.ranks, self.gather_from_ranks(subject, digests)))
        for name in dict.fromkeys(itertools.chain(digests, *of_ranks.values())):
            others = [rank for rank, theirs in of_ranks.items() if theirs.get(name) != digests.get(name)]
            if others:
                raise ValueError(OTHER_WEIGHTS.format(ranks=others, name=name, rank=self.rank))


def digest_of(packed: Quantized) -> str:
    """Compute a digest of a weight from the sums of its words along the rows and columns of a table, which its device
    makes without a copy of aligned tensors, and from the bytes that fill no row."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in packed:
        if tensor is not None:
            digest.update(repr((tensor.shape, tensor.dtype)).encode())
            bytes_ = tensor.detach().contiguous().view(-1).view(torch.uint8)
            bytes_ = bytes_.clone() if bytes_.storage_offset() % 8 else bytes_
            nbytes = bytes_.numel() - bytes_.numel() % (8 * COLUMNS)
            table, rest = bytes_[:nbytes].view(torch.int64).view(-1, COLUMNS), bytes_[nbytes:]
            for words in (table.sum(0), table.sum(1), rest):
                digest.update(words.cpu().numpy().tobytes())
    return digest.hexdigest()


def _ranks_of_host() -> tuple[range, int]:
    """Find (the ranks of this host, this rank)."""
    count = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if count > 1 and not (dist.is_available() and dist.is_initialized()):
        logger.warning_once(A_COPY_EACH.format(count=count, cause=NOT_INITIALIZED))
        count = 1
    if count == 1 or dist.get_world_size() < count:
        return range(1), 0
    first = dist.get_rank() - int(os.environ["LOCAL_RANK"])
    return range(first, first + count), dist.get_rank()


def _id(file: int | str) -> tuple[int, int]:
    status = os.stat(file)
    return status.st_dev, status.st_ino


def _open(pid: int, number: int, *expected: int) -> int:
    """Open a file of another process. Raises OSError where /proc does not show it, or shows another process."""
    path = f"/proc/{pid}/fd/{number}"
    if _id(path) != expected:
        raise OSError(f"{path} is another process's; the ranks run in containers of their own")
    return os.open(path, os.O_RDWR)
