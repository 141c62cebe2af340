"""The staging set: a second set of parameters, on the device or on the host, that holds a version until its commit.

The receiver allocates the set at start, not during an update.  So an update needs no more memory than its buckets, and
a second set that does not fit is found at start.  A flip allocates nothing on a device.  After a flip the second set
holds the old version, which ``undo`` restores.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Literal

import torch

from weightcast.errors import ConfigError
from weightcast.receiver.exchanges import ChunkExchange, ContentExchange, PointerExchange, SetExchange, is_dense
from weightcast.receiver.mapped_set import MappedSet
from weightcast.runtime.free_memory import free_host_bytes
from weightcast.runtime.mapped_memory import CudaMapper, can_map
from weightcast.runtime.streams import wait_for_streams
from weightcast.runtime.tensor_places import TensorPlaces

StagingPlace = Literal["device", "host", "none"]
_HEADROOM = 1.2
_ONE_LAUNCH = frozenset({"cuda"})  # device types on which one launch exchanges all contents
_CONTENTS = itertools.count()


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
    """A second set of parameters, and its exchange with the live one.

    Attributes:
        form: Stands for dtypes, shapes and devices of the live parameters: another object once these have changed.
        waiting_form: As ``form``, of the tensors that take new values.
        torn: True if a flip began and did not end: the live set is a mixture.
    """

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
            keep_storage: True if addresses of parameters stay on a CPU too, for engines that hold them (packed views).
                On a GPU they always stay: captured graphs know them.
            in_order: True if whatever reads the live set after a flip is ordered behind the stream that is current at
                the flip.  A flip on a device then only enqueues the exchange, so that the host can prepare what comes.
            may_move: True if nothing has noted addresses of parameters yet, and the engine frees and moves none by an
                account of its own.  Parameters on a GPU then move once, now, and a flip maps other memory to their new
                addresses.
            after_move: Frees the memory that those parameters have left.
        """
        self.place: StagingPlace = place
        self._keep_storage = keep_storage
        self._may_move = may_move and place == "device"
        self._after_move = after_move
        self._waits = not in_order
        self.lives = dict(residents)
        self._tensors = list(self.lives.values())
        self._waiting: dict[str, torch.Tensor] = {}
        self._mapped: MappedSet | None = None
        self._exchanges: list[SetExchange] = []  # in the order of a flip
        self._others: list[SetExchange] = []
        self._contents: dict[str, torch.Tensor] = {}
        self._places = TensorPlaces([])
        self.form, self.waiting_form = object(), object()
        self.torn = False
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
            if self.place == "device" or not is_dense(tensor):
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
        self._place(anew=True)

    def free(self) -> None:
        """Frees the set's memory on the device; call ``allocate`` before the next update."""
        self._forget_flip()
        self._exchanges.clear()
        self._others.clear()
        self._contents.clear()
        self._places = TensorPlaces([])
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

    def look(self, *, forms: bool = False) -> TensorPlaces:
        """Looks where the live parameters lie now, and at their dtypes and shapes if asked.

        Returns the same object as long as both sets lie where they lay.
        """
        known = self._places
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]  its calls take longer
            lie, alike = known.compare(self._tensors, forms=forms)
        if not lie or not alike:
            self._place(anew=not alike)
        return self._places

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
        """True if a flip copies contents or maps memory; False if it exchanges pointers, or does nothing."""
        return any(not isinstance(one, PointerExchange) for one in self._exchanges)

    def flip(self) -> None:
        """Exchanges the staging set and the live one.  Allocates nothing on a device.

        If it fails, the live set is a mixture until ``undo``.
        """
        self._forget_flip()
        self.look()
        self.torn = True
        for one in self._exchanges:
            one.exchange()
        self.torn = False
        self._renumber(flipped=True)

    def undo(self) -> None:
        """Undoes the last flip.  A second call does nothing, and one that failed can be repeated.

        If it fails, the live set is still a mixture.
        """
        self.look()
        for one in self._exchanges:
            self.torn = self.torn or one.begun
            one.undo()
        if self._flipped:
            self._renumber(flipped=False)
        self._forget_flip()

    def _forget_flip(self) -> None:
        """Forgets the last flip: ``undo`` does nothing before the next one."""
        for one in self._exchanges:
            one.begin()
        self.torn = self._flipped = False

    def _renumber(self, *, flipped: bool) -> None:
        self.live_contents, self.waiting_contents = self.waiting_contents, self.live_contents
        self._flipped = flipped

    def _map(self) -> None:
        """Moves the parameters that can be moved, unless they are where an earlier call moved them to."""
        if self._may_move and not (self._mapped is not None and self._mapped.allocate()):
            device = self._tensors[0].device if self._tensors else torch.device("cpu")
            mapper = mapper_of(device)
            movable = {n: t for n, t in self.lives.items() if t.device == device and is_dense(t)}
            self._mapped = MappedSet(movable, mapper, self._after_move) if mapper is not None else None
        if self._mapped is not None:
            self._waiting.update(self._mapped.waiting)

    def _place(self, *, anew: bool) -> None:
        """Notes where both sets lie, and how a flip exchanges them; ``anew`` if their forms have changed too."""
        places = TensorPlaces(self._tensors, like=None if anew else self._places)
        left = self._mapped is not None and not self._mapped.in_place()
        sorts = anew or left or not places.same_devices(self._places)
        if sorts:
            self.form = object()
            self.waiting_form = object() if self.place == "host" else self.form
        self._places = places
        if sorts or self._contents:
            self._choose_exchanges(sorts=sorts, left=left)

    def _choose_exchanges(self, *, sorts: bool, left: bool) -> None:
        """Decides how a flip exchanges each parameter; ``left`` if parameters have left the memory that is mapped."""
        begun = any(one.begun for one in self._exchanges if isinstance(one, MappedSet | ContentExchange))
        if left:  # second copies stay, and contents are exchanged from now on
            self._mapped, self._may_move = None, False
        if sorts:
            mapped = self._mapped if self._mapped is not None else ()
            rest = {name: self.lives[name] for name in self._waiting if name not in mapped}
            ways = {name: self._way(tensor) for name, tensor in rest.items()}
            self._contents, chunks, pointers = (
                {name: tensor for name, tensor in rest.items() if ways[name] is way}
                for way in (ContentExchange, ChunkExchange, PointerExchange)
            )
            # What goes by chunks or pointers notes no addresses, and how far it has come.
            self._others = [
                one for one in self._exchanges if one.begun and not isinstance(one, MappedSet | ContentExchange)
            ]
            if not self._others and chunks:
                self._others.append(ChunkExchange(chunks, self._waiting))
            if pointers and not any(isinstance(one, PointerExchange) for one in self._others):
                self._others.append(PointerExchange(pointers, self._waiting))
        self._exchanges = [*([self._mapped] if self._mapped is not None else []), *self._others]
        if self._contents:
            contents = ContentExchange(self._contents, self._waiting, waits=self._waits, begun=begun)
            self._exchanges.insert(len(self._exchanges) - len(self._others), contents)

    def _way(self, tensor: torch.Tensor) -> type[ContentExchange | ChunkExchange | PointerExchange]:
        """How a flip exchanges a parameter that is not mapped."""
        if self.place != "device":
            return ChunkExchange
        if tensor.device.type not in _ONE_LAUNCH:
            return ChunkExchange if self._keep_storage else PointerExchange
        whole = tensor.device == self._tensors[0].device and tensor.numel() and is_dense(tensor)
        return ContentExchange if whole else ChunkExchange
