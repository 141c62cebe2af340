"""LMDeploy's server with our receiver in a task of Ray, in a placement group of ours, as trainers place engines.

    python lmdeploy_in_ray.py MODEL PORT BUNDLES [ADDRESS ...]

Runs in LMDeploy's own environment.  BUNDLES are numbers of bundles, of rank 0 first.  Each bundle is on a node of its
own, all on this machine, with the addresses that are given or one for all.  Prints the sockets of the bundles' nodes.
"""

from __future__ import annotations

import json
import sys

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

COUNT = 3


def serve(model: str, port: int) -> None:
    """The server; returns when it is stopped."""
    from lmdeploy.messages import PytorchEngineConfig

    from weightcast.plugins.lmdeploy import server

    config = PytorchEngineConfig(
        tp=2,
        distributed_executor_backend="ray",
        mp_engine_backend="ray",
        session_len=1024,
        eager_mode=True,
        num_gpu_blocks=64,
        max_batch_size=8,
        max_prefill_token_num=256,
        enable_metrics=False,
    )
    server.serve(model, backend="pytorch", backend_config=config, server_name="127.0.0.1", server_port=port)


def main() -> None:
    """Makes the cluster and the group, and serves."""
    model, port, bundles, *addresses = sys.argv[1:]
    cluster = Cluster()
    for number in range(COUNT):
        place = {"node_ip_address": addresses[number]} if addresses else {}
        cluster.add_node(num_cpus=1, num_gpus=1, object_store_memory=128 << 20, include_dashboard=False, **place)
    ray.init(address=cluster.address, **({"_node_ip_address": addresses[0]} if addresses else {}))
    group = placement_group([{"CPU": 1, "GPU": 1}] * COUNT, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    nodes = placement_group_table(group)["bundles_to_node_id"]
    sockets = {node["NodeID"]: node["RayletSocketName"] for node in ray.nodes()}
    print("nodes", json.dumps([sockets[nodes[number]] for number in range(COUNT)]), flush=True)
    strategy = PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=int(bundles.split(",")[0]), placement_group_capture_child_tasks=True
    )
    environment = {"env_vars": {"LMDEPLOY_RAY_EXTERNAL_PG_BUNDLES": bundles}}
    task = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=strategy, runtime_env=environment)(serve)
    ray.get(task.remote(model, int(port)))


if __name__ == "__main__":
    main()
