"""READ FIRST: the interfaces between the parts of weightcast.

Three parts take part in an update.  They do not import each other; ``update/`` connects them.

=========  ===========================================================  =============================
part       task                                                         to add one
=========  ===========================================================  =============================
Exporter   turns the trainer's model into named, unsharded tensors      pass a subclass to ``connect``
Adapter    turns each step of an update into requests to one engine     ``docs/engines/own.md``
Carrier    moves filled buckets; owns groups, buffers and threads       a file in ``transports/``
=========  ===========================================================  =============================

One update calls them in this order::

    exporter.prepare(group)                                 # once, on every trainer rank
    planned = exporter.plan(layouts, group, use)            # once for these buckets
    exporter.changed()                                      # if so: look_again(), prepare(group) and plan(...) again
    adapter.check(specs, transport=..., bucket_bytes=...)   # preflight: nothing has been sent
    adapter.open(message)                                   # pauses an engine that cannot stage
    carrier.connect()                                       # sends adapter.join(invitation)
    for bucket in planned:
        bucket.fill(data, taker)                            # gathers shards into a buffer
        carrier.send(bucket, shared)                        # sends adapter.bucket(...)
    carrier.drain()
    adapter.close(message)                                  # every engine has every bucket
    adapter.commit(message)                                 # switches, stamps the version, resumes

An adapter does no I/O: it opens no socket, joins no group and moves no tensor.  A test therefore sees every byte that
an engine would get.  Each step is a generator, because one step takes some engines five requests and others none.  The
generator yields requests.  A ``yield`` returns the body of the answer, or raises ``TargetRejected`` if the engine
refused, which the adapter may catch.  The generator returns the result of the step::

    def commit(self, message: Commit) -> Steps:
        yield EngineRequest(path="/end_weight_update", body=b"{}")
        yield EngineRequest(path="/continue_generation", body=b"{}")
        return Ack(ok=True, version=self._version)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NoReturn, Protocol

from weightcast.comm.run_steps import EngineRequest, Steps
from weightcast.digest.source_sums import SumPlaces
from weightcast.errors import ConfigError
from weightcast.wire.answers import Ack
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import Packing

if TYPE_CHECKING:
    import torch

    from weightcast.comm.rendezvous import Invited
    from weightcast.comm.shared_buckets import Shared
    from weightcast.comm.trainer_group import TrainerGroup
    from weightcast.comm.update_group import UpdateGroup
    from weightcast.digest.source_sums import Taker
    from weightcast.errors import WeightcastError
    from weightcast.wire.box import Box
    from weightcast.wire.engine_info import EngineInfo
    from weightcast.wire.layout import BucketLayout, TensorSpec
    from weightcast.wire.messages import Close, Commit, Join, Open, Prepare, Revert


# -- the trainer's model


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketUse:
    """The decisions of an update about its buckets, the same on every rank.

    Attributes:
        receivers: The ranks that have a bucket, in order; all of them if ``scattered``.
        scattered: True if nothing moves between ranks: each fills its own parts into its own bucket.
        reading_hosts: Hosts on which engines read trainer ranks' own parts, so that each part is served there; empty if
            one rank serves it to all engines.
        leg_hosts: Hosts on which engine ranks read trainer ranks' own parts and get the others in messages, and an
            empty one for engine ranks that get all in messages; empty in another update.
        copies: False if engines read the tensors where they lie, so that nothing is filled.
        sums: True if ranks will sum their parts.
    """

    receivers: tuple[int, ...] = (0,)
    scattered: bool = False
    reading_hosts: tuple[str, ...] = ()
    leg_hosts: tuple[str, ...] = ()
    copies: bool = True
    sums: bool = False


TO_HEAD = BucketUse()  # buckets are gathered on the head alone


class Lying(Protocol):
    """Memory of parts, at one moment.

    Attributes:
        stamp: Value that stays equal while every part lies at the same address in the same way.
    """

    stamp: object

    def views(self) -> Sequence[tuple[int, Box, torch.Tensor]]:
        """Number of the slot, box and memory of each part."""
        ...


class PlannedBucket(ABC):
    """One bucket of an exporter, planned once and filled in each update.  Every rank has one.

    Attributes:
        layout: The tensors, or rows of them, in the bucket; the same on every rank.
        serves: Number of the slot and box of each part that engines read from this rank, if the bucket is scattered.
            All ranks together serve every element of the layout's tensors once, or the ranks on each of
            ``BucketUse.reading_hosts`` do, or they do for each of ``leg_hosts``.  Replicas are shared out by bytes.
        serves_to: As ``serves``, for the engine ranks that read memory on each of ``leg_hosts``.  All ranks together
            serve every element once to each host: one that is there, if it holds the element.
        sum_places: Places of the sums that this rank takes: its own alone.
    """

    def __init__(self, layout: BucketLayout, group: TrainerGroup) -> None:
        self.layout = layout
        self.serves: Sequence[tuple[int, Box]] = ()
        self.serves_to: Mapping[str, Sequence[tuple[int, Box]]] = {}
        self.sum_places = SumPlaces(group.rank, len(layout.slots))

    def prepare(self, data: torch.Tensor | None) -> None:
        """Works out what ``fill`` or ``sum_own`` takes.  Moves and communicates nothing, and reads no weights.

        ``data`` is the buffer that will be filled; None if it is not there yet.
        """

    @abstractmethod
    def fill(self, data: torch.Tensor | None, taker: Taker | None = None) -> torch.Tensor | None:
        """Fills a flat uint8 buffer with the weights as they are now.  Collective.

        The buffer is None on a rank that only contributes its shards.  A scattered bucket gets this rank's parts, and
        its other bytes stay.

        ``taker`` takes this rank's sums, in the wire dtype; None for no sums.  ``taker.add(places, sums)`` adds the
        sums of parts that this rank alone holds to the numbers of their slots.  For a part with replicas, the bucket
        asks ``sum_places.place`` when it is planned.  Every element is in a sum, or ``Exporter.unsummed`` names it.

        Returns ``Bucket.sums`` if the bytes were summed while they were copied, else None.
        """

    def own_memory(self) -> Lying:
        """The parts that this rank ``serves``, where it keeps them.  No copy, no communication.

        ConfigError names a tensor that is cast or computed when it is sent.
        """
        raise ConfigError(f"{type(self).__name__} lends no memory", hint="leave keep_mapped out")

    def sum_own(self, taker: Taker) -> None:
        """Sums the parts of ``own_memory``, as ``fill`` does.  No communication."""
        raise ConfigError(f"{type(self).__name__} lends no memory", hint="leave keep_mapped out")


class Exporter(ABC):
    """Presents a model as named, unsharded tensors.  Every trainer rank has one and calls its methods in step.

    A subclass has ``device``, ``specs``, and either ``fill`` or ``plan``.  The other methods have defaults, which say
    that the exporter cannot do more.

    Attributes:
        device: The device of the weights and of a bucket for them.
        casts: True if it fills a bucket in the dtypes of its layout, where these are other floats than its own.
        scatters: True if each rank can fill a bucket with its own shards, and lend their memory, for ``direct``.
        scores: True if it runs the trainer's forward pass, for ``verify="behaviour"``.
    """

    device: torch.device
    casts: bool = False
    scatters: bool = False
    scores: bool = False

    @abstractmethod
    def specs(self) -> Sequence[TensorSpec]:
        """Every tensor of an update (name, shape, wire dtype), in one order on all ranks.  No communication."""

    def prepare(self, group: TrainerGroup) -> None:
        """Exchanges which rank holds which shard.  Collective; called before ``plan``, and after ``look_again``.

        Every rank raises ConfigError if this model cannot be exported as it is sharded.
        """

    def plan(self, layouts: Sequence[BucketLayout], group: TrainerGroup, use: BucketUse) -> Sequence[PlannedBucket]:
        """Plans buckets, the same on every rank.  Moves and communicates nothing, and reads no weights.

        It is called before buckets are filled, and again if other buckets are needed or the model was looked at again.
        """
        return [_UnplannedBucket(self, layout, group) for layout in layouts]

    def fill(self, bucket: Bucket | None, layout: BucketLayout, group: TrainerGroup) -> torch.Tensor | None:
        """Gathers and casts the layout's tensors into the bucket: the ``PlannedBucket.fill`` of the default ``plan``.

        The bucket is None on a rank that only contributes its shards.
        """
        raise ConfigError(f"{type(self).__name__} cannot fill a bucket", hint="give it a method fill, or plan")

    def unsummed(self) -> Collection[str]:
        """Names of tensors that no rank sums before the gather.  The report lists them, since their proof begins later.

        Engines' digests must equal the sums of the others, so their proof covers the gather as well.
        """
        return [spec.name for spec in self.specs()]

    def computing_bytes(self) -> int | None:
        """Most memory, in bytes, that values computed on the way take beside buckets and gather; None if unknown.

        It is 0 if nothing is computed.  No communication.  ``max_extra_bytes`` needs it.
        """
        return None

    def changed(self) -> bool:
        """True if this rank's model is made in another way than when it was looked at last.  No communication.

        Every trainer rank asks at the beginning of each update.  If any of them says yes, all look again.  It is cheap,
        and never raises.  Other values are no change.
        """
        return False

    def look_again(self) -> None:
        """Looks at the model as it is now, as when the exporter was made; ``prepare`` and ``plan`` follow.

        No communication.  The tensors of an update stay the same ones.

        Raises:
            ConfigError: The model cannot be sent as it is now, or other tensors would travel.  ``changed`` stays True.
        """

    def whole_on(self, hosts: Sequence[str]) -> Collection[str]:
        """The hosts whose trainer ranks hold all weights together, given that of each rank.

        Known after ``prepare``; no communication.
        """
        return hosts

    def unmappable(self, group: TrainerGroup, specs: Sequence[TensorSpec], *, casts: bool) -> Collection[str]:
        """Names of tensors that engines cannot read where this rank keeps them: it casts or computes them.

        Args:
            specs: The tensors of ``specs()``, in order, in the dtypes in which they travel.
            casts: True if engines cast what they read, as ``is_copied_cast`` says.
        """
        return [spec.name for spec in specs]

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of each token but the first, given the tokens before it.  Collective."""
        raise ConfigError(f"{type(self).__name__} has no forward pass", hint='write verify="resident"')


