"""Our receiver inside vLLM on one GPU at vLLM's defaults: updates in place with prefix caching and CUDA graphs on.

    WEIGHTCAST_VLLM_SITE=/tmp/site_vllm PYTHONPATH=src:. python3 benchmarks/gpu_vllm_prefixes.py --out OUT.json

The trainer is this process: a model of Qwen3-8B's width with random weights, on the same GPU.  A fresh server on each
of two sets of weights answers ``--requests`` prompts that share a prefix, one after the other, without and with a salt
of the user's.  Then the last of these servers is updated in place to and fro, each time while as many requests with the
same prefix run.  Checks after each update:

- The first prompt finds nothing in vLLM's prefix cache and every other one finds the prefix, by vLLM's own metric.
- The answers are those of the fresh server, token for token, and the same at each update to the same weights.
- Requests that ran over the switch lost no token, and their answers count the tokens of both versions.

The exit code is 1 if a check failed.  ``--control`` starts one more server on the other weights, and says how many of
its answers are those of the first.  At TP 2 on GPUs vLLM's own processes differ, and only one process can be compared.
``--tiny`` is a dry run on a CPU.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.gpu_vllm_receiver import TINY, Trainer, keep_logs, made, room
from benchmarks.vllm_memory import Run, Server, await_start, launched

from weightcast import WeightUpdater
from weightcast.exporters.module import ModuleExporter
from weightcast.lab.bench.machine import facts

PREFIX = 512  # tokens: whole blocks, whatever their size
TOKENS = 24
START_S = 260.0
SALTS: tuple[dict[str, str], ...] = ({}, {"cache_salt": "mine"})
BODY = {"model": "m", "temperature": 0, "ignore_eos": True, "return_token_ids": True}


def prompts(count: int, tiny: bool) -> list[list[int]]:
    """Prompts with the same beginning."""
    shared = [(7 * at) % 400 + 10 for at in range(128 if tiny else PREFIX)]
    return [[*shared, 20 + number, 33, 45 + number] for number in range(count)]


def ask(server: Server, prompt: list[int], tokens: int, **more: Any) -> dict[str, Any]:
    """One answer of vLLM's."""
    body = BODY | {"prompt": prompt, "max_tokens": tokens} | more
    return server.client.post(f"{server.url}/v1/completions", json=body).raise_for_status().json()


def metric(server: Server, name: str) -> int:
    """A number of vLLM's own metrics."""
    page = server.client.get(server.url + "/metrics").text
    return int(sum(map(float, re.findall(rf"^vllm:{name}\{{.*\}} (\S+)$", page, re.MULTILINE))))


def answers(run: Run, server: Server, args: argparse.Namespace, what: str, version: int) -> list[list[list[int]]]:
    """Asks all prompts, one after the other, with each salt; checks what is found in the cache."""
    asked = prompts(args.requests, run.tiny)
    shared = len(asked[0]) - 3
    found: list[list[list[int]]] = []
    for salt in SALTS:
        hits, versions = [metric(server, "prefix_cache_hits_total")], set[int]()
        said: list[list[int]] = []
        with run.step(f"{what}, {salt or 'no salt'}") as kept:
            for prompt in asked:
                answer = ask(server, prompt, TOKENS, **salt)
                said.append(answer["choices"][0]["token_ids"])
                versions.add(answer["weight_version"])
                hits.append(metric(server, "prefix_cache_hits_total"))
            kept["hits"] = [after - before for before, after in pairwise(hits)]
            kept["versions"] = sorted(versions)
        wanted = [0, *[shared] * (len(asked) - 1)]
        run.check(f"{what}: the first prompt finds nothing, the others the prefix", kept["hits"] == wanted, kept)
        run.check(f"{what}: answers say version {version}", kept["versions"] == [version], kept)
        found.append(said)
    return found


def turn(run: Run, server: Server, args: argparse.Namespace, updater: WeightUpdater, version: int) -> None:
    """Updates in place while requests run."""
    with ThreadPoolExecutor(args.requests) as pool, run.step(f"update {version} under load", server) as kept:
        length = 100 if run.tiny else args.tokens
        running = [pool.submit(ask, server, prompt, length) for prompt in prompts(args.requests, run.tiny)]
        while metric(server, "num_requests_running") < args.requests and not all(one.done() for one in running):
            time.sleep(0.005)
        report = updater.update(version=version)
        (row,) = report.targets
        kept |= {"proof": row.proof, "stall_s": row.stall_s, "seconds_of_update": report.seconds}
        kept["spans"] = [one.result()["choices"][0]["weight_versions"] for one in running]
        kept["lengths"] = [sum(span["tokens"] for span in spans) for spans in kept["spans"]]
    run.check(f"update {version}: resident", kept["proof"] == "resident", kept)
    run.check(f"update {version}: no token was lost", kept["lengths"] == [length] * args.requests, kept)
    both = [[span["version"] for span in spans] == [version - 1, version] for spans in kept["spans"]]
    run.check(f"update {version}: requests ran over the switch", any(both), kept)


