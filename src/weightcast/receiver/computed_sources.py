"""The sources that a model's loader computes with: they wait for the loader, and what it made of them is proven.

No route leads from such a source to a parameter.  So the loader computes once more, into other memory, and the live
parameters must equal that, bit for bit.  The sums of both the sources and the computed places are kept: a read-back
reports the sum of a source as long as all that was computed from it is resident unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from weightcast.digest.copies import host_bytes
from weightcast.digest.definition import partial_sums
from weightcast.digest.pieces import TensorPiece
from weightcast.errors import EngineFailure, Refused, some
from weightcast.receiver.recorder import ComputedGroup, LoadWeights
from weightcast.receiver.redirect import Redirected
from weightcast.wire.box import slices
from weightcast.wire.held import HeldPart, HeldSums, HeldTable
from weightcast.wire.layout import TensorSpec
from weightcast.wire.routes import Route

_BATCH_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class ComputedProof:
    """Sums of one version, to be read mod 2**64.

    Attributes:
        sources: Sum of each part of a source as it came, int64 ``[parts]``.
        places: Sum of each place that was computed from them, int64 ``[places]``.
    """

    sources: torch.Tensor
    places: torch.Tensor


class ComputedSources:
    """One rank's computed sources.

    Attributes:
        names: Their names.
        places: All places that are computed, as ``ComputedGroup`` has them.
        parts: Parts of each source that are read, by its name; another rank may keep the others, and prove them.
        proof: That of the live weights; None if it is not known what they were computed from.
    """

    def __init__(
        self,
        groups: Sequence[ComputedGroup],
        load_weights: LoadWeights,
        expected: Mapping[str, TensorSpec],
        residents: Mapping[str, torch.Tensor],
    ) -> None:
        """Takes what the recorder found; ``expected`` says in which dtype each source is summed."""
        self.names = tuple(name for group in groups for name in group.sources)
        self.places: list[Route] = [place for group in groups for place in group.places]
        self._groups = tuple(groups)
        self._load_weights = load_weights
        self._expected = expected
        self._residents = residents
        self._waiting: dict[str, torch.Tensor] = {}
        self._loaded: dict[ComputedGroup, ComputedProof] = {}
        self._told: ComputedProof | None = None  # by a peer, in this update
        self._proves = False
        self.proof: ComputedProof | None = None
        self._before: ComputedProof | None = None
        self.parts = {name: boxes for group in groups for name, boxes in zip(group.sources, group.boxes, strict=True)}
        numbered = list(enumerate(name for name, boxes in self.parts.items() for _ in boxes))
        pairs = [
            (part, place)
            for place, group in enumerate(group for group in groups for _ in group.places)
            for part, name in numbered
            if name in group.sources
        ]
        self._pairs = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
        self._tables: tuple[HeldTable, HeldTable, HeldTable] | None = None  # of all that is summed; see ``_answered``

    @property
    def size_bytes(self) -> int:
        """Bytes of all sources."""
        return sum(self._expected[name].size_bytes for name in self.names)

    @property
    def first_places(self) -> dict[str, Route]:
        """The first of the places that are computed from each source, by its name."""
        return {name: group.places[0] for group in self._groups for name in group.sources}

    @property
    def held_parts(self) -> list[HeldPart]:
        """The parts that are read, in order, in the dtypes that are expected."""
        return [
            HeldPart(spec=self._expected[name], box_offset=box.offset, box_shape=box.shape)
            for name, boxes in self.parts.items()
            for box in boxes
        ]

    def begin(self, *, proves: bool) -> None:
        """Starts an update; without ``proves`` nothing is computed a second time."""
        self._waiting.clear()
        self._loaded.clear()
        self._told = None
        self._proves = proves

    def take(self, name: str, whole: torch.Tensor) -> None:
        """Keeps a source for the loader."""
        self._waiting[name] = whole

    def load(self) -> None:
        """Loads each group whose sources are all here into the live parameters, some MiB at a time.

        Raises:
            EngineFailure: The loader does not put the same bits there as it computes again; the text names the sources.
        """
        self.proof = None
        for groups in self._batches():
            sources = [(name, self._waiting.pop(name)) for group in groups for name in group.sources]
            with torch.no_grad():
                if self._proves:
                    self._load_twice(groups, sources)
                else:
                    self._load_weights(sources)

    def tell(self) -> bytes:
        """The proof of the live weights, for a peer that copies them; ``Refused`` if there is none."""
        if self.proof is None:
            raise Refused(
                f"this model computes with {some(self.names)} while it loads, and no proven update has brought them "
                "since the engine started",
                hint="copy from an engine that was updated by the trainer since it started",
            )
        return host_bytes(torch.cat([self.proof.sources, self.proof.places]))

    def hear(self, data: bytes) -> None:
        """Takes the proof of weights that are copied from a peer; ``Refused`` if it is not one of as many sums."""
        counts = [sum(map(len, self.parts.values())), len(self.places)]
        if len(data) != 8 * sum(counts):
            raise Refused(f"the sums of computed tensors have {len(data)} bytes instead of {8 * sum(counts)}")
        self._told = ComputedProof(*torch.frombuffer(bytearray(data), dtype=torch.int64).split(counts))

    def check_live(self, name: str, whole: torch.Tensor) -> list[str]:
        """Compares the live parameters with what the loader computes from a checkpoint's tensors, given one by one.

        Returns:
            Names of parameters that differ.  If none does, the live weights have a proof once all tensors were given.
        """
        if name not in self.names:
            return []
        self._waiting[name] = whole
        for groups in self._batches():
            sources = [(other, self._waiting.pop(other)) for group in groups for other in group.sources]
            sums = self._sum(sources)
            with torch.no_grad():
                computed = self._compute(groups, sources)
            if wrong := _named(groups, computed.differs()):
                return [parameter for parameters in wrong.values() for parameter in parameters]
            self._keep(groups, sums, computed)
        self.settle()
        return []

    def switch(self) -> None:
        """Called before other weights become live."""
        self._before, self.proof = self.proof, None

    def settle(self) -> None:
        """Called when all of an update is live: it is proven from now on."""
        if self._told is not None:
            self.proof = self._told
        elif self._loaded and len(self._loaded) == len(self._groups):
            found = [self._loaded[group] for group in self._groups]
            self.proof = ComputedProof(
                torch.cat([one.sources for one in found]), torch.cat([one.places for one in found])
            )

    def undo(self) -> None:
        """Called when the weights before ``switch`` are live again."""
        self.proof, self._before = self._before, None

    def forget(self) -> None:
        """Called when someone else has written the weights."""
        self.proof = self._before = None

    def answer_copied(self, found: HeldSums) -> HeldSums:
        """As ``answer``, for weights that were copied from a peer and wait."""
        return self._answer(found, self._told)

    def answer(self, found: HeldSums) -> HeldSums:
        """Sums of the parts of sources, from those of parts and, at the end, of all ``places``.

        The sum of a source is the one with which it came, plus the number of places that are not as computed from it.
        """
        return self._answer(found, self.proof)

    def _answer(self, found: HeldSums, proof: ComputedProof | None) -> HeldSums:
        if not self.places:
            return found
        count = len(found.totals) - len(self.places)
        without, table = self._answered(found.table)
        if proof is None:
            return HeldSums(without, found.totals[:count])
        parts, places = self._pairs.unbind(1)
        differs = (found.totals[count:] != proof.places).to(torch.int64)
        totals = proof.sources.index_add(0, parts, differs[places])
        return HeldSums(table, torch.cat([found.totals[:count], totals]))

    def empty_answer(self, summed: HeldTable) -> HeldSums:
        """Sums of 0 for the parts that ``answer`` has once there is a proof, given the table of all that is summed."""
        table = self._answered(summed)[1] if self.places else summed
        return HeldSums(table, torch.zeros(len(table), dtype=torch.int64))

    def _answered(self, summed: HeldTable) -> tuple[HeldTable, HeldTable]:
        """The tables of answers without and with the sources, for the table of all that is summed."""
        if self._tables is None or self._tables[0] is not summed:
            parts = summed[: len(summed) - len(self.places)]
            self._tables = summed, parts, (*parts, *self.held_parts)
        return self._tables[1:]

    def _batches(self) -> Iterator[Sequence[ComputedGroup]]:
        """The groups whose sources are all here, as many at a time as have few bytes: a loader's call takes long."""
        batch: list[ComputedGroup] = []
        size_bytes = 0
        for group in self._groups:
            if not all(name in self._waiting for name in group.sources):
                continue
            own_bytes = sum(self._waiting[name].nbytes for name in group.sources)
            if batch and size_bytes + own_bytes > _BATCH_BYTES:
                yield batch
                batch, size_bytes = [], 0
            batch.append(group)
            size_bytes += own_bytes
        if batch:
            yield batch

    def _load_twice(self, groups: Sequence[ComputedGroup], sources: Sequence[tuple[str, torch.Tensor]]) -> None:
        sums = self._sum(sources)
        self._load_weights([(name, whole.clone()) for name, whole in sources])  # it may change what it gets
        computed = self._compute(groups, sources)
        if wrong := _named(groups, computed.differs()):
            how = "and something else in the parameters' place"
            if not computed.equals(self._compute(groups, sources)):
                how = "but other values each time"
            names = [name for group in wrong for name in group.sources]
            parameters = list(dict.fromkeys(parameter for found in wrong.values() for parameter in found))
            raise EngineFailure(
                f"{some(names)} cannot be proven: load_weights computes {some(parameters)} from what came, {how}",
                hint="let load_weights compute the same values from the same weights, whatever was there before",
            )
        self._keep(groups, sums, computed)

    def _compute(self, groups: Sequence[ComputedGroup], sources: Sequence[tuple[str, torch.Tensor]]) -> Redirected:
        """Lets the loader compute into other memory, which lives as long as the result."""
        computed = Redirected([place for group in groups for place in group.places], self._residents)
        with computed:
            self._load_weights([(name, whole.clone()) for name, whole in sources])
        return computed

    def _keep(self, groups: Sequence[ComputedGroup], sums: torch.Tensor, computed: Redirected) -> None:
        """Keeps the sums of some groups' sources and places."""
        of_sources = sums.split([sum(map(len, group.boxes)) for group in groups])
        of_places = computed.sums().cpu().split([len(group.places) for group in groups])
        for group, own, made in zip(groups, of_sources, of_places, strict=True):
            self._loaded[group] = ComputedProof(own, made)

    def _sum(self, sources: Sequence[tuple[str, torch.Tensor]]) -> torch.Tensor:
        """Sums of the parts of sources in the dtypes that are expected, int64 ``[parts]`` on the CPU."""
        pieces = [
            TensorPiece(
                tensor=whole[slices(box, (0,) * len(box.shape))].to(self._expected[name].torch_dtype),
                full_shape=tuple(whole.shape),
                box=box,
            )
            for name, whole in sources
            for box in self.parts[name]
        ]
        return partial_sums(pieces).cpu()


def _named(groups: Sequence[ComputedGroup], differs: Iterable[bool]) -> dict[ComputedGroup, list[str]]:
    """The groups with places that differ, and their parameters; ``differs`` has all places of all groups, in order."""
    places = [(group, place.parameter) for group in groups for place in group.places]
    found: dict[ComputedGroup, list[str]] = {}
    for (group, parameter), wrong in zip(places, differs, strict=True):
        if wrong:
            found.setdefault(group, []).append(parameter)
    return found
