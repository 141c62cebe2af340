"""A trainer that updates vLLM through vLLM's own trainer-side factory; runs in vLLM's environment, as a script.

    python tests/integrations/vllm_run.py MODEL ... URL

It sends each model folder in turn.  The last line that it prints is a JSON document for the test.
"""

from __future__ import annotations

import json
import sys

import torch
import vllm
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from weightcast.integrations.vllm_trainer import WeightcastTrainerInitInfo


def main(*arguments: str) -> None:
    *folders, url = arguments
    torch.set_num_threads(1)
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders]
    trained = models[0]
    engine = WeightTransferTrainerFactory.trainer_init(
        WeightcastTrainerInitInfo(rank=0, options={"bucket_bytes": "256KiB"}),
        client=HTTPVLLMWeightSyncClient(url),
        source=ModuleSource(trained),
    )
    reports = []
    for model in models:
        trained.load_state_dict(model.state_dict())
        engine.send_weights()
        reports.append(json.loads(engine.report.to_json()))
    engine.shutdown()
    engine.shutdown()  # safe to call twice
    print(json.dumps({"vllm": vllm.__version__, "reports": reports}))


if __name__ == "__main__":
    main(*sys.argv[1:])
