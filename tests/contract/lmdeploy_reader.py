"""LMDeploy's agent reading weights, in LMDeploy's own environment: one JSON request on each line of stdin.

The agent's methods and the request classes are LMDeploy's; what stands for CUDA is ``tests/engines/lmdeploy_rig.py``'s.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
import lmdeploy_rig

RANKS = 2


class Model(torch.nn.Module):
    """A model with two weights that counts finished updates."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False)
        self.second = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
        self.small = torch.nn.Parameter(torch.zeros(5, dtype=torch.bfloat16), requires_grad=False)
        self.finished = 0

    def load_weights(self, weights: Any) -> None:
        own = dict(self.named_parameters())
        for name, weight in weights:
            own[name].copy_(weight)

    def update_weights(self) -> None:
        self.finished += 1


def main() -> None:
    lmdeploy_rig.pretend_cuda()
    import lmdeploy
    from lmdeploy.serve.openai.protocol import UpdateParamsRequest

    from_ipc_handle = vars(lmdeploy_rig.HostEvent)["from_ipc_handle"]
    models: list[Model] = []
    agents: list[Any] = []
    print("ready", lmdeploy.__version__, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "events" in request:  # agents that have read nothing yet
            models[:] = [Model() for _ in range(RANKS)]
            agents[:] = [lmdeploy_rig.bare_agent(model) for model in models]
            for rank, agent in enumerate(agents):
                agent.dist_ctx.tp_group.rank = rank
            lmdeploy_rig.HostEvent.from_ipc_handle = from_ipc_handle
            if not request["events"]:
                del lmdeploy_rig.HostEvent.from_ipc_handle
            print("{}", flush=True)
            continue
        lmdeploy_rig.CALLS.clear()
        words = ""
        try:
            for agent in agents:
                agent.update_params(UpdateParamsRequest(**request))
        except Exception as error:  # noqa: BLE001  whatever LMDeploy raises is the answer
            words = f"{type(error).__name__}: {error}"
        answer = {
            "error": words,
            "calls": list(lmdeploy_rig.CALLS),
            "sums": [{name: float(weight.float().sum()) for name, weight in m.named_parameters()} for m in models],
            "finished": [model.finished for model in models],
            "mapped": [agent._update_params_ipc_tensor is not None for agent in agents],
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
