"""GRPO with a vision-language model: a tiny Qwen2-VL that learns to name the colour of an image, on CPU cores.

    python examples/rl_vision.py                                      # random model, one core, a minute
    python examples/rl_vision.py --steps 120 --export vl-model        # more steps, and a Hugging Face folder at the end

The rollout engine is a server of this program's own: transformers' model, a loop that samples, and weightcast's
receiver beside it.  So it also shows how to put the receiver into an engine that you wrote.  Each update carries the
vision tower and the language model, and returns when the engine has proved every tensor of both.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import threading
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import torch
import uvicorn
from fastapi import FastAPI
from transformers import AutoConfig, AutoModelForImageTextToText

from weightcast import WeightUpdater
from weightcast.comm.ipc import device_uuid, host_id
from weightcast.comm.ports import quiet_port
from weightcast.config import PauseMode
from weightcast.exporters.module import ModuleExporter
from weightcast.receiver import WeightReceiver
from weightcast.receiver.engine_state import EngineFacts
from weightcast.receiver.executor import LocalExecutor
from weightcast.receiver.server import weight_routes
from weightcast.receiver.session import SessionHandler
from weightcast.wire.answers import RankAck
from weightcast.wire.engine_info import RankInfo
from weightcast.wire.layout import TensorSpec
from weightcast.wire.messages import Message

# -- the task: an image of one colour and some noise, and the token that names the colour

PAD, END, VISION_START, IMAGE, VISION_END, QUESTION = range(6)
COLOURS = {6: (1.0, 0.0, 0.0), 7: (0.0, 1.0, 0.0), 8: (0.0, 0.0, 1.0), 9: (1.0, 1.0, 0.0)}  # by their tokens
PROMPT = [VISION_START, IMAGE, VISION_END, QUESTION]
LENGTH = 2  # the colour, and the end
PATCH, SIDE = 4, 2  # pixels of a patch, and patches of an image, in each direction


def image_of(colour: int, seed: int) -> torch.Tensor:
    """Returns the patches of an image as the model takes them: (patches, channels * 2 frames * pixels)."""
    noise = torch.randn(SIDE * SIDE, 3, 2 * PATCH * PATCH, generator=torch.Generator().manual_seed(seed))
    return (torch.tensor(COLOURS[colour])[None, :, None] + 0.3 * noise).flatten(1)


def reward_of(colour: int, tokens: Sequence[int]) -> float:
    """Rewards an answer: 0.8 for the colour, 0.2 for an answer that ends after it."""
    return 0.8 * (tokens[0] == colour) + 0.2 * (tokens[1] == END)


def tiny_model(seed: int) -> Any:
    torch.manual_seed(seed)
    text = {
        "vocab_size": 16,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 4]},
        "bos_token_id": PAD,
        "eos_token_id": END,
        "pad_token_id": PAD,
    }
    vision = {"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 48, "patch_size": PATCH, "mlp_ratio": 2}
    config = AutoConfig.for_model(
        "qwen2_vl",
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=False,
    )
    return AutoModelForImageTextToText.from_config(config, dtype=torch.float32)


def logits_of(model: Any, images: Sequence[torch.Tensor], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
    """Returns the logits that predict each token after the prompt, and one more: (images, tokens + 1, vocabulary)."""
    ids = torch.tensor([[*PROMPT, *row] for row in tokens])
    logits = model(
        input_ids=ids,
        mm_token_type_ids=(ids == IMAGE).long(),
        pixel_values=torch.cat(list(images)),
        image_grid_thw=torch.tensor([[1, SIDE, SIDE]] * len(images)),
        use_cache=False,
    ).logits
    logits = logits[:, len(PROMPT) - 1 :].float()
    logits[..., [PAD, VISION_START, IMAGE, VISION_END]] = -torch.inf  # no answer has them
    return logits


# -- the engine: a process of its own


class Engine:
    """Samples answers, and takes part in weight updates: one rank, and the hooks that weightcast calls."""

    def __init__(self) -> None:
        self.model = tiny_model(seed=1).eval().requires_grad_(False)  # other weights than the trainer's
        self.version = 0
        self.paused = False
        self.sampling = threading.Lock()
        self.go = threading.Event()
        self.go.set()
        self.kept = self.model.state_dict()
        self.receiver = WeightReceiver(self.model, load_weights=self.load_weights)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        with torch.no_grad():
            for name, tensor in weights:
                self.kept[name].copy_(tensor)

    @torch.inference_mode()
    def sample(self, colour: int, image_seed: int, count: int, seed: int) -> dict[str, Any]:
        """Answers one image several times."""
        image, generator = image_of(colour, image_seed), torch.Generator().manual_seed(seed)
        tokens: list[list[int]] = [[] for _ in range(count)]
        logprobs: list[list[float]] = [[] for _ in range(count)]
        with self.not_paused():
            for _ in range(LENGTH):
                scores = logits_of(self.model, [image] * count, tokens)[:, -1].log_softmax(-1)
                drawn = torch.multinomial(scores.exp(), 1, generator=generator)
                for row, (token, score) in enumerate(zip(drawn[:, 0], scores.gather(1, drawn)[:, 0], strict=True)):
                    tokens[row].append(int(token))
                    logprobs[row].append(float(score))
            return {"tokens": tokens, "logprobs": logprobs, "version": self.version}

    @contextmanager
    def not_paused(self) -> Any:
        while True:
            self.go.wait()
            with self.sampling:
                if not self.paused:
                    yield
                    return

    # What weightcast calls: on the rank ...

    def apply(self, message: Message) -> RankAck:
        return self.receiver.apply(message)

    def run(self, command: bytes) -> bytes:
        raise ValueError(f"unknown command {command!r}")

    def interrupt(self, reason: str) -> None:
        self.receiver.interrupt(reason)

    def close(self) -> None:
        self.receiver.close()

    # ... and around an update.

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        """Holds new requests back and lets the running one finish; there is never more than one, and it is short."""
        self.go.clear()
        self.paused = True
        if not self.sampling.acquire(timeout=timeout_s):
            raise TimeoutError(f"a request was still running after {timeout_s:g} s")
        self.sampling.release()

    def stop_waiting(self) -> None: ...

    def resume(self) -> None:
        self.paused = False
        self.go.set()

    def drop_caches(self) -> None: ...

    def set_version(self, version: int) -> None:
        self.version = version


def serve(port: int, ready: Connection) -> None:
    torch.set_num_threads(1)
    engine = Engine()
    executor = LocalExecutor(engine)
    [pid] = executor.pids()
    facts = EngineFacts(
        engine="rl_vision 1",
        model="tiny Qwen2-VL",
        host_id=host_id(),
        ranks=(RankInfo(rank=0, pid=pid, device=device_uuid(torch.device("cpu"))),),
        staging="device",
        transports=("ipc", "broadcast"),
        specs=tuple(TensorSpec.of(name, tensor) for name, tensor in engine.kept.items()),
    )

    @asynccontextmanager
    async def say_ready(app: FastAPI) -> AsyncGenerator[None]:
        ready.send("ready")
        yield

    app = FastAPI(lifespan=say_ready)
    app.include_router(weight_routes(SessionHandler(executor, engine, facts)))

    @app.post("/sample")
    def sample(body: dict[str, int]) -> dict[str, Any]:
        return engine.sample(**body)

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


# -- training


def step(model: Any, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> tuple[float, float]:
    """Runs one optimiser step of GRPO; returns the loss and the largest gap to the engine's log-probabilities."""
    images = [image for group in groups for image in [group["image"]] * len(group["tokens"])]
    tokens = [row for group in groups for row in group["tokens"]]
    rewards = torch.tensor([group["rewards"] for group in groups])
    advantage = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True, correction=0) + 1e-4)
    behaviour = torch.tensor([row for group in groups for row in group["logprobs"]])
    scores = logits_of(model, images, tokens)[:, :-1].log_softmax(-1)
    logprobs = scores.gather(-1, torch.tensor(tokens)[..., None])[..., 0]
    ratio, weight = torch.exp(logprobs - behaviour), advantage.flatten()[:, None]
    loss = -torch.minimum(ratio * weight, ratio.clamp(0.8, 1.28) * weight).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), float((logprobs.detach() - behaviour).abs().max())


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    model = tiny_model(seed=args.seed + 2).train()
    first = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    context = multiprocessing.get_context("spawn")
    port, (ours, theirs) = quiet_port(), context.Pipe(duplex=False)
    engine = context.Process(target=serve, args=(port, theirs), daemon=True)
    engine.start()
    theirs.close()
    ours.recv()  # fails if the engine ends before it serves
    url = f"http://127.0.0.1:{port}"
    # The engine has transformers' own model, so the names are those of its parameters and not those of a checkpoint.
    exporter = ModuleExporter(model, family="plain")
    with (
        httpx.Client(timeout=300, trust_env=False) as client,
        WeightUpdater.connect(
            exporter, url, transport=args.via, verify=args.verify, pause=args.pause, bucket_bytes=args.bucket_bytes
        ) as updater,
    ):
        updater.update(version=0)
        print("step  version  reward    loss  gap     update s  digest")
        for number in range(1, args.steps + 1):
            groups: list[dict[str, Any]] = []
            for prompt in range(args.prompts):
                seed = (args.seed << 32) + number * args.prompts + prompt
                colour = list(COLOURS)[seed % len(COLOURS)]
                body = {"colour": colour, "image_seed": seed, "count": args.group, "seed": seed}
                group = client.post(f"{url}/sample", json=body).raise_for_status().json()
                assert group["version"] == number - 1  # no answer was sampled with other weights
                rewards = [reward_of(colour, tokens) for tokens in group["tokens"]]
                groups.append({**group, "image": image_of(colour, seed), "rewards": rewards})
            loss, gap = step(model, optimizer, groups)
            report = updater.update(version=number)
            reward = sum(sum(group["rewards"]) for group in groups) / (args.prompts * args.group)
            record = {"step": number, "version": report.version, "reward": reward, "loss": loss, "logprob_gap": gap}
            record |= {"update_s": report.seconds, "digest": report.digest, "proof": report.targets[0].proof}
            with (out / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
            print(
                f"{number:4d}  {report.version:7d}  {reward:6.3f}  {loss:6.3f}  {gap:6.4f}  {report.seconds:8.2f}  "
                f"{report.digest}, {record['proof']}",
                flush=True,
            )
    engine.terminate()
    engine.join()
    changed = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, first[name])]
    moved = {name.removeprefix("model.").partition(".")[0] for name in changed}
    print(f"parts of the model that training has changed: {', '.join(sorted(moved))}")
    if args.export:
        model.save_pretrained(args.export)
        print(f"exported to {args.export}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60, help="training steps")
    parser.add_argument("--prompts", type=int, default=8, help="images in one step")
    parser.add_argument("--group", type=int, default=8, help="answers to each image")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="seed of the model, the images and the samples")
    parser.add_argument("--via", choices=("auto", "ipc", "broadcast"), default="ipc", help="transport")
    parser.add_argument("--verify", choices=("none", "received", "resident"), default="resident", help="proof to reach")
    parser.add_argument(
        "--pause",
        choices=("wait",),
        default="wait",
        help="fate of requests at the switch: this engine lets them finish",
    )
    parser.add_argument("--bucket-bytes", default="64KiB", help="size of one bucket")
    parser.add_argument("--out", default="rl-vision", help="folder for metrics")
    parser.add_argument("--export", default="", help="Hugging Face folder for the model at the end; empty: none")
    return parser.parse_args()


if __name__ == "__main__":
    main()
