"""The staging set: a second set of parameters, on the device or on the host, that holds a version until its commit.

The receiver allocates the set at start, not during an update.  So an update needs no more memory than its buckets, and
a second set that does not fit is found at start.  A flip allocates nothing on a device.  After a flip the second set
holds the old version, which ``undo`` restores.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from weightcast.digest.copies import bits
from weightcast.digest.exchange import MemoryExchange
from weightcast.errors import ConfigError
from weightcast.receiver.mapped_set import MappedSet
from weightcast.runtime.free_memory import free_host_bytes
from weightcast.runtime.mapped_memory import CudaMapper, can_map
from weightcast.runtime.streams import wait_for_streams
from weightcast.runtime.tensor_places import TensorPlaces

StagingPlace = Literal["device", "host", "none"]
Tensors = Mapping[str, torch.Tensor]
_CHUNK_BYTES = 32 << 20
_HEADROOM = 1.2
# A flip exchanges the contents of smaller parameters and the pointers of the others.  To set a pointer takes the host
# 2 us, in which a GPU exchanges 1 MiB.  A CPU would exchange 4 KiB.
_EXCHANGED_BYTES = {"cuda": 1 << 20}
_CONTENTS = itertools.count()


@dataclass(slots=True, eq=False)
class _Placing:
    """Where both sets lie at one time, and after a flip from here.

    ``exchange`` is of the small parameters' contents; None if there are none.  ``flipped`` is worked out when needed.
    """

    live: TensorPlaces
    exchange: MemoryExchange | None
    flipped: _Placing | None = None
    number: int = field(default_factory=itertools.count().__next__)


def choose_place(
    asked: Literal["auto", "device", "host", "none"], *, size_bytes: int, device: torch.device
) -> StagingPlace:
    """Chooses the place of a staging set; raises ``ConfigError`` if the place asked for has too little free memory."""
    if asked == "none":
        return "none"
    need = int(size_bytes * _HEADROOM)
    on_device = device.type == "cuda" and torch.cuda.mem_get_info(device)[0] >= need
    on_host = free_host_bytes() >= need
    fits: dict[str, bool] = {"device": on_device if device.type == "cuda" else on_host, "host": on_host}
    if asked != "auto":
        if not fits[asked]:
            raise ConfigError(
                f"a second set of weights needs {size_bytes} bytes on the {asked}, and fewer are free",
                hint="use staging none: an update that fails half way then quarantines the engine",
            )
        return asked
    if fits["device"]:
        return "device"
    return "host" if fits["host"] else "none"


def mapper_of(device: torch.device) -> CudaMapper | None:
    """Returns the mapper of a device's memory; None if there is none."""
    return CudaMapper(device) if can_map(device) else None


