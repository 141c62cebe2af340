"""Measures the export of a Qwen3-30B-A3B live module, at this revision and at an older one in turns.

    python benchmarks/export.py 60e3750 --rounds 5 --out benchmarks/results/cpu-export.json

Each turn starts a fresh process of one revision for one case.  The case ``plan`` is the whole model without weights:
the exporter is made and its buckets are planned.  The model is made on the ``meta`` device and gets memory that nobody
touches, 61 GB of addresses, because exporters refuse tensors on ``meta``.  The case ``layers`` is a model of
``--layers`` layers with weights: the same, and a first and a second export into two buckets.

``sum`` is the exporter, the buckets and the first export.  Processor time is steadier than time on a machine that does
other work.  A revision whose names are not those of the published checkpoint fails.  ``--family`` adds a row for a
table of this revision, which replaces the recording of transformers' conversion.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUCKET_BYTES = 512 << 20
CASES = ("plan", "layers")
SETTINGS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


def expected_names(layers: int) -> set[str]:
    """Names in the published checkpoint."""
    names = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    for layer in range(layers):
        start = f"model.layers.{layer}."
        for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
            names.add(f"{start}self_attn.{part}.weight")
        names |= {
            f"{start}input_layernorm.weight",
            f"{start}post_attention_layernorm.weight",
            f"{start}mlp.gate.weight",
        }
        for part in ("gate_proj", "up_proj", "down_proj"):
            names |= {f"{start}mlp.experts.{expert}.{part}.weight" for expert in range(SETTINGS["num_experts"])}
    return names


def measure(case: str, layers: int, family: str | None) -> dict[str, Any]:
    """Times each phase of one export, in seconds, in this process and with the package that it imports."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from weightcast.exporters.bucketize import bucketize
    from weightcast.exporters.module import ModuleExporter
    from weightcast.wire.layout import Packing, plan_buckets

    try:
        from weightcast.comm.trainer_group import TrainerGroup
    except ImportError:  # older revisions
        from weightcast.comm.local import TrainerGroup  # pyright: ignore

    torch.set_num_threads(1)
    if case == "plan":
        layers = SETTINGS["num_hidden_layers"]
    group = TrainerGroup.connect(torch.device("cpu"), timeout_s=60)
    # Processes import their kernels for digests once, with the first export of any model.
    small = ModuleExporter(torch.nn.Linear(64, 64))
    [layout] = plan_buckets(small.specs(), bucket_bytes=1 << 20, packing=Packing())
    for _ in bucketize(small, [layout], group, [torch.zeros(1 << 20, dtype=torch.uint8)]):
        pass
    config = AutoConfig.for_model("qwen3_moe", **SETTINGS | {"num_hidden_layers": layers})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device="cpu")
    if case == "layers":
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.fill_(number % 251)
    options: dict[str, Any] = {} if family is None else {"family": family}
    found: dict[str, Any] = {}
    with _timed(found, "make"):
        exporter = ModuleExporter(model, **options)
    with _timed(found, "buckets"):
        layouts = plan_buckets(exporter.specs(), bucket_bytes=BUCKET_BYTES, packing=Packing())
    found |= {"tensors": len(exporter.specs()), "family": exporter.family.name}
    if {spec.name for spec in exporter.specs()} != expected_names(layers):
        raise SystemExit("these are not the names of the published checkpoint")
    if case == "layers":
        slots = [torch.zeros(BUCKET_BYTES, dtype=torch.uint8) for _ in range(2)]
        for phase in ("first", "second"):
            with _timed(found, phase):
                for _ in bucketize(exporter, layouts, group, slots):
                    pass
        found["payload_bytes"] = sum(layout.size_bytes for layout in layouts)
    group.close()
    for clock in ("s", "cpu_s"):
        found[f"sum_{clock}"] = sum(found.get(f"{phase}_{clock}", 0.0) for phase in ("make", "buckets", "first"))
    return found


@contextmanager
def _timed(found: dict[str, Any], phase: str) -> Generator[None]:
    """Adds the seconds of a phase, and its seconds of this process's processor time."""
    started, cpu = time.perf_counter(), time.process_time()
    yield
    found |= {f"{phase}_s": time.perf_counter() - started, f"{phase}_cpu_s": time.process_time() - cpu}


def _turn(tree: Path, case: str, layers: int, family: str | None) -> dict[str, Any]:
    command = [sys.executable, __file__, "--measure", case, "--layers", str(layers)]
    command += [] if family is None else ["--family", family]
    environment = os.environ | {"PYTHONPATH": str(tree / "src")}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1]) | {"load_average": os.getloadavg()[0]}


def _unpack(revision: str, folder: Path) -> None:
    """Writes the package of a revision into a folder."""
    packed = subprocess.run(["git", "archive", revision, "src"], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?", help="the older revision")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4, help="layers of the model with weights; 1.2 GB each")
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--family", help="a table of this revision, as a third row")
    parser.add_argument("--measure", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.layers, arguments.family)))
        return 0
    sys.path[:0] = [str(ROOT / "src")]
    if arguments.revision is None:
        parser.error("name the older revision")
    from weightcast.lab.bench.machine import facts

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        old = Path(temporary)
        _unpack(arguments.revision, old)
        ways: list[tuple[str, Path, str | None]] = [("before", old, None), ("after", ROOT, None)]
        if arguments.family is not None:
            ways.append(("table", ROOT, arguments.family))
        for number in range(arguments.rounds):
            for case in [arguments.only] if arguments.only else CASES:
                for name, tree, family in ways[:: -1 if number % 2 else 1]:
                    row = _turn(tree, case, arguments.layers, family)
                    rows.append({"case": case, "round": number, "revision": name, **row})
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
                    if arguments.out is not None:
                        report = {"what": "export", "machine": facts(), "before": arguments.revision, "rows": rows}
                        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(_table(rows))
    return 0


def _table(rows: list[dict[str, Any]]) -> str:
    """Seconds of each phase: the median, and the range in brackets."""
    lines = [
        "case    phase         " + "".join(f"{name:>22}" for name in dict.fromkeys(row["revision"] for row in rows))
    ]
    for case in dict.fromkeys(row["case"] for row in rows):
        mine = [row for row in rows if row["case"] == case]
        for phase in [key for key in mine[0] if key.endswith("_s")]:
            line = f"{case:8}{phase:13} "
            for name in dict.fromkeys(row["revision"] for row in mine):
                taken = [row[phase] for row in mine if row["revision"] == name]
                line += f"{statistics.median(taken):8.3f} ({min(taken):.2f}-{max(taken):.2f})".rjust(22)
            lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