class _UnplannedBucket(PlannedBucket):
    """A bucket of an exporter that plans nothing."""

    def __init__(self, exporter: Exporter, layout: BucketLayout, group: TrainerGroup) -> None:
        super().__init__(layout, group)
        self._exporter = exporter
        self._group = group

    def fill(self, data: torch.Tensor | None, taker: Taker | None = None) -> torch.Tensor | None:
        bucket = Bucket(self.layout, data) if data is not None else None
        return self._exporter.fill(bucket, self.layout, self._group)


# -- the engines

# Steps by which an engine gets the weights: "group" by buckets that are broadcast in a group, "memory" by buckets in
# shared memory, "folder" by a checkpoint folder that it loads, "handles" by one request for the whole update, which
# tells where to ask for handles to shared memory.
Delivery = Literal["group", "memory", "folder", "handles"]
# Form of the handles to a shared buffer over ``ipc``: "weightcast" for our own handles, "torch" for torch's handle to
# one buffer, "ring" for torch's handle to the one storage of all buffers (``comm/shared_buckets.py``).
Sharing = Literal["weightcast", "remote", "torch", "ring"]
# Rendezvous of a group over ``broadcast``: "weightcast" as our receiver does it, "torch" as ``torch.distributed`` does
# at ``tcp://host:port`` with the group's name as prefix, "nccl-id" by NCCL's unique id.
Meeting = Literal["weightcast", "torch", "nccl-id"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadMetrics:
    """Names of an engine's own Prometheus metrics: requests that run, requests that wait, and generated tokens."""

    running: str
    waiting: str
    tokens: str


class Kind(ABC):
    """One kind of engine: recognises its servers and makes their adapters.

    Attributes:
        name: Name of the kind, as in ``Target.engine`` and ``EngineInfo.kind``.
        speaks: Class of its adapters.
        has_receiver: True if these engines have our receiver.
        receiver_page: Page about our receiver in these engines, from the root of the repository; empty without one.
        load: Names of its metrics, for ``weightcast status --watch``; None if it has none.
    """

    name: str
    speaks: type[Adapter]
    has_receiver: bool = False
    receiver_page: str = ""
    load: LoadMetrics | None = None

    @abstractmethod
    def recognise(self, url: str) -> Generator[EngineRequest, bytes, EngineInfo | None]:
        """Asks a server what it is; None if it is not an engine of this kind.

        It raises ConfigError if the server is of this kind and cannot be updated as it was started.
        """

    def adapter(self, info: EngineInfo) -> Adapter:
        """Makes an adapter for a recognised engine."""
        return self.speaks(info)


class Adapter(ABC):
    """Speaks the language of one engine.  Each target has its own adapter, which may keep state between updates.

    Every engine needs ``open``, ``commit`` and ``abort``, and the steps of the transports that it lists in
    ``EngineInfo.transports``: ``bucket`` for ``ipc``, ``join`` and ``bucket`` for ``broadcast``, ``load_folder`` for
    ``disk``, and ``handles`` for ``checkpoint-engine``.

    Attributes:
        info: What the last probe found.
        packing: Rules for buckets that the engine can read, such as alignment.
        sharing: Form of the handles to a shared buffer over ``ipc``.
        meeting: Rendezvous of a group over ``broadcast``.
        in_flight: Buckets that may be announced before the engine has answered the first: 1 or 2.
        proves: Levels of proof that the engine can give, beside ``behaviour``.
        leased: True if the engine ends a session by itself when the trainer dies, and knows whether its weights are
            one whole version.  For other engines ``transports/link.py`` keeps track.
        prepares: True if the engine can work out an update before it begins.
        sees_change: True if the engine can tell, before it resumes, whether its weights have changed.
        reverts: True if the engine can restore the old weights after a commit, if it keeps a second set.
    """

    packing: Packing = Packing(alignment_bytes=1, slices=False)
    sharing: Sharing = "weightcast"
    meeting: Meeting = "torch"
    in_flight: int = 1
    proves: frozenset[Literal["received", "resident"]] = frozenset()
    leased: bool = False
    prepares: bool = False
    sees_change: bool = False
    reverts: bool = False

    def __init__(self, info: EngineInfo) -> None:
        self.info = info

    def renew(self, info: EngineInfo) -> None:
        """Takes the engine's current info.  An engine that has restarted gets a new adapter instead."""
        self.info = info

    def check(self, specs: Sequence[TensorSpec], *, delivery: Delivery, bucket_bytes: int) -> None:
        """Checks an update against the known limits of this kind of engine, before it.

        ``delivery`` is the steps by which the engine will get the weights.  ConfigError says why it cannot work; its
        hint names the option to change and its side.
        """

    def prepare(self, message: Prepare) -> Steps:
        """Hands over the plan of the updates to come.  Changes nothing that the engine serves."""
        self._lacks("work out an update before it begins")

    @abstractmethod
    def open(self, message: Open) -> Steps:
        """Starts a session.  An engine that cannot stage is paused here: its buckets go straight into live weights."""

    def join(self, invitation: Invitation) -> Steps:
        """Joins a group."""
        self._lacks("join a group")

    def stored(self, unique_id: bytes) -> Mapping[str, bytes]:
        """Entries that the group's store must hold, by key, for an engine that reads NCCL's unique id there."""
        return {}

    def bucket(self, session: str, layout: BucketLayout, *, group: str | None, shared: Sequence[Shared]) -> Steps:
        """Announces a bucket.

        Over ``broadcast`` the first request must be the one that makes the engine enter the collective.  ``group``
        names the group that broadcasts it; None over shared memory.  ``shared`` has the buffers of trainer ranks that
        filled one.
        """
        self._lacks("read buckets")

    def messages(self, session: str, layouts: Sequence[BucketLayout], *, group: str) -> Steps:
        """Announces buckets that follow one another in messages from trainer ranks, which are members of the group.

        The engine answers when it has loaded the last of them.  Which rank sends which parts is in the session's plan.
        """
        self._lacks("receive messages from trainer ranks")

    def handles(self, addresses: dict[str, str]) -> Steps:
        """Tells the engine where to ask for handles to all weights, by the UUID of each rank's GPU."""
        self._lacks("ask for handles")

    def load_folder(self, session: str, folder: str) -> Steps:
        """Loads all weights from ``model.safetensors`` in ``folder``, which is deleted after the answer."""
        self._lacks("load a folder")

    def close(self, message: Close) -> Steps:
        """Says that every bucket was sent, and asks whether all have arrived.  By default it sends nothing."""
        yield from ()
        return Ack(ok=True, state="updating", ranks=self.info.tp_size)

    def expect_change(self, changed: bool) -> None:
        """Tells the adapter, before ``commit``, whether the new weights are known to differ from the last committed.

        It is called if the adapter ``sees_change``: the digests that tell it take time, in which the engine is paused.
        """

    @abstractmethod
    def commit(self, message: Commit) -> Steps:
        """Makes the new weights live, stamps the version and resumes.  A ``leased`` engine may get this twice."""

    def revert(self, message: Revert) -> Steps:
        """Restores the old weights.  The answer has their version and digests."""
        self._lacks("restore old weights")

    @abstractmethod
    def abort(self, session: str, reason: str) -> Steps:
        """Ends the session.

        ``Ack.state`` is ``serving`` if the engine still has the old version, and ``quarantined`` if its weights may be
        parts of two versions.
        """

    def leave(self, group: str | None) -> Steps:
        """Leaves a group, or unmaps shared buffers if ``group`` is None.  A group never joined is no error.

        If it raises, the caller adds a note to the target's next report.
        """
        yield from ()
        return Ack(ok=True, ranks=self.info.tp_size)

    def score(self, token_ids: Sequence[int]) -> Generator[EngineRequest, bytes, list[float]]:
        """Log-probability of each token but the first, given the tokens before it, under the live weights."""
        self._lacks("score tokens")

    def _lacks(self, step: str) -> NoReturn:
        raise ConfigError(f"the adapter of {self.info.engine} ({self.info.kind}) cannot {step}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """Asks one target to join a process group of trainer and engines.  The trainer's head is rank 0.

    Attributes:
        join: The group and its rendezvous, as our own receiver is told.
        bucket_bytes: Size of the largest bucket, in bytes.
        unique_id: NCCL's unique id of the group; empty unless ``Adapter.meeting`` is ``nccl-id``.
    """

    join: Join
    bucket_bytes: int
    unique_id: bytes = b""


# -- the way between them


class Cell(Protocol):
    """Targets whose ranks are in one process group, so that they fail together.

    Attributes:
        failure: What failed in this attempt; None if nothing has.
    """

    failure: WeightcastError | None

    @property
    def urls(self) -> Sequence[str]:
        """The targets."""
        ...


class Carrier(ABC):
    """Moves filled buckets to some targets, in order, two in flight.  This is the end on the head trainer rank."""

    name: str = ""

    def connect(self) -> None:
        """Makes the group of the current targets, if this carrier needs one and has none."""

    @abstractmethod
    def send(self, bucket: Bucket, shared: Sequence[Shared]) -> None:
        """Starts sending a bucket and waits until the previous one may be filled again."""

    def announce(self, layouts: Sequence[BucketLayout]) -> None:
        """Announces buckets that follow one another, and that all trainer ranks send by themselves.

        It waits until targets have taken all but those that were announced last, and these.
        """
        raise ConfigError(f"{self.name or type(self).__name__} makes no group of all trainer ranks")

    def drain(self) -> None:
        """Waits until every target has taken every bucket sent so far, and raises what failed."""

    def settle(self) -> None:
        """Waits until no transfer is in progress; raises nothing for a failed one."""

    def abort(self, reason: str) -> None:
        """Ends transfers in progress, so that no process waits.  Safe to call twice and from any thread."""

    def close(self) -> None:
        """Releases groups and buffers on both sides.  Safe to call twice."""

    @property
    def cells(self) -> Sequence[Cell]:
        """The groups of this carrier.  The failure of one is raised too."""
        return ()

    # Groups of all trainer ranks, each of which sends its own parts to engine ranks.

    def invite(self) -> None:
        """Begins an attempt and opens the rendezvous of new groups, which ``connect`` then makes.

        A group that lives from an earlier update is not made again.
        """

    @property
    def invited(self) -> Sequence[Invited]:
        """The groups that every trainer rank must join, and ``connect`` makes."""
        return ()

    @property
    def members(self) -> Mapping[str, UpdateGroup]:
        """The head's end of each group that is well and has all trainer ranks, by its name."""
        return {}

    def lost(self, name: str, error: WeightcastError) -> None:
        """Ends the transfers in a group in which messages of a trainer rank failed; raises the error of the cause."""
