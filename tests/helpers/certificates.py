"""Certificates made on the spot: authorities, servers, trainers, good ones and bad ones."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    """A certificate with its key in one PEM file."""

    pem: str


class Authority:
    """Signs; ``pem`` is the file that others trust it by."""

    def __init__(self, folder: Path, name: str) -> None:
        self._ca = trustme.CA(organization_name=name)
        self._folder, self._name, self._count = folder, name, 0
        self.pem = str(folder / f"{name}.ca.pem")
        self._ca.cert_pem.write_to_path(self.pem)

    def issue(self, *hosts: str, expired: bool = False) -> Paper:
        """A certificate for hosts (or a client's name), of yesterday if ``expired``."""
        moment = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
        made = self._ca.issue_cert(*hosts, not_before=moment, not_after=moment if expired else None)
        self._count += 1
        path = self._folder / f"{self._name}.{self._count}.pem"
        made.private_key_and_cert_chain_pem.write_to_path(path)
        return Paper(pem=str(path))
