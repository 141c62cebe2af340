"""Ask a server what it is.  The server is asked, never the packages that this process happens to have."""

from __future__ import annotations

from weightcast.comm.http import Client
from weightcast.errors import ConfigError, DeadlineExceeded, TargetRejected, TargetUnreachable, WireError
from weightcast.wire.messages import PROTOCOL, EngineInfo, decode_info


def probe(client: Client) -> EngineInfo:
    """What the engine behind a client is and serves.

    Raises:
        TargetUnreachable: Nothing answers there, or not in time.
        TargetRejected: It answers and refuses (a wrong key, say).
        ConfigError: It answers, but is no engine that weightcast can update.
    """
    url = client.target.url
    try:
        body = client.get_json("/weightcast/info")
    except DeadlineExceeded as error:
        raise TargetUnreachable(
            str(error), url=url, hint="something listens there and says nothing: is the engine stopped, or swamped?"
        ) from error
    except TargetRejected as error:
        if error.status in (404, 405):
            raise ConfigError(
                f"{url} answers, but has no weightcast receiver",
                hint="start the engine with `weightcast serve`, or check the port",
            ) from error
        raise
    try:
        info = decode_info(body)
    except WireError as error:
        raise ConfigError(f"{url} answers /weightcast/info with something else: {error}") from None
    if info.protocol != PROTOCOL:
        raise ConfigError(
            f"{url} speaks protocol {info.protocol}, this weightcast speaks {PROTOCOL}",
            hint="install the same version of weightcast on both sides",
        )
    return info
