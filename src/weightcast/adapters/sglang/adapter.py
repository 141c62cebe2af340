"""Adapter of an unpatched SGLang server.

SGLang cannot stage.  ``open`` pauses the engine and flushes its prefix cache.  Buckets go straight into its live
weights.  ``commit`` finalises, stamps the version and resumes.  An update that fails after a bucket leaves the engine
paused.

Servers with weight-update sessions (``/begin_weight_update``) want every bucket inside one; older ones answer 404.  The
adapter asks once and remembers the answer; it never concludes it from a version.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Sequence

import msgspec
import torch

from weightcast.adapters.flattened import FLATTENED, bucket_body, group_body
from weightcast.adapters.requests import NO_ROUTE, if_there
from weightcast.adapters.sglang.checksums import Checksums, compared, lacks_prefix, parsed
from weightcast.adapters.sglang.payload import bucket_payload
from weightcast.adapters.stock import TAKES_IMAGES, StockAdapter, check_encoders, prompt_logprobs
from weightcast.comm.pickle_writer import listing, pickled_base64
from weightcast.comm.run_steps import EngineRequest, Steps
from weightcast.comm.shared_buckets import Shared, memory_of_ranks
from weightcast.errors import ConfigError, TargetRejected, WireError
from weightcast.protocols import Delivery, Invitation, Sharing
from weightcast.wire.engine_info import EngineInfo
from weightcast.wire.layout import BucketLayout, Packing, TensorSpec
from weightcast.wire.messages import Commit, Open

KEEPS_DRAFT = "its draft model is not updated: answers stay right, and fewer of its tokens are accepted"
# SGLang's cache of encoded images, in MB, which it tells nobody.
_IMAGE_CACHE = "SGLANG_VLM_CACHE_SIZE_MB"
# After an abort the scheduler finishes one more batch before it is idle.
_SETTLE_S = 5.0
# An empty list of tensors; loading it changes nothing.
_NO_TENSORS = pickled_base64(listing([]))
_IN_SESSION = ("group", "memory")
# SGLang has no pause that waits for running requests: see `_wait_for_requests`.
_PAUSE_WORDS = {"abort": "abort", "retract": "retract", "in_place": "in_place", "wait": "retract"}


class SglangAdapter(StockAdapter):
    """One SGLang server during its updates."""

    packing = Packing(alignment_bytes=1, one_dtype=False, slices=False, gapless=True)
    sharing: Sharing = "torch"
    sees_change = True

    def __init__(self, info: EngineInfo) -> None:
        super().__init__(info)
        # By default SGLang loads an update into its draft model too, which is another model.
        self._selector = {"selector": "target"} if KEEPS_DRAFT in info.hazards else {}
        self._has_sessions: bool | None = None  # None until the server was asked
        self._has_checker: bool | None = None
        self._groups: set[str] = set()
        self._session_open = False
        self._buckets = 0
        self._pause = "abort"
        self._wants_checksum = False
        self._checksums = Checksums()
        self._sent: tuple[str, ...] = ()
        self._expects_change = False

    def check(self, specs: Sequence[TensorSpec], *, delivery: Delivery, bucket_bytes: int) -> None:
        """As ``Adapter.check``: refuses what SGLang would not take, or take without a word and serve wrongly."""
        self.delivery = delivery
        self._sent = tuple(spec.name for spec in specs)
        empty = [spec.name for spec in specs if spec.size_bytes == 0]
        if empty:
            raise ConfigError(
                f"{self.info.engine} takes no empty tensors: {', '.join(empty[:6])}; nothing was sent",
                hint="leave them out of the export",
            )
        check_encoders(self.info, specs)
        _check_image_cache(self.info)
        _check_fp8(self.info, specs, delivery=delivery)
        on_gpu = any(rank.device != "cpu" for rank in self.info.ranks)
        if delivery == "group" and on_gpu and "NCCL_CUMEM_ENABLE" not in os.environ:
            raise ConfigError(
                "NCCL_CUMEM_ENABLE is not set in the trainer, and SGLang sets it to 0 for itself: the rendezvous would "
                "never complete; nothing was sent",
                hint="export NCCL_CUMEM_ENABLE=0, or the server's own value, before the trainer starts",
            )

    # -- an update

    def open(self, message: Open) -> Steps:
        """Pauses, flushes the prefix cache and begins a session.

        Raises:
            TargetRejected: SGLang cannot flush the cache while this pause keeps requests.  No weights have changed.
        """
        self._buckets = 0
        self._session_open = False
        self._pause = message.pause
        self.version = message.version
        self._wants_checksum = message.verify in ("resident", "behaviour")
        if self._wants_checksum:
            self._checksums = yield from self._ask_checksums()
        if self.delivery == "folder":
            yield from self._wait_for_all_ranks()  # a server without this route fails before any weight changes
        yield from self._pause_and_flush()
        if self.delivery in _IN_SESSION:
            yield from self._begin_session()
        return self.updating(checksum=self._checksums.whole)

    def join(self, invitation: Invitation) -> Steps:
        """Joins a group; SGLang answers when every member has joined."""
        self._groups.add(invitation.join.group)
        yield _post("/init_weights_update_group", **group_body(invitation.join))
        return self.updating()

    def bucket(self, session: str, layout: BucketLayout, *, group: str | None, shared: Sequence[Shared]) -> Steps:
        """Sends a bucket from a group or from shared memory, without a flush of the prefix cache."""
        self._buckets += 1
        self.mixed = True
        if group is not None:
            yield _post(
                "/update_weights_from_distributed",
                **bucket_body(layout, group),
                flush_cache=False,
                **self._selector,
            )
        else:
            memories = memory_of_ranks(self.info, [item.torch for item in shared])
            yield _post(
                "/update_weights_from_tensor",
                serialized_named_tensors=[bucket_payload(layout, memory) for memory in memories],
                load_format=FLATTENED,
                flush_cache=False,
                **self._selector,
            )
        return self.updating()

    def handles(self, addresses: dict[str, str]) -> Steps:
        """As ``Adapter.handles``; SGLang wants no session here."""
        self._buckets += 1
        self.mixed = True
        yield _post("/update_weights_from_ipc", zmq_handles=addresses, flush_cache=False)
        return self.updating()

    def load_folder(self, session: str, folder: str) -> Steps:
        """Loads a checkpoint folder.  The server then reports the folder as its model path."""
        self._buckets += 1
        self.mixed = True
        yield _post("/update_weights_from_disk", model_path=folder, flush_cache=False)
        yield from self._wait_for_all_ranks()  # rank 0 alone has answered, and the caller deletes the folder next
        return self.updating()

    def expect_change(self, changed: bool) -> None:
        """As ``Adapter.expect_change``."""
        self._expects_change = changed

    def commit(self, message: Commit) -> Steps:
        """Finalises, reads the checksum, stamps the version and resumes.

        The prefix cache needs no second flush: a paused server computes nothing.

        Raises:
            WireError: The engine's weights have not changed, although the sent weights have or have other names.
        """
        if self._session_open:
            yield _post("/end_weight_update")
            self._session_open = False
        words = checksum = ""
        if self._wants_checksum:
            checksums = yield from self._ask_checksums()
            checksum = checksums.whole
            if checksum and checksum == self._checksums.whole:
                self._check_taken(checksums)
            if checksum:
                words = compared(self._checksums, checksums, ranks=self.info.tp_size, sent=self._sent)
        yield from if_there(_post("/update_weight_version", new_version=str(self.version), abort_all_requests=False))
        yield _post("/continue_generation", torch_empty_cache=False)
        kept = ("the draft model",) if self._selector else ()
        return self.committed(message=words, checksum=checksum, not_updated=kept)

    def abort(self, session: str, reason: str) -> Steps:
        """Resumes the engine if no bucket has changed its weights; otherwise it stays paused."""
        if self._session_open:
            self._session_open = False
            try:
                yield _post("/end_weight_update")
            except TargetRejected:
                if not self._buckets:
                    raise
        if not self.mixed:
            yield _post("/continue_generation", torch_empty_cache=False)
        return self.ended()

    def leave(self, group: str | None) -> Steps:
        """Leaves the group; SGLang unmaps shared buffers by itself after each bucket."""
        if group is not None and group in self._groups:
            self._groups.discard(group)
            try:
                yield _post("/destroy_weights_update_group", group_name=group)
            except TargetRejected as error:
                if error.status != 400:  # 400: the join never completed
                    raise
        return self.updating()

    def score(self, token_ids: Sequence[int]) -> Generator[EngineRequest, bytes, list[float]]:
        """Scores a prompt with ``/generate``, which has to generate one token; that token is dropped."""
        reply = yield _post(
            "/generate",
            input_ids=list(token_ids),
            sampling_params={"temperature": 0, "max_new_tokens": 1},
            return_logprob=True,
            logprob_start_len=0,
        )
        return prompt_logprobs(reply, token_ids, engine="SGLang")

    # -- parts of a step

    def _check_taken(self, checksums: Checksums) -> None:
        """Refuses weights that leave the engine's checksum as it was, unless they may be those that it has."""
        still = f"its own checksum over all ranks is still {checksums.whole[:16]}; the engine stays paused"
        if self._expects_change:
            raise WireError(
                f"SGLang took none of the new weights: {still}.  "
                "SGLang skips names that it does not know, with a line in its log"
            )
        names = lacks_prefix(checksums.tensors, self._sent)
        if names is not None:
            raise WireError(
                f"nothing shows that SGLang took the new weights: {still}.  It has no tensor {names[0]}, which was "
                f"sent; it has {names[1]}.  Export the whole model, with its head, or name its tensors with names="
            )

    def _pause_and_flush(self) -> Generator[EngineRequest, bytes, None]:
        if self._pause == "wait":
            yield from self._wait_for_requests()
        self.paused_at = time.monotonic()
        yield _post("/pause_generation", mode=_PAUSE_WORDS[self._pause])
        if self._no_prefix_cache:
            return
        settle = f"?timeout={_SETTLE_S:g}" if self._pause == "abort" else ""
        try:
            yield EngineRequest(path=f"/flush_cache{settle}")
        except TargetRejected as error:
            if error.status != 400:
                raise
            raise TargetRejected(
                f"{self.info.engine} does not flush its prefix cache with the requests that pause={self._pause!r} "
                f"keeps: {error}",
                url=error.url,
                hint='use pause="abort" (--pause abort), or start SGLang with --disable-radix-cache',
                status=error.status,
            ) from error

    @property
    def _no_prefix_cache(self) -> bool:
        """True if the server runs without a prefix cache; ``detect.describe`` then allows ``in_place``."""
        return "in_place" not in self.info.no_pause

    def _wait_for_requests(self) -> Generator[EngineRequest, bytes, None]:
        """Waits until running requests have ended, and holds back new ones meanwhile.

        An unpaused SGLang takes a writer lock to load tensors.  Running requests hold the lock as readers, and new
        requests queue behind the writer.  Loading an empty list is therefore answered when all requests have ended.
        Servers with weight-update sessions then refuse the load with 400, because no session is open.
        """
        try:
            yield _post(
                "/update_weights_from_tensor",
                serialized_named_tensors=[_NO_TENSORS] * self.info.tp_size,
                flush_cache=False,
            )
        except TargetRejected as error:
            if error.status != 400:
                raise

    def _wait_for_all_ranks(self) -> Generator[EngineRequest, bytes, None]:
        """Asks for a checksum, which every rank answers only after its earlier work."""
        if self.info.tp_size > 1:
            yield _post("/weights_checker", action="checksum")

    def _begin_session(self) -> Generator[EngineRequest, bytes, None]:
        if self._has_sessions is False:
            return
        try:
            yield _post("/begin_weight_update", **self._selector)
        except TargetRejected as error:
            if error.status in NO_ROUTE:
                self._has_sessions = False
                return
            if error.status != 400:
                raise
            # A dead trainer has left a session open; this update overwrites all of its weights.
            yield _post("/end_weight_update")
            yield _post("/begin_weight_update", **self._selector)
        self._has_sessions = True
        self._session_open = True

    def _ask_checksums(self) -> Generator[EngineRequest, bytes, Checksums]:
        """The server's own checksums over all ranks; empty if it has none."""
        if self._has_checker is False:
            return Checksums()
        try:
            reply = yield _post("/weights_checker", action="checksum", **self._selector)
        except TargetRejected as error:
            if error.status in NO_ROUTE:
                self._has_checker = False
            return Checksums()  # SGLang cannot hash some models; the update goes on without a checksum
        self._has_checker = True
        return parsed(reply, self.info.tp_size)


