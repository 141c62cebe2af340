"""One engine rank.

``WeightReceiver`` sits beside a model and answers messages.  It can be embedded in any engine that has the model in
its process: give it the model, the model's ``load_weights`` and what must be done after new weights are in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import nn

from weightcast.comm.ipc import MappingFailed
from weightcast.comm.remote_reads import RemoteReadFailed
from weightcast.comm.update_group import GroupFailed
from weightcast.digest.transfers import prepare_kernels
from weightcast.errors import ConfigError, DeadlineExceeded, Refused
from weightcast.receiver.loader import Loader, residents_of
from weightcast.receiver.rank_updates import RankUpdates
from weightcast.receiver.recorder import LoadWeights
from weightcast.receiver.resident_versions import Finisher
from weightcast.receiver.staging import StagingPlace, choose_place
from weightcast.runtime.gc_pause import gc_paused
from weightcast.wire.answers import RankAck
from weightcast.wire.layout import TensorSpec
from weightcast.wire.messages import Message

StagingChoice = Literal["auto", "device", "host", "none"]


class WeightReceiver:
    """Receives updates for one rank's model.  One thread at a time calls ``apply``, any other ``interrupt``."""

    def __init__(
        self,
        model: nn.Module,
        *,
        load_weights: LoadWeights,
        expected: Sequence[TensorSpec] | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        device: torch.device | str = "cpu",
        finishers: Sequence[Finisher] = (),
        staging: StagingChoice = "auto",
        residents: Mapping[str, torch.Tensor] | None = None,
        checks: Sequence[Callable[[], object]] = (),
        before_commit: Sequence[Finisher] = (),
        keep_storage: bool = False,
        may_move: bool = False,
        between_steps: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        """Learns the model's loader and allocates the staging set.

        Args:
            load_weights: Takes ``(name, tensor)`` pairs of whole tensors and keeps this rank's slices.
            expected: Every tensor of a full update, whole; None takes the model's own parameters and buffers.
            finishers: Called once after new weights are live (rebuild captured graphs, say).
            staging: Place of the staging set; ``auto`` takes the device, else the host, else nothing.
            residents: Tensors that ``load_weights`` writes, for an engine that packs its weights; see ``Loader``.
            checks: Called before weights are read back; each raises if the model computes with other memory.
            before_commit: Called once all weights of an update wait in the staging set, while the engine goes on, for
                what finishers then need not do.  Not called where none wait, or the model computes some at the commit.
            keep_storage: A commit leaves parameters at their addresses on a CPU too; see ``StagingSet``.
            may_move: Parameters may get other addresses once, here, so that a commit on a GPU copies nothing; see
                ``StagingSet``.
            between_steps: Runs what it is given while the engine generates nothing, and returns when it is done; for an
                engine that generates while messages are answered.  It gets the exchange of weights and the finishers.

        Raises:
            ConfigError: The staging asked for is not possible, or the loader cannot be watched or writes a parameter
                twice.
        """
        self.rank = tp_rank
        self.tp_size = tp_size
        self.device = torch.device(device)
        if str(self.device) == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        if expected is None:
            if tp_size > 1:
                raise ConfigError("a tensor-parallel rank must be told which whole tensors to expect")
            expected = [TensorSpec.of(name, tensor) for name, tensor in residents_of(model).items()]
        self.loader = Loader(
            model,
            load_weights=load_weights,
            expected=expected,
            finishers=finishers,
            residents=residents,
        )
        why = self.loader.unstaged_because(keep_storage=keep_storage)
        place = "none" if staging == "auto" and why else staging
        place = choose_place(place, size_bytes=self.loader.size_bytes, device=self.device)
        self.staging_note = _staging_note(place, why, self.loader.size_bytes) if staging == "auto" else ""
        self.loader.stage(place, keep_storage=keep_storage, may_move=may_move)
        prepare_kernels(self.device)
        self._steps = RankUpdates(
            self.loader,
            rank=tp_rank,
            tp_size=tp_size,
            device=self.device,
            checks=checks,
            before_commit=before_commit,
            between_steps=between_steps if between_steps is not None else _at_once,
        )
        self._set_aside: dict[str, torch.Tensor] = {}

    def apply(self, message: Message) -> RankAck:
        """Carries out a message.  A failure is in the answer; nothing is raised."""
        try:
            with gc_paused():
                return self._steps.apply(message)
        except Refused as error:
            return self._steps.failed(error, refused=True)
        except (GroupFailed, DeadlineExceeded) as error:
            return self._steps.failed(error, cause="group")
        except (MappingFailed, RemoteReadFailed) as error:
            return self._steps.failed(error, cause="mapping")
        except Exception as error:  # noqa: BLE001  the model's loader and its finishers are other people's code
            return self._steps.failed(error)

    def interrupt(self, reason: str) -> None:
        """Ends a wait for the trainer now; the message that waits is answered with a failure."""
        self._steps.interrupt(reason)

    def sleep(self, *, discard: bool = False, lets_go: bool = False, hint: str = "POST /wake first") -> None:
        """Frees device memory that only updates need, and refuses updates and read-backs until ``wake``.

        ``discard`` is for an engine that drops its weights: parameters that no full update writes are then kept on the
        host.  ``lets_go`` is for one that calls the staging set's ``let_go`` next: unless they are discarded, the
        parameters that were moved are kept on the host.  ``hint`` is the advice in refusals.  It raises ``Refused``
        while an update is under way.
        """
        if self._steps.under_way:
            raise Refused("an update is under way, which writes into the memory that sleep gives back")
        if lets_go and not discard:
            self.loader.staging.store()
        if discard:
            live = self.loader.residents
            self._set_aside = {name: live[name].detach().to("cpu", copy=True) for name in self.loader.partly_written()}
        self._steps.asleep = hint
        self._steps.forget()
        self._steps.trim()
        if discard:
            self.loader.live.forget()
        self.loader.live.known = None
        self.loader.staging.free()

    def wake(self) -> None:
        """Undoes ``sleep``, once the weights (or their memory) are back on their device."""
        self.loader.staging.restore()
        for name, values in self._set_aside.items():
            self.loader.residents[name].detach().copy_(values)
        self._set_aside.clear()
        self.loader.staging.allocate()
        self._steps.asleep = ""

    def forget(self) -> None:
        """Called when someone else has written the weights: what is known of them, and the way back, count no more."""
        self._steps.forget()
        self.loader.live.forget()

    def close(self) -> None:
        """Frees groups, mapped memory and the staging set on the device; safe to call twice."""
        self._steps.close()
        self.loader.staging.free()


def _at_once(do: Callable[[], None]) -> None:
    do()


def _staging_note(place: StagingPlace, why: str, size_bytes: int) -> str:
    """The reason why a new version does not wait on the device; empty if it does."""
    if place == "device":
        return ""
    where = "in host memory" if place == "host" else "nowhere: an update that fails half way quarantines the engine"
    return f"a new version waits {where}; {why or f'{size_bytes} bytes for it are not free on the device'}"
