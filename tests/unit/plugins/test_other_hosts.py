"""Ranks on other hosts come to an engine's API server, if both know the secret.  All are threads of this host here."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from tests.helpers.clock import PATIENCE_S
from tests.helpers.echo import Echo
from weightcast.comm.authenticated import AuthenticatedConnection, Secret, dial
from weightcast.errors import ConfigError, EngineFailure, WeightcastError
from weightcast.plugins import other_hosts
from weightcast.plugins.other_hosts import Elsewhere, RankInvitation, engine_secret, reach
from weightcast.plugins.rank_sockets import READY, Hello, notes_of
from weightcast.plugins.vllm.rank_sockets import VllmExecutor
from weightcast.receiver.rank_connections import serve_messages
from weightcast.wire.answers import RankAck
from weightcast.wire.codec import encode
from weightcast.wire.messages import Abort, Commit, Message, Readback

pytestmark = pytest.mark.timeout(300)

SECRET = Secret(b"0123456789abcdef", origin="WEIGHTCAST_ENGINE_SECRET")
OTHER = Secret(b"fedcba9876543210", origin="/run/secrets/engine")
HERE = Elsewhere(address="127.0.0.1", secret=SECRET)
SESSION = "ab" * 16


class FarRank(Echo):
    """A rank on another host.  With ``trouble`` it hangs up as soon as it has a message."""

    def __init__(self, rank: int, *, trouble: bool = False) -> None:
        super().__init__(rank, 2, "")
        self.hangs_up = trouble
        self.over = threading.Event()
        self.connection: AuthenticatedConnection | None = None

    def come(self, invitation: RankInvitation, secret: Secret | None = SECRET) -> None:
        self.connection = reach(invitation, self.rank, secret)
        threading.Thread(target=self._serve, args=(self.connection,), daemon=True).start()

    def apply(self, message: Message) -> RankAck:
        assert self.connection is not None
        if self.hangs_up:
            self.connection.close()
        elif isinstance(message, Commit):
            self.connection.send_bytes(READY)
        return super().apply(message)

    def _serve(self, connection: AuthenticatedConnection) -> None:
        names = {"host": f"host-{self.rank}", "host_id": f"boot {self.rank}"}
        hello = Hello(
            rank=self.rank, pid=41, device="cpu", staging="host", staging_bytes=0, specs=(), places=(), **names
        )
        with connection:
            connection.send_bytes(encode(hello))
            serve_messages(connection, self, rank=self.rank, on_note=lambda note: None)
        self.over.set()


def executor_of(
    listen: Callable[[RankInvitation], None], elsewhere: Elsewhere | None = HERE, lost: Callable[[str], None] = print
) -> VllmExecutor:
    return VllmExecutor(
        2, listen=listen, on_main=lambda timeout_s, version: None, elsewhere=elsewhere, on_far_rank_lost=lost
    )


def all_come(ranks: list[FarRank]) -> Callable[[RankInvitation], None]:
    def listen(invitation: RankInvitation) -> None:
        for rank in ranks:
            rank.come(invitation)

    return listen


def test_ranks_on_two_hosts_are_one_engine():
    ranks = [FarRank(1), FarRank(0)]
    executor = executor_of(all_come(ranks))
    assert executor.pids() == (41, 41)
    assert executor.host_id == ""
    assert notes_of(executor.hellos, ()) == ["ranks on several hosts: rank 0 on host-0, rank 1 on host-1"]
    for message in (Readback(), Commit(session=SESSION), Abort(session="cd" * 16, reason="long 0")):
        acks = executor.apply(message, timeout_s=PATIENCE_S)
        assert [ack.rank for ack in acks] == [0, 1]
    assert [len(ack.error) for ack in acks] == [5_000_000] * 2
    executor.close()
    for rank in ranks:
        assert rank.over.wait(PATIENCE_S)


def test_interrupt_overtakes_the_message_that_a_far_rank_carries_out():
    ranks = [FarRank(0), FarRank(1)]
    executor = executor_of(all_come(ranks))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(executor.apply, Abort(session=SESSION, reason="wait"), timeout_s=PATIENCE_S)
        while not waiting.done():
            executor.interrupt("the trainer is gone")
        assert {ack.error for ack in waiting.result()} == {"interrupted"}
    executor.close()


def test_far_rank_that_is_lost_is_named_with_its_host():
    ranks = [FarRank(0), FarRank(1, trouble=True)]
    lost: list[str] = []
    executor = executor_of(all_come(ranks), lost=lost.append)
    with pytest.raises(EngineFailure, match=r"rank 1 \(pid 41 on host host-1\) is gone during") as caught:
        executor.apply(Readback(), timeout_s=PATIENCE_S)
    assert caught.value.ranks == (1,)
    assert lost == [str(caught.value)]
    executor.close()


def test_another_secret_is_refused_at_both_ends():
    said: list[str] = []

    def listen(invitation: RankInvitation) -> None:
        try:
            FarRank(1).come(invitation, OTHER)
        except WeightcastError as error:
            said.append(str(error))
            raise EngineFailure(f"vLLM: {error}") from error

    with pytest.raises(EngineFailure) as caught:
        executor_of(listen)
    assert "rank 1 on host" in said[0]
    assert "refused the secret of /run/secrets/engine: the two ends have different secrets" in said[0]
    assert "different secrets" in str(caught.value)
    assert "it does not know the secret of WEIGHTCAST_ENGINE_SECRET" in str(caught.value)


@pytest.mark.parametrize(
    ("elsewhere", "secret", "words"),
    [(None, SECRET, "the API server on host .* has no engine secret"), (HERE, None, "this host has no engine secret")],
)
def test_missing_secret_is_named_with_the_setting_to_make(elsewhere, secret, words):
    with pytest.raises(ConfigError, match=f"rank 1 on host .* cannot serve .*{words}") as caught:
        executor_of(lambda invitation: FarRank(1).come(invitation, secret), elsewhere)
    assert "WEIGHTCAST_ENGINE_SECRET" in str(caught.value.hint)
    assert "secret_file" in str(caught.value.hint)


def test_rank_that_does_not_come_is_named(monkeypatch):
    monkeypatch.setattr("weightcast.plugins.rank_sockets._GREETING_S", 0.2)
    with pytest.raises(EngineFailure, match=r"rank 0 does not listen on this host, and did not come to 127\.0\.0\.1:"):
        executor_of(lambda invitation: FarRank(1).come(invitation))
    with pytest.raises(EngineFailure, match="rank 0 does not listen on this host") as caught:
        executor_of(lambda invitation: None, None)
    assert "WEIGHTCAST_ENGINE_SECRET" in str(caught.value.hint)


def test_rank_that_comes_twice_or_is_not_expected_takes_no_place():
    ranks = [FarRank(0), FarRank(1)]
    more: list[AuthenticatedConnection] = []

    def listen(invitation: RankInvitation) -> None:
        ranks[0].come(invitation)
        more.extend(reach(invitation, number, SECRET) for number in (0, 7))
        ranks[1].come(invitation)

    executor = executor_of(listen)
    assert [ack.rank for ack in executor.apply(Readback(), timeout_s=PATIENCE_S)] == [0, 1]
    for connection in more:
        with connection, pytest.raises((EOFError, OSError)):
            connection.recv_bytes()
    executor.close()


def test_invitation_of_another_start_is_no_way_in():
    invitations: list[RankInvitation] = []

    def listen(invitation: RankInvitation) -> None:
        invitations.append(invitation)
        stale = msgspec.structs.replace(invitation, token="00" * 16)
        FarRank(1).come(stale)

    with pytest.raises(EngineFailure, match="different secrets"):
        executor_of(listen)
    (invitation,) = invitations
    with pytest.raises(OSError, match="refused"):  # the gate is closed
        dial(invitation.address, invitation.port, SECRET, number=1, context=b"", timeout_s=PATIENCE_S)


def test_a_rank_listens_in_the_folder_only_on_the_host_that_has_it(tmp_path, monkeypatch):
    invitation = RankInvitation(folder=str(tmp_path), host_id=other_hosts.host_id(), host="here")
    assert invitation.is_for_this_host()
    assert not msgspec.structs.replace(invitation, folder=str(tmp_path / "none")).is_for_this_host()
    monkeypatch.setattr(other_hosts, "host_id", lambda: "another")
    assert not invitation.is_for_this_host()


def test_secret_comes_from_the_file_before_the_variable(tmp_path, monkeypatch):
    monkeypatch.delenv("WEIGHTCAST_ENGINE_SECRET", raising=False)
    assert engine_secret() is None
    file = tmp_path / "secret"
    file.write_bytes(b"from-the-file-0123456789\n")
    monkeypatch.setenv("WEIGHTCAST_ENGINE_SECRET", "from-the-variable-0123456789")
    found = engine_secret(), engine_secret(str(file))
    assert [secret.origin for secret in found if secret] == ["WEIGHTCAST_ENGINE_SECRET", str(file)]
    assert found[1] is not None
    assert found[1].mac(b"x") == Secret(b"from-the-file-0123456789", origin="").mac(b"x")
    with pytest.raises(ConfigError, match="cannot read secret_file"):
        engine_secret(str(tmp_path / "none"))
    os.environ["WEIGHTCAST_ENGINE_SECRET"] = "short"
    with pytest.raises(ConfigError, match="has 5 bytes"):
        engine_secret()
