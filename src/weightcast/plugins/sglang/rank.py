"""Our receiver in a scheduler process of SGLang, beside the model.

Weight messages come over a Unix socket, on a thread of their own, while SGLang generates.  What waits is proven before
the switch and what is resident after it, on that thread too.  Only the exchange and the finishers run on the
scheduler's thread (``boundary``).
"""

# SGLang is not installed where this is checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, Listener
from typing import Any

import torch

from weightcast.errors import ConfigError, Refused, WeightcastError
from weightcast.plugins.rank_sockets import (
    Hello,
    committed_after,
    hello_of,
    serve_api_server,
    socket_path,
    switches_weights,
)
from weightcast.plugins.sglang.boundary import Boundary, BoundaryTask
from weightcast.plugins.sglang.executor import CANCEL, GO, NOTHING, READY
from weightcast.plugins.sglang.hook_points import FOLDER
from weightcast.plugins.sglang.requests_at_switch import RequestsAtSwitch
from weightcast.plugins.sglang.settings import check_settings, staging_setting
from weightcast.receiver import WeightReceiver
from weightcast.receiver.layout_check import changed_since_load
from weightcast.wire.layout import TensorSpec
from weightcast.wire.messages import Commit, Message, Open, RankAck

log = logging.getLogger("weightcast.plugins.sglang")

_AGREE_S = 60.0  # the other ranks and the API server need this long at most to agree on a switch


