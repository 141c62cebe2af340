"""One host of a vLLM in Ray: ``python -m vllm_node FOLDER ADDRESS GPUS HEAD [vLLM's arguments]``.

It starts a node of Ray that says it has so many GPUs.  HEAD is ``IP:PORT`` of the first node.  With arguments of
vLLM's, this is the first node, and vLLM's API server runs on it.  Ray's files of this host go to FOLDER.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import time

_RAY = "/tmp/ray"


def main() -> None:
    folder, address, gpus, head, *serve = sys.argv[1:]
    os.makedirs(folder)
    os.makedirs(_RAY, exist_ok=True)
    subprocess.run(["mount", "--bind", folder, _RAY], check=True)
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={address}"]
    start += [f"--num-gpus={gpus}", "--num-cpus=2", f"--object-store-memory={128 << 20}", "--disable-usage-stats"]
    if not serve:
        while subprocess.run([*start, f"--address={head}", "--block"]).returncode:  # until the head is there
            time.sleep(1)
        return
    port = head.partition(":")[2]
    subprocess.run([*start, "--head", f"--port={port}", "--include-dashboard=false"], check=True)
    os.environ["RAY_ADDRESS"] = head
    sys.argv = ["vllm", "serve", *serve]
    runpy.run_module("vllm.entrypoints.cli.main", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
