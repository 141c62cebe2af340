"""Asks a server which kind of engine it is, since the packages of this process may differ from the server's."""

from __future__ import annotations

from collections.abc import Sequence

from weightcast.comm.http import Client
from weightcast.comm.run_steps import converse_on_loop
from weightcast.errors import ConfigError, DeadlineExceeded, TargetUnreachable
from weightcast.protocols import Kind
from weightcast.wire.engine_info import EngineInfo


async def probe(client: Client, kinds: Sequence[Kind], *, timeout_s: float | None = None) -> EngineInfo:
    """Recognises the engine behind a client.  It is for the event loop.

    Args:
        kinds: Kinds of engine, in the order of asking.
        timeout_s: Deadline of each kind's requests, in seconds; None takes the client's.

    Raises:
        TargetUnreachable: The server did not answer in time.
        TargetRejected: The server refused, for example a wrong key.
        ConfigError: The server is not an engine that weightcast can update.
    """
    url = client.target.url
    for kind in kinds:
        try:
            info = await converse_on_loop(client, kind.recognise(url), timeout_s=timeout_s or client.timeout_s)
        except DeadlineExceeded as error:
            raise TargetUnreachable(
                str(error),
                url=url,
                hint="its port accepts connections; check whether the engine is stopped or overloaded",
            ) from error
        if info is not None:
            return info
    names = ", ".join(kind.name for kind in kinds)
    raise ConfigError(
        f"{url} answers, but is not an engine that weightcast can update (known kinds: {names})",
        hint="check the port; start the engine with `weightcast serve`, or SGLang, vLLM or LMDeploy with the flags on "
        "their pages in docs/engines",
    )