class SglangRank:
    """One rank's receiver.  ``apply`` is called by one thread at a time; ``interrupt`` and ``on_note`` by another."""

    def __init__(self, runner: Any) -> None:
        """Makes the receiver and the staging set; SGLang sizes its KV cache afterwards.

        Args:
            runner: SGLang's ``ModelRunner`` with its model loaded.

        Raises:
            ConfigError: SGLang's settings or this model cannot be updated through our receiver.
        """
        from sglang.srt.runtime_context import get_parallel

        check_settings(runner.server_args)
        parallel = get_parallel()
        self.rank = int(parallel.tp_size * parallel.pp_rank + parallel.tp_rank)
        self._stages = int(parallel.pp_size)
        self.device = torch.device(runner.device, runner.gpu_id) if runner.device == "cuda" else torch.device("cpu")
        self._boundary = Boundary(self._carry_out)
        self._requests: RequestsAtSwitch | None = None
        self._connection: Connection | None = None
        self._decisions: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._said_ready = False
        self._committed = ""
        self._open: Open | None = None
        self._switching: Message | None = None
        # Stamps of what is served, and of what the staging set has.
        self._version = self._other = str(getattr(runner.server_args, "weight_version", None) or "default")
        self.receiver = self._make_receiver(runner, int(parallel.tp_size) * self._stages)

    def attach(self, scheduler: Any) -> None:
        """Adds the switch to a scheduler and listens for the API server."""
        self._requests = RequestsAtSwitch(scheduler, self.device)
        self._boundary.attach(scheduler)
        listener = Listener(socket_path(os.environ[FOLDER], self.rank), family="AF_UNIX", backlog=1)
        threading.Thread(
            target=serve_api_server,
            args=(listener, self, self._hello),
            kwargs={"device": self.device, "on_note": self.on_note, "on_connection": self._connected},
            name="weightcast",
            daemon=True,
        ).start()

    # -- SGLang's side, on the scheduler's thread

    def requests_pulled(self, requests: list[Any] | None) -> None:
        """Called with the requests that the first rank is about to broadcast."""
        if self.rank == 0:
            self._boundary.pulled(requests)

    def request_made(self, request: Any) -> None:
        """Called with every new request."""
        if self._requests is not None:
            self._requests.name(request)

    def _carry_out(self, task: BoundaryTask) -> None:
        assert self._open is not None
        assert self._requests is not None
        forward = isinstance(self._switching, Commit)
        version = str(self._open.version) if forward else self._other
        try:
            self._requests.switch(task.do, mode=self._open.pause, version=version)
        except BaseException as error:  # noqa: BLE001  an error here would end the server
            task.finish(error)
        else:
            self._version, self._other = version, self._version
            task.finish(None)

    # -- the API server's side, on threads of our own

    def apply(self, message: Message) -> RankAck:
        """Carries out one weight message at a time."""
        if isinstance(message, Open):
            if self._stages > 1 and message.pause != "in_place":
                return RankAck(
                    rank=self.rank,
                    ok=False,
                    refused=True,
                    error=f"with pipeline parallelism, pause {message.pause} would leave requests of another stage "
                    "with their old KV cache (use pause in_place)",
                )
            self._open = message
        switches = switches_weights(message, self._committed)
        self._committed = committed_after(message, self._committed)
        self._said_ready = False
        self._switching = message
        ack = self.receiver.apply(message)
        if switches and not self._said_ready:
            self._say(NOTHING)
            self._decisions.get(timeout=_AGREE_S)  # or it would be taken for that of the next message
        return ack

    def interrupt(self, reason: str) -> None:
        """Ends a wait for the trainer."""
        self.receiver.interrupt(reason)

    def on_note(self, note: bytes) -> None:
        """Takes the API server's decision on a switch for which the ranks are ready."""
        if note == GO and self.rank == 0:
            self._boundary.inject()
        self._decisions.put(note)

    def _connected(self, connection: Connection) -> None:
        self._connection = connection
        self._decisions = queue.SimpleQueue()

    def _say(self, frame: bytes) -> None:
        assert self._connection is not None
        self._connection.send_bytes(frame)

    def _between_steps(self, do: Callable[[], None]) -> None:
        """Has work done between two steps, in the same pass of the loop as on the other ranks.

        Raises:
            Refused: Another rank cannot switch; nothing was done.
            DeadlineExceeded: SGLang's loop did not come to it.
        """
        task = self._boundary.post(do)
        self._said_ready = True
        self._say(READY)
        try:
            decision = self._decisions.get(timeout=_AGREE_S)
        except queue.Empty:
            decision = CANCEL
        if decision != GO:
            self._boundary.withdraw(task)
            raise Refused("not all ranks were ready to switch weights")
        task.wait(self._open.timeout_s if self._open is not None else _AGREE_S)

    def _hello(self) -> Hello:
        loader = self.receiver.loader
        return hello_of(
            loader, rank=self.rank, device=self.device, places=loader.placed, staging_note=self.receiver.staging_note
        )

    # -- once, when the model is loaded

    def _make_receiver(self, runner: Any, world: int) -> WeightReceiver:
        if getattr(runner.model_config, "quantization", None):
            raise ConfigError(
                f"the model is quantised ({runner.model_config.quantization}), and what SGLang derives from quantised "
                "weights would stay as it was",
                hint="serve the model unquantised",
            )
        if getattr(runner.model_config, "is_multimodal", False):
            raise ConfigError(
                "SGLang caches what its vision encoder computed, and an update would leave it in that cache",
                hint="leave weightcast out of SGLANG_PLUGINS",
            )
        read = getattr(runner.loader, "_get_all_weights", None)
        if read is None:
            raise ConfigError(
                f"load format {runner.load_config.load_format} has no checkpoint to read the names of weights from",
                hint="start SGLang from a checkpoint in safetensors files",
            )

        def checkpoint() -> Iterator[tuple[str, torch.Tensor]]:
            return read(runner.model_config, runner.model)

        receiver = WeightReceiver(
            runner.model,
            load_weights=runner.model.load_weights,
            expected=[TensorSpec.of(name, tensor) for name, tensor in checkpoint()],
            tp_rank=self.rank,
            tp_size=world,
            device=self.device,
            staging=staging_setting(),
            keep_storage=True,  # captured graphs know addresses
            between_steps=self._between_steps,
        )
        loader = receiver.loader
        if not loader.staging.staged:
            why = loader.unstaged_because(keep_storage=True) or "there is no memory for a second set of weights"
            raise ConfigError(
                f"new weights of this model cannot wait beside those that serve: {why}",
                hint="leave weightcast out of SGLANG_PLUGINS",
            )
        changed = changed_since_load(loader, checkpoint())
        if changed:
            raise ConfigError(
                f"SGLang has changed {_some(changed)} after loading, so that an update through the loader's own copies "
                "would be wrong",
                hint="use an attention and MoE backend that keeps weights as they are loaded",
            )
        loader.expect_kept_dtypes()
        log.info(
            "weightcast: rank %d stages updates on: %s, %.2f GiB; %d tensors",
            self.rank,
            loader.staging.place,
            loader.staging.size_bytes / 2**30,
            len(loader.expected),
        )
        return receiver


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


# SGLang calls plain functions, and each scheduler process has one model that is updated.
_rank: SglangRank | None = None


def model_loaded(result: Any, runner: Any, *arguments: Any, **named: Any) -> None:
    """After ``ModelRunner.load_model``."""
    global _rank
    if runner.is_draft_worker:
        return
    try:
        _rank = SglangRank(runner)
    except WeightcastError as error:
        # SGLang's own log of a failed start buries the reason.
        log.error("weightcast cannot update this model: %s%s", error, f" ({error.hint})" if error.hint else "")
        raise


def scheduler_made(result: Any, scheduler: Any, *arguments: Any, **named: Any) -> None:
    """After ``Scheduler.__init__``."""
    if _rank is not None:
        _rank.attach(scheduler)


def requests_pulled(result: Any, *arguments: Any, **named: Any) -> None:
    """After ``SchedulerRequestReceiver._pull_raw_reqs``."""
    if _rank is not None:
        _rank.requests_pulled(result)


def request_made(result: Any, scheduler: Any, request: Any, *arguments: Any, **named: Any) -> None:
    """After ``Scheduler._maybe_namespace_elastic_radix_cache``, which SGLang calls for every new request."""
    if _rank is not None:
        _rank.request_made(request)
