"""weightcast as a method: the real ``WeightUpdater`` on one side, the real receiver behind HTTP on the other."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI

from weightcast import Target, WeightUpdater
from weightcast.comm import nixl
from weightcast.comm.ipc import device_uuid, host_id
from weightcast.lab.bench.counting import Counting
from weightcast.lab.bench.methods import EngineSide, TrainerSide
from weightcast.lab.bench.raw import synchronize
from weightcast.lab.connect import connect
from weightcast.receiver import WeightReceiver
from weightcast.receiver.beside_steps import OwnStream, share_interpreter
from weightcast.receiver.engine_state import EngineFacts
from weightcast.receiver.executor import LocalExecutor
from weightcast.receiver.server import weight_routes
from weightcast.receiver.session import SessionHandler
from weightcast.version import __version__
from weightcast.watch.listeners import Listener
from weightcast.watch.sessions import SessionWatcher
from weightcast.wire.answers import RankAck
from weightcast.wire.engine_info import RankInfo
from weightcast.wire.layout import TensorSpec
from weightcast.wire.messages import Message

_START_S = 60.0


class Trainer:
    """``WeightUpdater`` over the rig's model."""

    def __init__(
        self,
        side: TrainerSide,
        *,
        transport: str,
        bucket_bytes: int,
        verify: str,
        direct_by: str = "auto",
        **_: Any,
    ) -> None:
        self._side = side
        self._options: dict[str, Any] = dict(transport=transport, bucket_bytes=bucket_bytes, verify=verify)
        self._options |= dict(direct_by=direct_by, keep_mapped=direct_by == "shards")
        self._updater: WeightUpdater | None = None
        self._counting = Counting(side)

    def prepare(self) -> None:
        """Connects to the engines."""
        urls = [pipe.receive() for pipe in self._side.pipes]
        listeners = self.listeners()
        self._updater = connect(self._side.model, [Target(url) for url in urls], on_event=listeners, **self._options)

    def listeners(self) -> Sequence[Listener]:
        """Returns the listeners of the trainer's events."""
        return ()

    def update(self, version: int) -> dict[str, float]:
        """Runs one transaction."""
        assert self._updater is not None
        with self._counting:
            report = self._updater.update(version=version)
        phases = {f"{name}_s": seconds for name, seconds in report.phases.items()}
        return {**phases, "own_seconds": report.seconds, "buckets": float(report.buckets)}

    def close(self) -> None:
        """Disconnects."""
        if self._updater is not None:
            self._updater.close()


class Engine:
    """A receiver behind HTTP, which methods with the same settings share, as the updates of one engine do."""

    def __init__(self, side: EngineSide, *, staging: str = "auto", **_: Any) -> None:
        self._side = side
        self._key = type(self), staging
        self._served: _Served | None = None
        self._counting = Counting(side)

    def prepare(self) -> None:
        """Records the loader, allocates the staging set and starts the server, unless another method has."""
        self._served = self._side.served.get(self._key)
        if self._served is None:
            self._served = _Served(self._side, staging=self._key[1], watchers=self.watchers())
            self._side.served[self._key] = self._served
        self._served.users += 1
        for pipe in self._side.pipes:
            pipe.send(self._served.url)

    def watchers(self) -> Sequence[SessionWatcher]:
        """Returns the watchers of the engine's sessions."""
        return ()

    def update(self, version: int) -> dict[str, float]:
        """Waits until the weights are proven; they are usable once the finishers have run."""
        served = self._served
        assert served is not None
        with self._counting:
            if not (served.done.wait(300.0) and self._side.decoding.going.wait(300.0)):
                raise TimeoutError("no update arrived")
        served.done.clear()
        return {"usable_at": served.usable_at}

    def close(self) -> None:
        """Stops the server and releases the weights, if no other method uses them."""
        served, self._served = self._served, None
        if served is None:
            return
        served.users -= 1
        if not served.users:
            del self._side.served[self._key]
            served.close()


class _Served:
    """The receiver and its server, in a thread of the engine's process."""

    def __init__(self, side: EngineSide, *, staging: Any, watchers: Sequence[SessionWatcher]) -> None:
        self._side = side
        self.users = 0
        self.done = threading.Event()
        self.usable_at = 0.0
        expected = [TensorSpec(name=place.name, dtype="bfloat16", shape=place.shape) for place in side.shape.places]
        receiver = WeightReceiver(
            side.engine,
            load_weights=side.engine.load_weights,
            expected=expected,
            device=side.device,
            finishers=[self._finished],
            staging=staging,
            may_move=True,
        )
        self._worker = _ReceiverWorker(receiver)
        facts = EngineFacts(
            engine=f"weightcast {__version__}",
            model=side.shape.name,
            host_id=host_id(),
            ranks=(RankInfo(rank=0, pid=os.getpid(), device=device_uuid(side.device)),),
            staging=receiver.loader.staging.place,
            transports=("ipc", "direct", "broadcast"),
            reads_remote=not nixl.missing(),
            specs=tuple(expected),
        )
        self.engine = SessionHandler(LocalExecutor(self._worker), side.decoding, facts, watchers=watchers)
        app = FastAPI()
        app.include_router(weight_routes(self.engine))
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        # With another protocol number asyncio leaves Nagle's algorithm on, and every answer takes 40 ms.
        listening.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listening],), daemon=True)
        self._thread.start()
        deadline = time.monotonic() + _START_S
        while not self._server.started and time.monotonic() < deadline:
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"

    def close(self) -> None:
        """Stops the server and releases the weights."""
        self._server.should_exit = True
        self._thread.join(10.0)
        self.engine.close()  # its watchdog thread would keep the staging set alive
        self._worker.close()

    def _finished(self) -> None:
        synchronize(self._side.device)
        self.usable_at = time.monotonic()
        self.done.set()


class _ReceiverWorker:
    def __init__(self, receiver: WeightReceiver) -> None:
        self._receiver = receiver
        self._device = receiver.device
        self._stream = OwnStream(receiver.device)
        if receiver.device.type == "cuda":
            share_interpreter()

    def apply(self, message: Message) -> RankAck:
        """Applies a message after setting the device, which the server's threads do not know."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        return self._stream.apply(self._receiver, message)

    def run(self, command: bytes) -> bytes:
        """Returns the command unchanged: this worker has no commands."""
        return command

    def interrupt(self, reason: str) -> None:
        """As ``Worker.interrupt``."""
        self._receiver.interrupt(reason)

    def close(self) -> None:
        """As ``Worker.close``."""
        self._receiver.close()
