"""Exporters that other packages make for models of their own."""

from __future__ import annotations

from typing import Protocol

import torch

from weightcast.errors import ConfigError
from weightcast.protocols import Exporter
from weightcast.runtime.entry_points import EXPORTERS, EntryPoints

_METHODS = ("claims", "exporter")


class ModelKind(Protocol):
    """One kind of model, behind an entry point of the group ``weightcast.exporters``.

    ``connect`` asks about an object that is no module, mapping, path or exporter.  Every trainer rank has the same
    packages, and gets the same answers.
    """

    def claims(self, model: object) -> bool:
        """True if this is a model of this kind."""
        ...

    def exporter(self, model: object, wire_dtype: torch.dtype | None) -> Exporter:
        """Makes an exporter, whose floats are cast to ``wire_dtype``; None for no cast.

        The updater calls the exporter's ``close()`` when it closes, if the exporter has this method.
        """
        ...


def _model_kind(name: str, loaded: object) -> ModelKind:
    """Returns what an entry point names, made if it is a class; raises TypeError if it has not the methods."""
    made = loaded() if isinstance(loaded, type) else loaded
    missing = [method for method in _METHODS if not callable(getattr(made, method, None))]
    if missing:
        raise TypeError(f"{name} has no method {missing[0]}()")
    return made  # type: ignore[return-value]


OTHERS = EntryPoints(EXPORTERS, _model_kind)


def claimed(model: object, wire_dtype: torch.dtype | None) -> Exporter | None:
    """An exporter for a model of another package; None if no package claims it, ConfigError if several do."""
    claims = [found for found in OTHERS.load() if found.made is not None and found.made.claims(model)]
    if len(claims) > 1:
        raise ConfigError(
            f"several packages claim a model of type {type(model).__name__}: "
            f"{', '.join(f'{found.name} of {found.package}' for found in claims)}",
            hint="pass an exporter, or uninstall all but one of these packages",
        )
    kind = claims[0].made if claims else None
    if kind is None:
        return None
    exporter = kind.exporter(model, wire_dtype)
    if not isinstance(exporter, Exporter):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"{type(exporter).__name__}, which {claims[0].name} of {claims[0].package} makes of a model of type "
            f"{type(model).__name__}, is no exporter",
            hint=f"let its class derive from weightcast.protocols.Exporter, in {claims[0].package}",
        )
    return exporter
