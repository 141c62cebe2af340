"""Three steps of TRL's GRPOTrainer with rollouts from engines; runs in TRL's own environment, as a script.

    python tests/integrations/trl_run.py MODEL OUT URL ...

The last line that it prints is a JSON document for the test.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from weightcast.comm.http import Client
from weightcast.integrations.trl import GrpoEngines

GROUP, PROMPTS, STEPS = 4, 2, 3


class Meeting:
    """Lets no completion request go on before several are under way; fails if they come one by one."""

    def __init__(self, parties: int) -> None:
        self.barrier = threading.Barrier(parties, timeout=120)
        self.post = Client.post_json

    def install(self) -> None:
        meeting = self

        def post_json(client: Client, path: str, body: bytes, **settings: Any) -> bytes:
            if path == "/v1/completions":
                meeting.barrier.wait()
            return meeting.post(client, path, body, **settings)

        Client.post_json = post_json  # type: ignore[method-assign]


class Watched(GrpoEngines):
    """Compares each rollout with the trainer's own forward pass."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.gaps: list[float] = []
        self.lengths: list[int] = []

    def rollout(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        found = super().rollout(prompts, trainer)
        for prompt, tokens, logprobs in zip(
            found["prompt_ids"], found["completion_ids"], found["logprobs"], strict=True
        ):
            with torch.no_grad():
                logits = trainer.model(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0].float()
            own = logits[len(prompt) - 1 : -1].log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
            self.gaps.append(float((own - torch.tensor(logprobs)).abs().max()))
            self.lengths.append(len(tokens))
        return found


def distinct_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [len(set(tokens)) / 12 for tokens in completion_ids]


def main(model: str, out: str, *urls: str) -> None:
    torch.set_num_threads(1)
    Meeting(GROUP * PROMPTS).install()
    reports: list[dict[str, Any]] = []
    engines = Watched(
        urls,
        parallel=GROUP * PROMPTS,
        bucket_bytes="256KiB",
        on_report=lambda report: reports.append(json.loads(report.to_json())),
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = "<|end|>"
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=tokenizer,
        args=GRPOConfig(
            output_dir=out,
            use_vllm=False,
            use_cpu=True,
            bf16=False,
            max_steps=STEPS,
            num_generations=GROUP,
            per_device_train_batch_size=GROUP * PROMPTS,
            max_completion_length=12,
            learning_rate=1e-2,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        reward_funcs=distinct_tokens,
        train_dataset=Dataset.from_list(
            [{"prompt": [{"role": "user", "content": f"What is {number} plus two?"}]} for number in range(8)]
        ),
        rollout_func=engines.rollout,
        callbacks=[engines],
    )
    trainer.train()
    trainer.model.save_pretrained(Path(out) / "trained")
    print(
        json.dumps(
            {
                "trl": trl.__version__,
                "versions": [report["version"] for report in reports],
                "digests": [report["digest"] for report in reports],
                "gaps": engines.gaps,
                "lengths": engines.lengths,
                "rewards": [row["reward"] for row in trainer.state.log_history if "reward" in row],
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
