"""A trainer for measurements with real engines: one process for each rank, and what each of them is told.

With several ranks the model is sharded by FSDP2, rank r on GPU r; one rank keeps it whole.  The weights are random, one
set for each seed and number of ranks.  ``checkpoint`` writes a folder that an engine starts on, in no time: almost all
of its weights are holes of the file, so the first update has to come before the first answer means anything.

The engines' own senders run in the same processes on the same shards: ``send_by_vllm`` is vLLM's packed ``ipc``,
``send_by_vllm_nccl`` its packed broadcast to another GPU, and ``send_by_sglang`` are SGLang's flattened buckets.  Each
rank makes each tensor whole and hands it out on its own GPU.
"""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import os
import struct
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.buckets import buckets_of
from torch import nn

from weightcast import WeightUpdater
from weightcast.comm.nccl import settings_here
from weightcast.comm.ports import quiet_port
from weightcast.exporters.module import ModuleExporter
from weightcast.exporters.quantise import Fp8Blocks

PATIENCE_S = 120.0
_BUCKET_BYTES = 512 << 20  # SGLang's; frameworks use 512 MiB
_FILLED = 4096  # weights of each tensor of a checkpoint that are no holes


def empty_model(family: str, sizes: dict[str, Any], dtype: torch.dtype) -> Any:
    """A transformers model without memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes), dtype=dtype).eval()


def in_files(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """One parameter under the names of checkpoints, in which every expert has tensors of its own."""
    stem, _, last = name.rpartition(".")
    if last == "gate_up_proj":
        for number, both in enumerate(tensor):
            for part, half in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                yield f"{stem}.{number}.{part}.weight", half
    elif last == "down_proj":
        for number, one in enumerate(tensor):
            yield f"{stem}.{number}.{last}.weight", one
    else:
        yield name, tensor


def checkpoint(folder: Path, family: str, sizes: dict[str, Any], dtype: torch.dtype) -> int:
    """Writes a folder that an engine can start on; returns the bytes of the weights."""
    model = empty_model(family, sizes, dtype)
    folder.mkdir(parents=True)
    model.config.architectures = [type(model).__name__]
    model.config.dtype = dtype
    model.config.save_pretrained(folder)
    _save_tokenizer(folder, model.config.vocab_size)
    named = [each for name, tensor in model.named_parameters() for each in in_files(name, tensor)]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in named:
        word = {torch.bfloat16: "BF16", torch.float32: "F32"}[dtype]
        header[name] = {"dtype": word, "shape": [*tensor.shape], "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for name, tensor in named:
            file.seek(8 + len(head) + header[name]["data_offsets"][0])
            some = torch.randn(min(tensor.numel(), _FILLED)).mul_(0.05).to(dtype)
            file.write(some.view(torch.uint8).numpy().tobytes())
        file.truncate(8 + len(head) + end)
    return end


def _save_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level tokenizer whose ids are all valid; prompts are token ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {"<s>": 0, "</s>": 1} | {letter: 2 + number for number, letter in enumerate(letters)}
    words |= {f"<{number}>": number for number in range(len(words), vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)


class Warnings(logging.Handler):
    """Keeps warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


