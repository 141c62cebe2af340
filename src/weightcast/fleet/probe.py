"""Ask a server what it is.  The server is asked, never the packages that this process happens to have."""

from __future__ import annotations

from collections.abc import Sequence

from weightcast.comm.converse import converse
from weightcast.comm.http import Client
from weightcast.errors import ConfigError, DeadlineExceeded, TargetUnreachable
from weightcast.protocols import Kind
from weightcast.wire.messages import EngineInfo


def probe(client: Client, kinds: Sequence[Kind], *, timeout_s: float | None = None) -> EngineInfo:
    """What the engine behind a client is and serves.

    Args:
        client: The server.
        kinds: What it may be, in the order of asking.
        timeout_s: Deadline of each kind's questions, in seconds.

    Raises:
        TargetUnreachable: Nothing answers there, or not in time.
        TargetRejected: It answers and refuses (a wrong key, say).
        ConfigError: It answers, but is no engine that weightcast can update.
    """
    url = client.target.url
    for kind in kinds:
        try:
            info = converse(client, kind.recognise(url), timeout_s=timeout_s or client.timeout_s)
        except DeadlineExceeded as error:
            raise TargetUnreachable(
                str(error), url=url, hint="something listens there and says nothing: is the engine stopped, or swamped?"
            ) from error
        if info is not None:
            return info
    names = ", ".join(kind.name for kind in kinds)
    raise ConfigError(
        f"{url} answers, but is no engine that weightcast can update (asked for: {names})",
        hint="check the port; start the engine with `weightcast serve`, or SGLang, vLLM or LMDeploy with the flags of "
        "docs/engines",
    )
