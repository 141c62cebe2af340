"""Our receiver in a rank process of an engine that goes on generating: messages on one thread, the switch on another.

Weight messages come over a connection, on a thread of their own.  What waits is proven before the switch and what is
resident after it, on that thread too.  Only the exchange and the finishers run on the engine's thread, between two
steps, when the engine's mark comes to this rank.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from multiprocessing.connection import Listener
from typing import ClassVar

import torch

from weightcast.errors import DeadlineExceeded, Refused
from weightcast.plugins.rank_sockets import (
    CANCEL,
    GO,
    NOTHING,
    READY,
    Hello,
    hello_of,
    serve_api_server,
    socket_path,
    switch_of,
)
from weightcast.receiver import WeightReceiver
from weightcast.receiver.beside_steps import OwnStream, share_interpreter
from weightcast.receiver.rank_connections import Connection
from weightcast.wire.answers import RankAck
from weightcast.wire.messages import Abort, Commit, Message, Open

log = logging.getLogger("weightcast.plugins")

_AGREE_S = 60.0  # the other ranks and the API server need this long at most to agree on a switch

_YIELD_S = 5e-5


class SwitchRank(ABC):
    """One rank's receiver.  ``apply`` is called by one thread at a time; ``interrupt`` and ``on_note`` by another.

    A subclass sets ``receiver``, and says how the engine's requests are treated (``carry_out``).
    """

    engine: ClassVar[str]
    receiver: WeightReceiver

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.device = device
        self._stream = OwnStream(device)
        self._tasks: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._listener: Listener | None = None
        self._connection: Connection | None = None
        self._decisions: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._said_ready = False
        self._committed = ""
        self._open: Open | None = None
        self._switching: Message | None = None
        self.in_session = False  # an update is under way
        self._applying = False
        self._no_room = ""

    # -- for subclasses

    @abstractmethod
    def carry_out(self, do: Callable[[], None], session: Open, *, forward: bool) -> None:
        """Runs ``do``, the exchange of weights, on the engine's thread, between two steps.

        It is ``forward`` for a commit, and not if the old version comes back.
        """

    def why_not(self, message: Open) -> str:
        """The reason why a session cannot be had from this engine; empty if it can."""
        if self._no_room:
            self.stage_again()
        if self._no_room:
            return f"no room for new weights beside those that serve since {self.engine} woke up: {self._no_room}"
        return ""

    def far_api_server_gone(self) -> None:  # noqa: B027  only some engines have ranks on several hosts
        """Called when the API server on another host has closed its connection, or is gone."""

    def told_to_switch(self) -> None:  # noqa: B027  only some engines need it
        """Called on the thread that reads, when all ranks are ready."""

    # -- the engine's side, on its own thread

    def listen(self, folder: str) -> None:
        """Serves the API server of this host, which connects to a socket in the folder."""
        self._listener = Listener(socket_path(folder, self.rank), family="AF_UNIX", backlog=1)
        self._serve(self._listener, None)

    def serve(self, connection: Connection) -> None:
        """Serves the API server at the other end of a connection."""
        self._serve(None, connection)

    def stop_listening(self) -> None:
        """Lets no other API server in; the thread ends with the connection that it has."""
        if self._listener is not None:
            with suppress(FileNotFoundError):  # the API server has deleted the folder
                self._listener.close()

    def weights_fall_asleep(self, *, discard: bool, hint: str) -> None:
        """Frees the staging set, and refuses updates until ``stage_again``; the rest is ``WeightReceiver.sleep``."""
        self.receiver.sleep(discard=discard, hint=hint)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def stage_again(self) -> bool:
        """Allocates the staging set once the weights are back.

        Returns False if there is no room for it; the next update tries again.
        """
        self._no_room = ""
        try:
            self.receiver.wake()
        except torch.OutOfMemoryError as error:  # a colocated trainer may still be there
            self._no_room = str(error).splitlines()[0]
            log.warning("weightcast: %s", self._no_room)
        return not self._no_room

    @property
    def at_work(self) -> bool:
        """True during a session, and while a message before it is carried out (``Prepare`` works out a plan)."""
        return self.in_session or self._applying

    def yield_interpreter(self) -> None:
        """Called once in each pass of the engine's loop: leaves the interpreter to an update for a moment."""
        if self.at_work:
            time.sleep(_YIELD_S)

    def step(self) -> bool:
        """Carries out the oldest work that waits.  A rank with none has nothing to switch, and returns False."""
        if not self._tasks:
            return False
        do, done = self._tasks.popleft()
        assert self._open is not None
        try:
            self.carry_out(do, self._open, forward=isinstance(self._switching, Commit))
        except BaseException as error:  # noqa: BLE001  an error here would end the engine
            done.set_exception(error)
        else:
            done.set_result(None)
        return True

    # -- the API server's side, on threads of our own

    def apply(self, message: Message) -> RankAck:
        """Carries out one weight message at a time."""
        if isinstance(message, Open):
            why = self.why_not(message)
            if why:
                return RankAck(rank=self.rank, ok=False, refused=True, error=why)
            self._open = message
            self.in_session = True
        switches, self._committed = switch_of(message, self._committed)
        self._said_ready = False
        self._switching = message
        self._applying = True
        try:
            # The exchange stays on the engine's stream, and waits for all of the device.
            ack = self._stream.apply(self.receiver, message)
        finally:
            self._applying = False
        if switches and not self._said_ready:
            self._say(NOTHING)
            self._decisions.get(timeout=_AGREE_S)  # or it would be taken for that of the next message
        if isinstance(message, Commit | Abort):
            self.in_session = False
        return ack

    def interrupt(self, reason: str) -> None:
        """Ends a wait for the trainer."""
        self.in_session = False
        self.receiver.interrupt(reason)

    def on_note(self, note: bytes) -> None:
        """Takes the API server's decision on a switch for which the ranks are ready."""
        if note == GO:
            self.told_to_switch()
        self._decisions.put(note)

    def between_steps(self, do: Callable[[], None]) -> None:
        """Has work done between two steps, at the same step as on the other ranks.

        Raises:
            Refused: Another rank cannot switch; nothing was done.
            DeadlineExceeded: The engine's loop did not come to it in time; it may still do so.
        """
        done: Future[None] = Future()
        task = do, done
        self._tasks.append(task)
        self._said_ready = True
        self._say(READY)
        try:
            decision = self._decisions.get(timeout=_AGREE_S)
        except queue.Empty:
            decision = CANCEL + b"the API server did not say whether to switch weights"
        if decision != GO:
            with suppress(ValueError):
                self._tasks.remove(task)  # no mark will come for it
            raise Refused(decision.removeprefix(CANCEL).decode() or "the switch of weights was cancelled")
        timeout_s = self._open.timeout_s if self._open is not None else _AGREE_S
        if not wait([done], timeout_s).done:
            raise DeadlineExceeded(who=self.engine, waiting_for="its loop to switch weights", timeout_s=timeout_s)
        done.result()

    def _serve(self, listener: Listener | None, connection: Connection | None) -> None:
        """Starts the thread that serves, which the interpreter then lets run in time."""
        share_interpreter()

        def serve() -> None:
            serve_api_server(
                listener,
                self,
                self._hello,
                device=self.device,
                connection=connection,
                on_note=self.on_note,
                on_connection=self._connected,
            )
            if connection is not None:
                self.far_api_server_gone()

        threading.Thread(target=serve, name="weightcast", daemon=True).start()

    def _connected(self, connection: Connection) -> None:
        self._connection = connection
        self._decisions = queue.SimpleQueue()

    def _say(self, frame: bytes) -> None:
        assert self._connection is not None
        self._connection.send_bytes(frame)

    def _hello(self) -> Hello:
        loader = self.receiver.loader
        return hello_of(
            loader, rank=self.rank, device=self.device, places=loader.placed, staging_note=self.receiver.staging_note
        )
