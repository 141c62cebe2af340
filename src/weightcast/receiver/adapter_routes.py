"""The HTTP routes of an engine's LoRA adapters: a trainer asks for a place, and then updates it like a model.

Below ``/weightcast/adapters/NAME`` an adapter has the routes that the engine has for its model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from fastapi import APIRouter, Depends, HTTPException, Request, Response

from weightcast.errors import WireError
from weightcast.receiver.api_keys import Guard
from weightcast.receiver.server import (
    NOT_FOR_YOU,
    Answers,
    Late,
    carried_out,
    read_body,
    refusal,
    weight_routes,
)
from weightcast.wire.adapters import ADAPTERS, MAX_REQUEST_BYTES, AdapterRequest, adapter_path, decode_adapter_request
from weightcast.wire.engine_info import EngineInfo


class LoraAdapter(Answers, Protocol):
    """One adapter."""

    def score(self, token_ids: Sequence[int]) -> Sequence[float]:
        """Log-probability of each token but the first, given those before it, with the adapter."""
        ...


class TakesAdapters(Protocol):
    """The adapters of one engine."""

    def register(self, request: AdapterRequest) -> EngineInfo:
        """Gives an adapter a place, unless it has one; raises ``Refused`` if it cannot."""
        ...

    def drop(self, name: str) -> bool:
        """Takes an adapter out; False if there is none of this name."""
        ...

    def find(self, name: str) -> LoraAdapter | None:
        """The adapter with this name."""
        ...

    def names(self) -> Sequence[str]:
        """Names of all adapters."""
        ...


def adapter_routes(
    adapters: Callable[[], TakesAdapters], attach: Callable[[APIRouter, str], None], *, guard: Guard | None = None
) -> APIRouter:
    """Returns the routes.

    Args:
        attach: Function that adds the routes of one adapter to the server, below a path.
        guard: As for ``weight_routes``.
    """
    router = APIRouter(tags=["adapters"], dependencies=[Depends((guard or Guard()).check)], responses=NOT_FOR_YOU)
    attached: set[str] = set()

    def register(request: AdapterRequest) -> EngineInfo:
        info = adapters().register(request)
        if request.name not in attached:
            attached.add(request.name)
            late = _Late(adapters, request.name)
            attach(weight_routes(late, score=late.score, guard=guard), adapter_path(request.name))
        return info

    @router.post(ADAPTERS, summary="Give a LoRA adapter a place", response_class=Response)
    async def register_(request: Request) -> Response:
        body = await read_body(request, MAX_REQUEST_BYTES)
        if isinstance(body, Response):
            return body
        try:
            wanted = decode_adapter_request(body)
        except WireError as error:
            return refusal(400, str(error))
        return await carried_out(lambda: register(wanted))

    @router.get(ADAPTERS, summary="The descriptions of all LoRA adapters, without their tensors")
    async def list_() -> list[dict[str, object]]:
        found = (adapters().find(name) for name in adapters().names())
        return [
            {"name": info.model, "version": info.version, "digest": info.digest, "state": info.state}
            for info in (adapter.info() for adapter in found if adapter is not None)
        ]

    @router.delete(ADAPTERS + "/{name}", summary="Take a LoRA adapter out", response_class=Response)
    async def drop_(name: str) -> Response:
        def drop() -> Response:
            there = adapters().drop(name)
            return Response(status_code=204) if there else refusal(404, f"there is no adapter {name}")

        return await carried_out(drop)

    return router


class _Late(Late):
    """The adapter that has a name now: routes stay when an adapter is taken out."""

    def __init__(self, adapters: Callable[[], TakesAdapters], name: str) -> None:
        super().__init__(self._find)
        self._adapters = adapters
        self._name = name

    def holds(self, session: str) -> bool:
        """As ``Answers.holds``; an adapter that was taken out holds none."""
        adapter = self._adapters().find(self._name)
        return adapter is not None and adapter.holds(session)

    def score(self, token_ids: Sequence[int]) -> Sequence[float]:
        """As ``LoraAdapter.score``."""
        return self._find().score(token_ids)

    def _find(self) -> LoraAdapter:
        adapter = self._adapters().find(self._name)
        if adapter is None:
            raise HTTPException(404, f"there is no adapter {self._name}")
        return adapter
