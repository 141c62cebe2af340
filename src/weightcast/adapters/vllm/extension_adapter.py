"""Adapter of a vLLM server with our worker extension, for versions that have no weight transfer of their own.

``/collective_rpc`` runs a method of every worker and takes string arguments only.  The methods of
``plugins/vllm/worker_extension.py`` take the messages of ``wire.messages`` as text.  They load weights as vLLM's own
weight transfer does, so this engine can neither stage nor prove.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from weightcast.adapters.receiver_messages import announce_of
from weightcast.adapters.stock import check_encoders
from weightcast.adapters.vllm.base_adapter import BaseVllmAdapter
from weightcast.adapters.vllm.requests import post, succeeds
from weightcast.comm.run_steps import EngineRequest, Steps
from weightcast.comm.shared_buckets import Shared
from weightcast.protocols import Delivery, Invitation, Meeting, Sharing
from weightcast.wire.codec import encode
from weightcast.wire.layout import BucketLayout, Packing, TensorSpec
from weightcast.wire.messages import Leave, Message


class ExtensionAdapter(BaseVllmAdapter):
    """One vLLM server with ``--worker-extension-cls weightcast.plugins.vllm.worker_extension.Extension``."""

    packing = Packing(alignment_bytes=256, slices=False)
    sharing: Sharing = "weightcast"
    meeting: Meeting = "weightcast"

    def check(self, specs: Sequence[TensorSpec], *, delivery: Delivery, bucket_bytes: int) -> None:
        """As ``Adapter.check``: the extension reads what our receiver reads, in whole tensors."""
        check_encoders(self._info, specs)

    def join(self, invitation: Invitation) -> Steps:
        """Joins the group as our receiver does."""
        return self._apply(invitation.join)

    def bucket(self, session: str, layout: BucketLayout, *, group: str | None, shared: Sequence[Shared]) -> Steps:
        """Announces a bucket from a group or from shared memory."""
        self._mixed = True
        return self._apply(announce_of(session, layout, group=group, shared=shared))

    def leave(self, group: str | None) -> Steps:
        """Leaves the group, or unmaps buffers if ``group`` is None."""
        return self._apply(Leave(group=group))

    def _start_update(self) -> Generator[EngineRequest, bytes, None]:
        yield _call("weightcast_start")
        self._started = True

    def _finish_update(self, version: str) -> Generator[EngineRequest, bytes, None]:
        yield _call("weightcast_finish")
        self._started = False

    def _try_finish(self) -> Generator[EngineRequest, bytes, bool]:
        return succeeds(_call("weightcast_finish"))

    def _apply(self, message: Message) -> Steps:
        yield _call("weightcast_apply", encode(message).decode())
        return self._updating()


def _call(method: str, *arguments: str) -> EngineRequest:
    return post("/collective_rpc", {"method": method, "args": list(arguments)})
