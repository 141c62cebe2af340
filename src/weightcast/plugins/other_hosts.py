"""Connects an engine's API server to ranks on other hosts: it invites all ranks, and those elsewhere dial its gate."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from weightcast.comm.authenticated import AuthenticatedConnection, Gate, NotAuthenticated, Secret, dial
from weightcast.comm.ipc import host_id
from weightcast.errors import ConfigError, EngineFailure, WeightcastError
from weightcast.runtime.deadline import Deadline

log = logging.getLogger("weightcast.plugins")

_PROOF_S = 10.0
_DIAL_S = 20.0  # shorter than the API server's wait for its ranks to come
SET_A_SECRET = (
    "set WEIGHTCAST_ENGINE_SECRET to the same random value on every host of this engine, or name a file that has it: "
    '--additional-config \'{"weightcast": {"secret_file": "PATH"}}\'; make one with: openssl rand -hex 32'
)


class RankInvitation(msgspec.Struct, frozen=True, kw_only=True):
    """Tells every rank how to reach the API server.

    Attributes:
        folder: Folder in which ranks on the API server's host listen.
        host_id: Boot id of that host.
        address: Address of the gate for ranks on other hosts; empty if there is none.
        token: Random text, so that a proof counts for this invitation alone.
    """

    folder: str
    host_id: str
    host: str
    address: str = ""
    port: int = 0
    token: str = ""

    def is_for_this_host(self) -> bool:
        """True if this process is on the API server's host and sees the same files."""
        return self.host_id == host_id() and Path(self.folder).is_dir()


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Makes ranks on other hosts possible for an API server; ``address`` is that of this host which they reach."""

    address: str
    secret: Secret


class Reception:
    """Invites an engine's ranks, and takes the connections of those on other hosts.  A context manager."""

    def __init__(self, folder: str, elsewhere: Elsewhere | None) -> None:
        """Listens at the address of ``elsewhere``, which is None if no rank on another host can be had.

        Raises:
            ConfigError: The address is not one of this host.
        """
        token = secrets.token_hex(16)
        self._gate: Gate | None = None
        self._here: dict[int, AuthenticatedConnection] = {}
        self.invitation = RankInvitation(folder=folder, host_id=host_id(), host=socket.gethostname())
        if elsewhere is not None:
            self._gate = Gate(elsewhere.address, elsewhere.secret, context=token.encode(), timeout_s=_PROOF_S)
            self.invitation = msgspec.structs.replace(
                self.invitation, address=self._gate.host, port=self._gate.port, token=token
            )

    def wait_for(self, ranks: Sequence[int], timeout_s: float) -> dict[int, AuthenticatedConnection]:
        """The connections of ranks elsewhere, which the caller closes; ``EngineFailure`` if one is not in time."""
        deadline = Deadline(timeout_s)
        while missing := [rank for rank in ranks if rank not in self._here]:
            connection = self._gate.admit(deadline.left_s()) if self._gate is not None else None
            if connection is None:
                words = f"rank {missing[0]} does not listen on this host"
                if self._gate is not None:
                    words += f", and did not come to {self._gate.host}:{self._gate.port} within {timeout_s:g} s"
                raise EngineFailure(
                    words + self.turned_away(), ranks=missing, hint=None if self._gate else SET_A_SECRET
                )
            self._take(connection, missing)
        return {rank: self._here.pop(rank) for rank in ranks}

    def turned_away(self) -> str:
        """Peers that were turned away, for the end of an error; empty if there was none."""
        dropped = self._gate.dropped if self._gate is not None else []
        return f" (turned away: {'; '.join(dropped)})" if dropped else ""

    def close(self) -> None:
        """Stops listening."""
        if self._gate is not None:
            self._gate.close()
            if dropped := self._gate.dropped:
                log.warning("weightcast: peers were turned away: %s", "; ".join(dropped))
        for connection in self._here.values():
            connection.close()

    def __enter__(self) -> Reception:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, connection: AuthenticatedConnection, missing: Sequence[int]) -> None:
        rank = connection.number
        if rank in missing and rank not in self._here:
            self._here[rank] = connection
            return
        connection.close()
        log.warning("weightcast: %s said that it is rank %d, which is not expected", connection.peer, rank)


def reach(invitation: RankInvitation, rank: int, secret: Secret | None) -> AuthenticatedConnection:
    """Connects this rank to an API server on another host.

    Raises:
        ConfigError: One of the two ends has no secret.
        EngineFailure: The API server cannot be reached, or has another secret.
    """
    me = f"rank {rank} on host {socket.gethostname()}"
    there = f"the API server on host {invitation.host}"
    if not invitation.address or secret is None:
        which = f"{there} has" if not invitation.address else "this host has"
        raise ConfigError(f"{me} cannot serve {there}: {which} no engine secret", hint=SET_A_SECRET)
    try:
        return dial(
            invitation.address,
            invitation.port,
            secret,
            number=rank,
            context=invitation.token.encode(),
            timeout_s=_DIAL_S,
        )
    except NotAuthenticated as error:
        raise EngineFailure(f"{me} and {there}: {error}", ranks=[rank], hint=SET_A_SECRET) from error
    except (OSError, WeightcastError) as error:
        raise EngineFailure(
            f"{me} cannot reach {there} at {invitation.address}:{invitation.port}: {error}",
            ranks=[rank],
            hint="open TCP between the hosts of this engine; VLLM_HOST_IP or --master-addr names the address",
        ) from error


def engine_secret(secret_file: str = "") -> Secret | None:
    """Reads the secret: from the file if there is one, otherwise from ``WEIGHTCAST_ENGINE_SECRET``; None without both.

    Raises:
        ConfigError: The file cannot be read, or the secret is too short.
    """
    if secret_file:
        try:
            value = Path(secret_file).read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"cannot read secret_file: {error}", hint=SET_A_SECRET) from error
        return Secret(value, origin=secret_file)
    value = os.environ.get("WEIGHTCAST_ENGINE_SECRET", "").strip().encode()
    return Secret(value, origin="WEIGHTCAST_ENGINE_SECRET") if value else None
