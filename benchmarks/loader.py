"""Cost of loading in an engine: its own loader, tensor by tensor, beside our replay of the copies that it makes.

    python benchmarks/loader.py --model qwen3-30b-a3b --out FILE

No transport: buckets lie where the parameters are. The limit is one copy of the same bytes in large pieces.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import torch

from weightcast.lab.bench.machine import facts
from weightcast.lab.bench.raw import chunks, synchronize
from weightcast.lab.bench.shapes import model_shape
from weightcast.lab.bench.synthetic import SyntheticEngine
from weightcast.receiver.loader import Loader
from weightcast.wire.bucket import Bucket
from weightcast.wire.layout import Packing, TensorSpec, plan_buckets


def median_s(run: Callable[[], object], device: torch.device, repeats: int) -> tuple[float, float]:
    """Times several runs after a warm-up, until the device is done and until the call returns."""
    whole: list[float] = []
    issued: list[float] = []
    for number in range(repeats + 1):
        synchronize(device)
        begin = time.perf_counter()
        run()
        returned = time.perf_counter()
        synchronize(device)
        if number:
            whole.append(time.perf_counter() - begin)
            issued.append(returned - begin)
    return statistics.median(whole), statistics.median(issued)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="moe-4-layers")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--bucket-mib", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device, 0) if arguments.device == "cuda" else torch.device("cpu")
    torch.set_num_threads(1)
    shape = model_shape(arguments.model)
    engine = SyntheticEngine(shape, device)
    specs = [TensorSpec(name=place.name, dtype="bfloat16", shape=place.shape) for place in shape.places]
    begin = time.perf_counter()
    loader = Loader(engine, load_weights=engine.load_weights, expected=specs)
    record_s = time.perf_counter() - begin
    layouts = plan_buckets(specs, bucket_bytes=arguments.bucket_mib << 20, packing=Packing())
    buffer = torch.zeros(max(layout.size_bytes for layout in layouts), dtype=torch.uint8, device=device)

    def replay() -> None:
        loader.begin()
        for layout in layouts:
            loader.load(Bucket(layout, buffer))

    def own() -> None:
        with torch.no_grad():
            whole: dict[str, torch.Tensor] = {}
            for layout in layouts:
                for slot, view in Bucket(layout, buffer).views():
                    if slot.whole:
                        engine.load_weights([(slot.spec.name, view)])
                    elif slot.first_row + slot.num_rows == slot.spec.num_rows:
                        engine.load_weights(
                            [(slot.spec.name, whole.pop(slot.spec.name, view.new_empty(slot.spec.shape)))]
                        )

    def copy() -> None:
        for count in chunks(shape.size_bytes, buffer.numel()):
            scratch[:count].copy_(buffer[:count], non_blocking=True)

    scratch = torch.empty_like(buffer)
    rows = {}
    for name, run in (("one copy, large pieces", copy), ("its own loader", own), ("replayed routes", replay)):
        whole_s, issued_s = median_s(run, device, arguments.repeats)
        rows[name] = {"seconds": whole_s, "host_seconds": issued_s, "gb_per_s": shape.size_bytes / whole_s / 1e9}
    report = {
        "what": "loader",
        "machine": facts(),
        "model": shape.name,
        "bytes": shape.size_bytes,
        "tensors": len(shape.places),
        "routes": sum(len(found) for found in loader.routes.values()),
        "record_s": record_s,
        "rows": rows,
    }
    text = json.dumps(report, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
