"""The secret that all processes of one engine share if its ranks are on several hosts."""

from __future__ import annotations

import os
from pathlib import Path

from weightcast.comm.authenticated import Secret
from weightcast.errors import ConfigError

SET_A_SECRET = (
    "set WEIGHTCAST_ENGINE_SECRET to the same random value on every host of this engine, or name a file that has it: "
    '--additional-config \'{"weightcast": {"secret_file": "PATH"}}\'; make one with: openssl rand -hex 32'
)


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