class StagingSet:
    """A second set of parameters, and its exchange with the live one."""

    def __init__(
        self,
        residents: Mapping[str, torch.Tensor],
        place: StagingPlace,
        *,
        keep_storage: bool = False,
        in_order: bool = False,
        may_move: bool = False,
        after_move: Callable[[], object] = torch.cuda.empty_cache,
    ) -> None:
        """Allocates the set.

        Args:
            residents: Live parameters and buffers by name; each once, none a view of another.  Elements that no update
                writes keep their values.
            place: ``device``, ``host`` (pinned memory if the model is on a GPU) or ``none`` (updates write to the live
                set).
            keep_storage: True if a flip copies contents on the device too, for engines that hold addresses of
                parameters (captured graphs, packed views).
            in_order: True if whatever reads the live set after a flip is ordered behind the stream that is current at
                the flip.  A flip on a device then only enqueues the exchange, so that the host can prepare what comes.
            may_move: True if nothing has noted addresses of parameters yet, and the engine frees and moves none by an
                account of its own.  With ``keep_storage``, parameters on a GPU then move once, now, and a flip maps
                other memory to their new addresses.
            after_move: Frees the memory that those parameters have left.
        """
        self.place: StagingPlace = place
        self._keep_storage = keep_storage
        self._may_move = may_move and keep_storage and place == "device"
        self._after_move = after_move
        self._waits = not in_order
        self.lives = dict(residents)
        self._tensors = list(self.lives.values())
        self._waiting: dict[str, torch.Tensor] = {}
        self._scratch: dict[torch.device, torch.Tensor] = {}
        self._mapped: MappedSet | None = None
        self._small: dict[str, torch.Tensor] = {}
        self._others: dict[str, torch.Tensor] = {}
        self._placing = _Placing(TensorPlaces([]), None)
        # Progress of a flip: whether contents were exchanged, the number of other steps done, and whether the scratch
        # memory has the old contents of the next.
        self._exchanged = False
        self._done = 0
        self.torn = False  # True if a flip began and did not end: the live set is a mixture
        self._in_scratch = False
        self._flipped = False
        self.live_contents, self.waiting_contents = next(_CONTENTS), next(_CONTENTS)
        self.allocate()

    def begin(self) -> None:
        """Notes that other contents will wait from now on, so ``waiting_contents`` gets a number that nothing had.

        A flip exchanges it with ``live_contents``, and ``undo`` exchanges them back.
        """
        self.waiting_contents = next(_CONTENTS)

    def allocate(self) -> None:
        """Allocates the parts of the second set, and of a flip's scratch memory, that do not exist."""
        self._map()
        for name, tensor in self.lives.items():
            if self.place == "none" or name in self._waiting:
                continue
            if self.place == "device" or not _is_dense(tensor):
                # Torch copies memory with gaps between GPU and host by way of memory that it allocates.  So the second
                # copy of such a parameter is on the device.
                waiting = torch.empty_strided(
                    tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=tensor.device
                )
            else:
                waiting = torch.empty_strided(
                    tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda"
                )
            self._waiting[name] = waiting.copy_(tensor.detach())  # rows that no update writes are in both sets
        wait_for_streams(*(tensor.device for tensor in self.lives.values()))  # an update may come on another stream
        self._placing = self._placed()
        self._take_scratch()

    def free(self) -> None:
        """Frees the set's memory on the device; call ``allocate`` before the next update."""
        self._reset_progress()
        self._placing = _Placing(TensorPlaces([]), None)
        self._scratch.clear()
        if self.place == "device":
            self._waiting.clear()
            if self._mapped is not None:
                self._mapped.free()
        else:
            self._waiting = {name: tensor for name, tensor in self._waiting.items() if tensor.device.type == "cpu"}

    def store(self) -> None:
        """As ``MappedSet.store``, for the parameters that were moved, if there are any."""
        if self._mapped is not None:
            self._mapped.store()

    def let_go(self) -> int:
        """As ``MappedSet.let_go``."""
        return self._mapped.let_go() if self._mapped is not None else 0

    def restore(self) -> None:
        """As ``MappedSet.restore``."""
        if self._mapped is not None:
            self._mapped.restore()

    @property
    def number(self) -> int:
        """A number that stays the same as long as both sets lie where they lay; ``look`` finds moved parameters."""
        return self._placing.number

    def sets(self) -> list[tuple[int, Tensors, Tensors]]:
        """``number``, ``lives`` and ``targets`` as they are, and as they will be after a flip if that changes them."""
        found: list[tuple[int, Tensors, Tensors]] = [(self.number, self.lives, self.targets)]
        after = self._after()
        if after is not self._placing:
            lives = self.lives | {name: self._waiting[name] for name in self._others}
            found.append((after.number, lives, self._waiting | self._others))
        return found

    def look(self, *, forms: bool = False) -> int:
        """Looks where the live parameters lie now, and at their dtypes and shapes if asked; returns ``number``."""
        now = self._placing
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]  its calls take longer
            lie, alike = now.live.compare(self._tensors, forms=forms)
        if not lie and self._mapped is not None and not self._mapped.in_place():
            # Its second copies stay, and contents are exchanged from now on.
            self._exchanged = self._exchanged or self._mapped.exchanged
            self._mapped, self._may_move = None, False
            self._sort()
            self._take_scratch()
            self._placing = self._placed()
        elif not lie or not alike:
            self._placing = self._placed()
        return self._placing.number

    @property
    def staged(self) -> bool:
        """True if live parameters stay untouched until ``flip``."""
        return self.place != "none"

    @property
    def size_bytes(self) -> int:
        """Bytes that the second set takes while it is allocated."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.lives.values()) if self.staged else 0

    @property
    def targets(self) -> Mapping[str, torch.Tensor]:
        """The tensors that take the new values of parameters, by name."""
        return self._waiting if self.staged else self.lives

    def target(self, name: str) -> torch.Tensor:
        """Returns the tensor that takes the new values of a parameter."""
        return self.targets[name]

    def live(self, name: str) -> torch.Tensor:
        """Returns the live parameter."""
        return self.lives[name]

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the live parameters that a flip exchanges by mapping; as many of the second set are not torch's."""
        return self._mapped.size_bytes if self._mapped is not None else 0

    @property
    def moves_contents(self) -> bool:
        """True if a flip copies contents; False if it exchanges pointers, or does nothing."""
        return self.place == "host" or (self.place == "device" and self._keep_storage)

    def flip(self) -> None:
        """Exchanges the staging set and the live one.  Allocates nothing on a device.

        A set on the device exchanges pointers of large parameters and, in one launch, contents of small ones.  The
        parameter objects stay, but the storage of the large ones changes, so a finisher must capture graphs again.
        With ``keep_storage`` all contents are exchanged, or other memory is mapped to the addresses of parameters that
        were moved.  With a set on the host, contents are exchanged chunk by chunk.  If a copy fails, the live set is a
        mixture until ``undo``.
        """
        self._reset_progress()
        self.look()
        before, after = self._placing, self._after()
        self.torn = True
        if self._mapped is not None:
            self._mapped.exchange()
        if before.exchange is not None:
            before.exchange.run(wait=self._waits)
            self._exchanged = True
        if self.moves_contents:
            for live, waiting in self._chunks():
                old = self._scratch_for(live)
                old.copy_(live)
                self._in_scratch = True
                live.copy_(waiting)
                waiting.copy_(old)
                self._done += 1
                self._in_scratch = False
        elif self.place == "device":
            waiting = self._waiting
            for name, tensor in self._others.items():  # not by ``_swap``: engines stand still meanwhile
                old = tensor.data
                tensor.data = waiting[name]
                waiting[name] = old
                self._done += 1
        self.torn = False
        self._placing = after
        self._renumber(flipped=True)

    def undo(self) -> None:
        """Undoes the last flip.  A second call does nothing, and one that failed can be repeated.

        If contents were copied in chunks, both sets hold the old version afterwards.  If a copy fails, the live set is
        still a mixture.
        """
        self.look()
        before, after = self._placing, self._after()
        if self._mapped is not None:
            self.torn = True
            self._mapped.undo()
        if self._exchanged:
            assert before.exchange is not None
            self.torn = True
            before.exchange.run(wait=self._waits)
            self._exchanged = False
        if self.moves_contents:
            if self._done or self._in_scratch:
                self.torn = True  # until all chunks are undone
                self._undo_chunks()
        elif self._done:
            self.torn = True
            whole = self._done == len(self._others)
            for name, tensor in list(self._others.items())[self._done - 1 :: -1]:
                self._swap(name, tensor)
                self._done -= 1
            if whole:
                self._placing = after
        if self._flipped:
            self._renumber(flipped=False)
        self._reset_progress()

    def _renumber(self, *, flipped: bool) -> None:
        self.live_contents, self.waiting_contents = self.waiting_contents, self.live_contents
        self._flipped = flipped

    def _map(self) -> None:
        """Moves the parameters that can be moved, unless they are where an earlier call moved them to."""
        if self._may_move and not (self._mapped is not None and self._mapped.allocate()):
            device = self._tensors[0].device if self._tensors else torch.device("cpu")
            mapper = mapper_of(device)
            movable = {n: t for n, t in self.lives.items() if t.device == device and _is_dense(t)}
            self._mapped = MappedSet(movable, mapper, self._after_move) if mapper is not None else None
        if self._mapped is not None:
            self._waiting.update(self._mapped.waiting)
        self._sort()

    def _take_scratch(self) -> None:
        if not self.moves_contents or self._scratch:
            return
        sizes: dict[torch.device, int] = {}
        for tensor in self._others.values():
            size_bytes = _elements_at_once(tensor) * tensor.element_size()
            sizes[tensor.device] = max(sizes.get(tensor.device, 0), size_bytes)
        self._scratch = {
            device: torch.empty(size_bytes, dtype=torch.uint8, device=device) for device, size_bytes in sizes.items()
        }

    def _sort(self) -> None:
        """Decides how a flip exchanges each parameter."""
        mapped = self._mapped if self._mapped is not None else ()
        rest = {name: tensor for name, tensor in self.lives.items() if name not in mapped}
        self._small = {name: tensor for name, tensor in rest.items() if self._exchanges(tensor)}
        self._others = {name: tensor for name, tensor in rest.items() if name not in self._small}

    def _exchanges(self, tensor: torch.Tensor) -> bool:
        """True if a flip exchanges a parameter's contents in the launch for all small ones."""
        limit = _EXCHANGED_BYTES.get(tensor.device.type, 0)
        small = tensor.nbytes < limit or (self._keep_storage and limit > 0)
        if self.place != "device" or not small or not tensor.numel() or not _is_dense(tensor):
            return False
        return tensor.device == self._tensors[0].device

    def _placed(self) -> _Placing:
        """The placing of both sets as they lie now."""
        pairs = [(tensor, self._waiting[name]) for name, tensor in self._small.items() if name in self._waiting]
        return _Placing(TensorPlaces(self._tensors), MemoryExchange(pairs) if pairs else None)

    def _after(self) -> _Placing:
        """The placing after a flip, which is the one before the flip before."""
        now = self._placing
        if self.moves_contents or self.place == "none" or not self._others:
            return now
        if now.flipped is None:
            lives = (self.lives | {name: self._waiting[name] for name in self._others}).values()
            now.flipped = _Placing(TensorPlaces(list(lives), like=now.live), now.exchange, now)
        return now.flipped

    def _undo_chunks(self) -> None:
        for number, (live, waiting) in enumerate(self._chunks()):
            if number < self._done:
                live.copy_(waiting)
            elif number == self._done and self._in_scratch:
                old = self._scratch_for(live)
                live.copy_(old)
                waiting.copy_(old)
            else:
                return

    def _swap(self, name: str, tensor: torch.Tensor) -> None:
        waiting = self._waiting[name]
        old = tensor.data
        tensor.data = waiting
        self._waiting[name] = old

    def _reset_progress(self) -> None:
        if self._mapped is not None:
            self._mapped.begin()
        self._done = 0
        self.torn = self._in_scratch = self._exchanged = self._flipped = False

    def _chunks(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields chunks of live and staged memory, always in the same order."""
        for name, tensor in self._others.items():
            yield from _chunks_of(bits(tensor.data), bits(self._waiting[name]), _elements_at_once(tensor))

    def _scratch_for(self, live: torch.Tensor) -> torch.Tensor:
        size_bytes = live.numel() * live.element_size()
        return self._scratch[live.device][:size_bytes].view(live.dtype).view(live.shape)


def _elements_at_once(tensor: torch.Tensor) -> int:
    return min(tensor.numel(), max(1, _CHUNK_BYTES // tensor.element_size()))


def _is_dense(tensor: torch.Tensor) -> bool:
    """True if the elements fill one run of memory without gaps, in any order of dimensions."""
    run = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda dim: dim[1]):
        if size == 1:
            continue
        if stride != run:
            return tensor.numel() == 0
        run *= size
    return True


def _chunks_of(live: torch.Tensor, waiting: torch.Tensor, elements: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields views of at most ``elements`` elements of two tensors with the same strides; flat if there are no gaps."""
    if not live.numel():
        return
    if live.dim() != 1 and _is_dense(live):
        flat = (live.numel(),), (1,)
        live = live.as_strided(*flat, live.storage_offset())
        waiting = waiting.as_strided(*flat, waiting.storage_offset())
    if live.numel() <= elements:
        yield live, waiting
        return
    dim = max(range(live.dim()), key=lambda dim: (live.shape[dim] > 1, live.stride(dim)))
    size = live.shape[dim]
    step = max(1, elements // (live.numel() // size))
    for start in range(0, size, step):
        count = min(step, size - start)
        yield from _chunks_of(live.narrow(dim, start, count), waiting.narrow(dim, start, count), elements)