class Rank:
    """One rank of the trainer."""

    def __init__(self, rank: int, world: int, family: str, sizes: dict[str, Any], device: str) -> None:
        self.rank, self.world = rank, world
        self.device = torch.device("cuda", rank) if device == "cuda" else torch.device("cpu")
        self._updaters: dict[str, WeightUpdater] = {}
        self._warnings = Warnings()
        logging.getLogger("weightcast").addHandler(self._warnings)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        model = empty_model(family, sizes, dtype)
        if world > 1:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh(device, (world,))
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        self.model: Any = model.to_empty(device=self.device)
        self.model.tie_weights()  # which ``to_empty`` has undone
        with self.device:  # buffers are computed, not loaded
            self.model.model.rotary_emb = type(self.model.model.rotary_emb)(config=self.model.config)
        self._std = 0.05 if device == "cuda" else 0.3
        self.fill(0)

    @torch.no_grad()
    def fill(self, seed: int) -> None:
        """Puts the weights of a seed into the shards of this rank."""
        for number, (name, parameter) in enumerate(self.model.named_parameters()):
            local = _local(parameter)
            key = (1000 * seed + number) * 64 + self.rank
            generator = torch.Generator(self.device).manual_seed(key)
            if name.endswith("norm.weight"):
                local.uniform_(0.8, 1.2, generator=generator)
            else:
                local.normal_(0.0, self._std, generator=generator)
        self._together()

    def held_bytes(self) -> int:
        """Bytes of this rank's shards."""
        return sum(_local(parameter).nbytes for parameter in self.model.parameters())

    def connect(
        self, key: str, urls: Sequence[str], options: dict[str, Any], in_blocks: bool = False
    ) -> dict[str, Any]:
        """Connects under a key; returns the seconds, the transport that was chosen, and NCCL's version.

        With ``in_blocks`` the weights are quantised on the way, to fp8 in blocks.
        """
        began = time.monotonic()
        sent: Any = ModuleExporter(self.model, quantise=Fp8Blocks()) if in_blocks else self.model
        self._updaters[key] = updater = WeightUpdater.connect(sent, list(urls), timeout_s=60.0, **options)
        took = round(time.monotonic() - began, 3)
        nccl = settings_here(self.device)
        return {"seconds": took, "transport": updater.transport, "nccl": str(nccl)}

    def warnings(self) -> list[str]:
        """The warnings that weightcast has logged since the last call."""
        said, self._warnings.said = self._warnings.said, []
        return said

    def update(self, key: str, version: int, seed: int, trace: Path | None = None) -> dict[str, Any]:
        """New weights, and one update; times are in seconds of the clock that all processes share.

        The first rank writes a trace of the update into the file ``trace``.
        """
        trains = time.monotonic()
        self.fill(seed)
        began = time.monotonic()
        report = self._updaters[key].update(version=version)
        ended = time.monotonic()
        if trace is not None and self.rank == 0:
            report.to_perfetto(trace)
        found: dict[str, Any] = {"trains": trains, "began": began, "ended": ended}
        found |= {"transport": report.transport, "bytes": report.bytes}
        found["phases"] = {name: round(seconds, 5) for name, seconds in report.phases.items()}
        found["trainer_peak_bytes"] = report.peak_extra_bytes
        found["targets"] = [
            {
                "proof": row.proof,
                "stall_s": round(row.stall_s, 5),
                "engine_peak_bytes": row.peak_extra_bytes,
                "transport": row.transport,
                "ranks": row.ranks,
                "message": row.message,
            }
            for row in report.targets
        ]
        return found

    def disconnect(self, key: str) -> None:
        """Ends the connection of a key."""
        self._updaters.pop(key).close()

    @torch.no_grad()
    def score(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> float:
        """By how many nats answers are worse than this model's best tokens, on average."""
        worse: list[float] = []
        for prompt, answer in zip(prompts, answers, strict=True):
            ids = torch.tensor([[*prompt, *answer[:-1]]], device=self.device)
            logits = self.model(ids).logits[0, len(prompt) - 1 :].float()
            chosen = logits.gather(1, torch.tensor(answer, device=self.device)[:, None])[:, 0]
            worse += (logits.max(-1).values - chosen).tolist()
        for module in self.model.modules():
            if self.world > 1 and hasattr(module, "reshard"):
                module.reshard()
        return sum(worse) / len(worse)

    def whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor, made whole on every rank, under the names of checkpoints."""
        for name, parameter in self.model.named_parameters():
            tensor = parameter.full_tensor() if self.world > 1 else parameter
            yield from in_files(name, tensor.detach())

    def import_vllm(self, site: str) -> None:
        """Imports what ``send_by_vllm`` needs from a folder; this Python's own packages go first."""
        sys.path.append(site)
        from vllm.distributed.weight_transfer import (  # pyright: ignore[reportMissingImports]
            ipc_engine,
            nccl_engine,
        )

        self._vllm, self._vllm_nccl = ipc_engine, nccl_engine

    def send_by_vllm(self, url: str, seeds: Sequence[int], gap_s: float) -> list[dict[str, float]]:
        """vLLM's own sequence for each seed: pause, start, packed buffers, finish, resume."""
        # vLLM packs whole tensors, so its buffer must have room for the largest one.
        largest = max(parameter.nbytes for name, parameter in self.model.named_parameters() if "experts" not in name)
        arguments = self._vllm.IPCTrainerSendWeightsArgs(
            send_mode="http", url=url, packed=True, packed_buffer_size_bytes=max(1 << 30, largest)
        )
        self._post(url, "/init_weight_transfer_engine", {"init_info": {}})

        def send() -> None:
            self._post(url, "/start_weight_update", {})
            self._vllm.IPCWeightTransferEngine.trainer_send_weights(self.whole(), arguments)
            self._post(url, "/finish_weight_update")

        return self._rounds(url, seeds, gap_s, pause="/pause?mode=keep", send=send, resume="/resume")

    def send_by_vllm_nccl(self, url: str, seeds: Sequence[int], gap_s: float) -> list[dict[str, float]]:
        """The same sequence into a server of one rank on another GPU: vLLM's packed broadcast."""
        address = {"master_address": "127.0.0.1", "master_port": quiet_port(), "world_size": 2}
        tensors = [*self.whole()]
        told = {
            "names": [name for name, _ in tensors],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
            "shapes": [list(tensor.shape) for _, tensor in tensors],
            "packed": True,
        }
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(
                self._post, url, "/init_weight_transfer_engine", {"init_info": {**address, "rank_offset": 1}}
            )
            arguments = self._vllm_nccl.NCCLTrainerSendWeightsArgs(
                group=self._vllm_nccl.NCCLWeightTransferEngine.trainer_init(address), packed=True
            )
            joined.result()

            def send() -> None:
                self._post(url, "/start_weight_update", {})
                received = pool.submit(self._post, url, "/update_weights", {"update_info": told})
                self._vllm_nccl.NCCLWeightTransferEngine.trainer_send_weights(self.whole(), arguments)
                received.result()
                self._sync()
                self._post(url, "/finish_weight_update")

            return self._rounds(url, seeds, gap_s, pause="/pause?mode=keep", send=send, resume="/resume")

    def import_sglang(self, site: str) -> None:
        """Imports what ``send_by_sglang`` needs from a folder; this Python's own packages go first."""
        sys.path.append(site)
        from sglang.srt import utils  # pyright: ignore[reportMissingImports]
        from sglang.srt.utils import patch_torch  # pyright: ignore[reportMissingImports]
        from sglang.srt.weight_sync import tensor_bucket  # pyright: ignore[reportMissingImports]

        self._serializer, self._bucket = utils.MultiprocessingSerializer, tensor_bucket.FlattenedTensorBucket
        self._patch = patch_torch.monkey_patch_torch_reductions

    def send_by_sglang(self, url: str, seeds: Sequence[int], gap_s: float) -> list[dict[str, float]]:
        """SGLang's own sequence for each seed: pause, flush, flattened buckets, continue."""
        if self.device.type == "cuda":  # it rewrites what names a GPU
            self._patch()
        else:  # file descriptors go to relatives of this process only
            torch.multiprocessing.set_sharing_strategy("file_system")

        def send() -> None:
            self._post(url, "/flush_cache", {})
            self._post(url, "/begin_weight_update", {}, may_lack=True)
            for named in buckets_of(self.whole(), _BUCKET_BYTES):
                bucket = self._bucket(named_tensors=named)
                content = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
                mine = self._serializer.serialize(content, output_str=True)
                self._sync()
                payloads: list[Any] = [None] * self.world
                if self.world > 1:
                    dist.all_gather_object(payloads, mine)
                else:
                    payloads = [mine]
                body = {"serialized_named_tensors": payloads, "load_format": "flattened_bucket", "flush_cache": False}
                self._post(url, "/update_weights_from_tensor", body)
                self._barrier()
            self._post(url, "/end_weight_update", {}, may_lack=True)

        body = {"mode": "retract"}  # the cache can be flushed
        return self._rounds(
            url, seeds, gap_s, pause="/pause_generation", send=send, resume="/continue_generation", body=body
        )

    def _rounds(
        self, url: str, seeds: Sequence[int], gap_s: float, *, pause: str, send: Any, resume: str, body: Any = None
    ) -> list[dict[str, float]]:
        """Plays one round for each seed; returns when each began, was paused, had all weights, and ended."""
        found: list[dict[str, float]] = []
        for seed in seeds:
            self.fill(seed)
            time.sleep(gap_s)
            self._barrier()
            times = {"began": time.monotonic()}
            self._post(url, pause, body)
            self._barrier()
            times["paused"] = time.monotonic()
            send()
            self._barrier()
            times["sent"] = time.monotonic()
            self._post(url, resume, {} if body else None)
            times["ended"] = time.monotonic()
            found.append(times)
        return found

    def _post(self, url: str, path: str, body: Any = None, *, may_lack: bool = False) -> None:
        """Posts on the first rank; the others do nothing.  Some versions lack a route."""
        import httpx

        if self.rank == 0:
            answer = httpx.post(url + path, json=body, timeout=60, trust_env=False)
            if answer.status_code != 200 and not (may_lack and answer.status_code in (404, 405)):
                raise RuntimeError(f"{path}: {answer.status_code} {answer.text[:2000]}")

    def _sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def _together(self) -> None:
        self._sync()
        self._barrier()

    def close(self) -> None:
        """Ends all connections."""
        for key in [*self._updaters]:
            self.disconnect(key)


def _local(parameter: nn.Parameter) -> torch.Tensor:
    """This rank's part of a parameter."""
    held: Any = parameter.data
    return held.to_local() if hasattr(held, "to_local") else held


class Trainer:
    """All ranks, seen from the measuring process."""

    def __init__(self, world: int, family: str, sizes: dict[str, Any], device: str) -> None:
        context = multiprocessing.get_context("spawn")
        port = quiet_port()
        self.world = world
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        self._owed = True  # the answer to their start
        for rank in range(world):
            ours, theirs = context.Pipe()
            arguments = (rank, world, port, family, sizes, device, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def call(self, method: str, *arguments: Any, timeout_s: float = PATIENCE_S) -> list[Any]:
        """Calls a method of every rank at the same time; returns their answers in order.

        Raises:
            RuntimeError: A rank raised, ended, or did not answer in time; with its words.
        """
        self.start(method, *arguments)
        return self.answers(timeout_s)

    def start(self, method: str, *arguments: Any) -> None:
        """Tells every rank to call a method; ``answers`` waits for it."""
        if self._owed:
            self.answers()
        for pipe in self._pipes:
            pipe.send((method, arguments))
        self._owed = True

    def answers(self, timeout_s: float = PATIENCE_S) -> list[Any]:
        """Waits for what ``start`` began."""
        self._owed = False
        deadline = time.monotonic() + timeout_s
        found: list[tuple[bool, Any]] = []
        for pipe in self._pipes:
            if not pipe.poll(max(deadline - time.monotonic(), 0.1)):
                found.append((False, f"no answer within {timeout_s:g} s"))
                continue
            try:
                found.append(pipe.recv())
            except EOFError:
                found.append((False, "it has ended"))
        wrong = [f"trainer rank {rank}: {value}" for rank, (ok, value) in enumerate(found) if not ok]
        if wrong:
            raise RuntimeError("\n".join(wrong)[-6000:])
        return [value for _, value in found]

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10.0)


def _serve(rank: int, world: int, port: int, family: str, sizes: dict[str, Any], device: str, pipe: Any) -> None:
    """Runs one rank until its pipe is closed."""
    torch.set_num_threads(1 if device == "cpu" else max(1, math.ceil((os.cpu_count() or 1) / 8)))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if device == "cuda":
        torch.cuda.set_device(rank)
    found: Any = None
    name, arguments = "the start", ()
    while True:
        try:
            if found is None:
                if world > 1:
                    dist.init_process_group("nccl" if device == "cuda" else "gloo", rank=rank, world_size=world)
                found = Rank(rank, world, family, sizes, device)
                value = None
            else:
                value = getattr(found, name)(*arguments)
            pipe.send((True, value))
        except Exception:  # noqa: BLE001  the measuring process decides what goes on
            pipe.send((False, f"{name}: {traceback.format_exc()[-3000:]}"))
            if found is None:
                return
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
