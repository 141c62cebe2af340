"""verl's own harness for checkpoint engines, from its package, with ours; runs in verl's environment, as a script.

    python tests/integrations/verl_run.py MODEL

It does what verl's ``tests/checkpoint_engine/test_correctness_on_gpu.py`` does for its engines: an actor group with an
FSDP model, rollout workers that compare every tensor, and verl's ``CheckpointEngineManager`` between them.  The last
line that it prints is a JSON document for the test.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

import ray
import torch.distributed as dist
import verl
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
from verl.single_controller.ray.base import RayResourcePool, split_resource_pool
from verl.workers.config import (
    CheckpointEngineConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    RolloutConfig,
    TrainingWorkerConfig,
)

from tests.checkpoint_engine import test_utils

ACTORS, ROLLOUTS, UPDATES = 2, 2, 3
RAY_STARTS = 5


def start_ray() -> None:
    """Starts Ray, which gives its own processes only 30 s; where others have the CPUs, one start may not do."""
    for others in reversed(range(RAY_STARTS)):
        try:
            ray.init(num_cpus=4, include_dashboard=False, object_store_memory=256 << 20)
        except Exception as error:  # Ray has no class of its own for it
            if not others or "timed out during startup" not in str(error):
                raise
        else:
            return


class CpuTrainingWorker(test_utils.TrainingWorkerTest):
    """verl's test worker on a CPU.

    Its own process group would name the device ``cpu`` twice, which torch refuses, and its engine is FSDP1 or wants
    pinned memory; so this one has gloo, and verl's FSDP2 engine.
    """

    def __init__(self, config, checkpoint_engine_config):
        dist.init_process_group(
            "gloo",
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            init_method=os.environ.get("DIST_INIT_METHOD"),
        )
        config = TrainingWorkerConfig(
            model_type=config.model_type,
            model_config=config.model_config,
            engine_config=FSDPEngineConfig(strategy="fsdp2", fsdp_size=dist.get_world_size()),
            optimizer_config=FSDPOptimizerConfig(lr=1e-3),
        )
        super().__init__(config, checkpoint_engine_config)


async def main(model: str) -> None:
    start_ray()
    test_utils.TrainingWorkerTest = CpuTrainingWorker
    config = CheckpointEngineConfig(
        backend="weightcast",
        update_weights_bucket_megabytes=1,
        custom_backend_module="weightcast.integrations.verl",
        engine_kwargs={"weightcast": {"wire_dtype": "bfloat16", "timeout_s": 300.0}},  # the check reads bfloat16
    )
    model_config = HFModelConfig(path=model, use_remove_padding=False, override_config={"attn_implementation": "sdpa"})
    rollout_config = RolloutConfig(name="vllm", tensor_model_parallel_size=1, checkpoint_engine=config)
    pool = RayResourcePool(process_on_nodes=[ACTORS + ROLLOUTS], use_gpu=False, max_colocate_count=1)
    pool.get_placement_groups(device_name="cpu")
    trainer_pool, rollout_pool = split_resource_pool(pool, [ACTORS, ROLLOUTS])
    actors = test_utils.create_trainer_worker_group(trainer_pool, model_config, config)
    actors.reset()
    rollout, replicas = await test_utils.create_rollout_worker_group(rollout_pool, model_config, rollout_config, True)
    manager = CheckpointEngineManager(config=config, actor_wg=actors, replicas=replicas)
    for step in range(UPDATES):
        await manager.update_weights(global_steps=step)
        rollout.check_weights()
    ray.shutdown()
    print(
        json.dumps(
            {
                "verl": verl.__version__,
                "engine": CheckpointEngineRegistry.get("weightcast").__name__,
                "updates": UPDATES,
                "replicas": len(replicas),
            }
        )
    )


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