def same(one: list[list[list[int]]], other: list[list[list[int]]]) -> str:
    """How many answers are equal."""
    pairs = [
        mine == theirs
        for ours, others in zip(one, other, strict=True)
        for mine, theirs in zip(ours, others, strict=True)
    ]
    return f"{sum(pairs)} of {len(pairs)}"


def measure(run: Run, args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Fresh servers on both sets of weights, and updates of the last of them."""
    trainer, folder = made(run, args, "8b", **(TINY if run.tiny else {"num_hidden_layers": args.layers}))
    fresh: dict[str, list[list[list[int]]]] = {}
    result["fresh"] = fresh
    for seed, name in (*[(1, "control")] * args.control, (1, "other"), (0, "first")):
        trainer.fill(seed)
        trainer.save(folder / name)
        options = [] if run.tiny else ["--gpu-memory-utilization=0.45", "--max-model-len=4096", *args.options.split()]
        with launched(run, args, folder / name, *options, name=f"prefixes-{name}") as server:
            try:
                await_start(run, server, START_S)
                fresh[name] = answers(run, server, args, f"fresh server on the {name} weights", 0)
                if name == "other" and args.control:
                    result["two fresh servers agree in"] = same(fresh["control"], fresh["other"])
                if name == "first":
                    run.check("other weights answer otherwise", fresh["first"] != fresh["other"])
                    updates(run, args, trainer, server, fresh, result)
            finally:
                keep_logs(args, server)


def updates(
    run: Run,
    args: argparse.Namespace,
    trainer: Trainer,
    server: Server,
    fresh: dict[str, list[list[list[int]]]],
    result: dict[str, Any],
) -> None:
    """Updates to and fro, by each transport."""
    version = 0
    said: dict[str, list[list[list[int]]]] = {}
    agreed = result["equal answers"] = list[str]()
    for via in args.via.split(","):
        with WeightUpdater.connect(
            ModuleExporter(trainer.model), [server.url], transport=via, pause="in_place", timeout_s=120.0
        ) as updater:
            for seed, name in ((1, "other"), (0, "first")):
                version += 1
                trainer.fill(seed)
                turn(run, server, args, updater, version)
                found = answers(run, server, args, f"{via}: {name} weights again", version)
                agreed.append(f"version {version}, {name} weights, with a fresh server: {same(found, fresh[name])}")
                if name in said:
                    agreed.append(f"version {version}, with the same weights before: {same(found, said[name])}")
                unstable = name == "other" and fresh.get("control", fresh["other"]) != fresh["other"]
                if not unstable:  # else vLLM does not agree with itself, and says the same only within one process
                    same_answers = found == fresh[name]
                    run.check(f"{via}: the {name} weights answer as in a fresh server", same_answers, agreed[-1])
                run.check(f"{via}: the {name} weights answer as they did", found == said.setdefault(name, found))


def main() -> int:
    """Runs all of it and prints what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the results go, as JSON")
    parser.add_argument("--logs", type=Path, help="where the ends of the servers' logs go")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1500, help="of each request that runs over a switch")
    parser.add_argument("--via", default="ipc", help="transports")
    parser.add_argument("--control", action="store_true", help="one more server on the other weights")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, vLLM on this CPU")
    parser.add_argument("--python", default=sys.executable, help="the Python that runs vLLM")
    parser.add_argument("--flags", default="--attention-backend=TRITON_ATTN", help="flags that the build of vLLM needs")
    parser.add_argument("--options", default="", help="more of vLLM's; OPTIONS with =")
    parser.add_argument("--limit-s", type=float, default=560.0)
    args = parser.parse_args()
    run = Run(tiny=args.tiny, limit_s=args.limit_s)
    run.case = "prefixes"
    result: dict[str, Any] = facts() | {"flags": args.flags, "options": args.options, "layers": args.layers}
    with tempfile.TemporaryDirectory(prefix="gpu-vllm-prefixes-", dir=room(args.tiny)) as folder:
        args.folder = Path(folder)
        try:
            measure(run, args, result)
        except Exception as error:  # noqa: BLE001  the file says it
            run.failed.append(f"{type(error).__name__}: {str(error)[-3000:]}")
        finally:
            result |= {"seconds": round(run.limit_s - run.left_s, 1), "failed": run.failed, "steps": run.steps}
            if args.out is not None:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(result, indent=1) + "\n")
            print(json.dumps({key: result[key] for key in ("seconds", "failed")}))
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