def _post(path: str, **body: object) -> EngineRequest:
    return EngineRequest(path=path, body=msgspec.json.encode(body))


def _check_image_cache(info: EngineInfo) -> None:
    if TAKES_IMAGES in info.hazards and os.environ.get(_IMAGE_CACHE) != "0":
        raise ConfigError(
            f"{info.engine} encodes images and may cache what its old vision tower made of them, and no flush reaches "
            "that cache; nothing was sent",
            hint=f"start SGLang with {_IMAGE_CACHE}=0, and set the same variable in the trainer to say so",
        )


def _check_fp8(info: EngineInfo, specs: Sequence[TensorSpec], *, delivery: Delivery) -> None:
    # Scales of a tensor, channel or group: after loading, SGLang transposes the weights and joins the scales of fused
    # ones.  No update undoes that, so a square matrix would be served transposed.
    offered = {spec.name for spec in specs}
    narrow = [spec.name for spec in specs if "float8" in spec.dtype]
    spoiled = [name for name in narrow if f"{name}_scale" in offered]
    if spoiled:
        raise ConfigError(
            f"{info.engine} changes fp8 weights with one scale for a tensor, channel or group after loading, and "
            f"cannot load them again: {', '.join(spoiled[:6])}; nothing was sent",
            hint="serve and send fp8 in blocks (Fp8Blocks), or bfloat16",
        )
    # Blocks: on Blackwell, DeepGEMM's scales have another form, which SGLang makes after loading from a folder only.
    # Up to Hopper they stay as they were loaded: seen with SGLang 0.5.17 on an H100, dense and with experts.  No answer
    # of the server names its GPU, but out of memory it is the trainer's.
    blocks = [name for name in narrow if f"{name}_scale_inv" in offered]
    if blocks and delivery != "folder" and not (delivery == "memory" and _gpu_keeps_scales()):
        raise ConfigError(
            f"{info.engine} may compute with another form of fp8 scales, which it makes only when it loads weights "
            f"from a folder, and does not say whether it does: {', '.join(blocks[:6])}; nothing was sent",
            hint='send a checkpoint by transport="disk", --via disk; on GPUs before Blackwell also by '
            'transport="ipc"; or serve and send bfloat16',
        )


def _gpu_keeps_scales() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() < (10, 0)
