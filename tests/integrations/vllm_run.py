"""A trainer that updates vLLM through vLLM's own trainer-side factory; runs in vLLM's environment, as a script.

    python tests/integrations/vllm_run.py MODEL ... URL

It sends each model folder in turn.  The last line that it prints is a JSON document for the test.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from functools import cached_property

import torch
import vllm
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer.base import ModuleSource, WeightSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from weightcast.errors import ConfigError
from weightcast.integrations.vllm_trainer import WeightcastTrainerInitInfo


class Rest(ModuleSource):
    """A source without the first tensor on this rank, as pipeline stages have it, in the form of this vLLM."""

    if hasattr(WeightSource, "owned_names"):

        @cached_property
        def metadata(self):
            first, *others = ModuleSource.metadata.func(self)
            return [dataclasses.replace(first, owners=(1,)), *(dataclasses.replace(m, owners=(0,)) for m in others)]

    elif hasattr(WeightSource, "held_names"):

        def held_names(self):
            return {meta.name for meta in self.metadata()[1:]}


class Pieces(WeightSource):
    """A source that yields pieces only, which vLLM has from 0.33."""

    @cached_property
    def metadata(self):
        return []

    def iter_local(self):
        yield "", torch.zeros(1)


def refusals(model, url):
    if not hasattr(WeightSource, "held_names") and not hasattr(WeightSource, "owned_names"):
        return []
    found = []
    for source in [Rest(model)] + ([Pieces()] if hasattr(WeightSource, "iter_local") else []):
        try:
            WeightTransferTrainerFactory.trainer_init(
                WeightcastTrainerInitInfo(rank=0), client=HTTPVLLMWeightSyncClient(url), source=source
            )
        except ConfigError as error:
            found.append(str(error))
        else:
            found.append("not refused")
    return found


def main(*arguments: str) -> None:
    *folders, url = arguments
    torch.set_num_threads(1)
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders]
    trained = models[0]
    refused = refusals(trained, url)
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
    print(json.dumps({"vllm": vllm.__version__, "reports": reports, "refused": refused, "rank": engine.rank}))


if __name__ == "__main__":
    main(*sys.argv[1:])
