"""``weightcast catch-up``: an engine copies the weights that another engine serves."""

from __future__ import annotations

from typing import Annotated

import typer

from weightcast.cli.options import ApiKeys, CaFile, CertFile, Json, KeyFile, Traceback, targets
from weightcast.cli.render import say, say_json
from weightcast.config import PauseChoice


def catch_up(
    url: Annotated[str, typer.Argument(metavar="URL", help="Engine that came late or back.", show_default=False)],
    peer: Annotated[
        list[str],
        typer.Option(
            "--from",
            metavar="PEER_URL",
            help="Engine to copy from, as the first one reaches it; if repeated, the next one is tried when one fails.",
        ),
    ],
    api_key: ApiKeys = None,
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: KeyFile = None,
    pause: Annotated[
        str,
        typer.Option(
            metavar="auto|abort|retract|in_place|wait",
            help="Fate of the requests that run on URL at the switch. auto: retract if the engine can, else abort.",
        ),
    ] = "auto",
    timeout: Annotated[float, typer.Option(metavar="S", help="Longest single wait, in seconds.", min=0.1)] = 120.0,
    attempts: Annotated[
        int, typer.Option(metavar="N", help="How often to start if the peer is updated meanwhile.", min=1)
    ] = 3,
    as_json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Brings an engine to the version that a peer serves. The weights go from engine to engine, rank by rank.

    The peer keeps generating. The engine switches only if the digests of what it copied equal the digest that the peer
    proved. Both must run the weightcast receiver, be of one kind and version, and serve one model with the same sizes.

    \b
    weightcast catch-up http://10.0.3.9:8000 --from http://10.0.3.7:8000
    weightcast catch-up http://10.0.3.9:8000 --from http://10.0.3.7:8000 --from http://10.0.3.8:8000
    """
    import typing

    from weightcast.errors import ConfigError
    from weightcast.update.peer_copy import copy_from_peer

    modes = typing.get_args(PauseChoice)
    if pause not in modes:
        raise ConfigError(f"--pause {pause} is unknown: choose one of {', '.join(modes)}")
    late, *givers = targets([url, *peer], api_key, ca_file=ca_file, cert_file=cert_file, key_file=key_file)
    done = copy_from_peer(late, givers, pause=typing.cast(PauseChoice, pause), timeout_s=timeout, attempts=attempts)
    if as_json:
        say_json(done)
        return
    for why in done.passed_over:
        say(f"passed over: {why}")
    if not done.chunks:
        say(f"{done.url} serves version {done.version} already, with the digest of {done.peer}")
    else:
        say(
            f"{done.url} serves version {done.version} from {done.peer}: {done.proven} tensors proven, "
            f"digest {done.digest}, {done.seconds:.2f} s, paused {done.stall_s:.3f} s"
        )
