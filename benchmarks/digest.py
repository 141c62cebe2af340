"""Measures the speed of digests, beside the memory bandwidth of this machine.

    python benchmarks/digest.py --out FILE

Prints JSON, and writes it to FILE if asked. On a machine with CUDA: the first device. Without: the CPU, with smaller
tensors. Every figure is the median of several runs in this process; `of_read_limit` compares with the fastest plain
reduction that PyTorch has over the same bytes.
"""

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from weightcast.digest.definition import partial_sums
from weightcast.digest.pieces import TensorPiece, Transfer
from weightcast.digest.transfers import launches_of, transfers_on
from weightcast.lab.bench.machine import facts
from weightcast.lab.bench.shapes import model_shape
from weightcast.wire.box import Box

GIB = 1 << 30
Shape = tuple[int, ...]


def qwen3_8b(layers: int) -> list[Shape]:
    """Shapes of the tensors of Qwen3-8B cut to some layers; it has 36."""
    beyond = re.compile(r"\.layers\.(\d+)\.")
    places = model_shape("qwen3-8b").places
    return [place.shape for place in places if int((beyond.search(place.name) or [0, "0"])[1]) < layers]


def seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median seconds of one run, on the device's own clock where it has one."""
    run()
    times: list[float] = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            start.record()
            run()
            stop.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(stop) / 1e3)
        else:
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def host_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Seconds until a call returns to the host."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def filled(shape: Shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Random bytes."""
    words = torch.empty(shape, dtype=torch.int8 if dtype.itemsize == 1 else torch.int16, device=device)
    if dtype.itemsize > 2:
        words = torch.empty((*shape[:-1], shape[-1] * dtype.itemsize // 2), dtype=torch.int16, device=device)
    return words.random_(-(2**7), 2**7).view(dtype)


def whole(tensor: torch.Tensor) -> TensorPiece:
    return TensorPiece(tensor=tensor, full_shape=tuple(tensor.shape))


def limits(size_bytes: int, device: torch.device, repeats: int) -> dict[str, float]:
    """GB/s of reading once, and of copying (bytes read and bytes written counted)."""
    source = filled((size_bytes // 8192, 4096), torch.bfloat16, device)
    target = torch.empty_like(source)
    ints, floats = source.view(torch.int32), source.view(torch.float32)
    found = {
        "sum_int32": size_bytes / seconds(ints.sum, device, repeats) / 1e9,
        "amax_int32": size_bytes / seconds(ints.amax, device, repeats) / 1e9,
        "sum_float32": size_bytes / seconds(floats.sum, device, repeats) / 1e9,
        "copy_read_plus_write": 2 * size_bytes / seconds(lambda: target.copy_(source), device, repeats) / 1e9,
    }
    found["read_limit"] = max(found["sum_int32"], found["amax_int32"], found["sum_float32"])
    return found


def one_tensor_cases(size_bytes: int, device: torch.device) -> dict[str, Callable[[], list[TensorPiece]]]:
    """Pieces of about `size_bytes` each, made when asked, so that one is in memory at a time."""
    rows = size_bytes // 8192

    def half_of_columns() -> list[TensorPiece]:
        tensor = filled((rows, 8192), torch.bfloat16, device)
        return [
            TensorPiece(tensor=tensor[:, 4096:], full_shape=(rows, 8192), box=Box(offset=(0, 4096), shape=(rows, 4096)))
        ]

    return {
        "bf16 [rows, 4096]": lambda: [whole(filled((rows, 4096), torch.bfloat16, device))],
        "bf16 [rows, 12288]": lambda: [whole(filled((rows // 3, 12288), torch.bfloat16, device))],
        "bf16 [rows, 576]": lambda: [whole(filled((size_bytes // 1152, 576), torch.bfloat16, device))],
        "fp32 [rows, 4096]": lambda: [whole(filled((rows // 2, 4096), torch.float32, device))],
        "fp8 [rows, 4096]": lambda: [whole(filled((rows * 2, 4096), torch.float8_e4m3fn, device))],
        "bf16 experts [128, 768, n]": lambda: [whole(filled((128, 768, size_bytes // 196608), torch.bfloat16, device))],
        "bf16 half the columns, a view": half_of_columns,
        "bf16 rows of 4095, not aligned": lambda: [whole(filled((rows, 4095), torch.bfloat16, device))],
        "bf16 1-D, 64 MiB": lambda: [whole(filled((32 << 20,), torch.bfloat16, device))],
    }


def measure(pieces: list[TensorPiece], device: torch.device, repeats: int) -> dict[str, float]:
    size_bytes = sum(piece.tensor.nbytes for piece in pieces)
    transfers = [Transfer(piece=piece, total=number) for number, piece in enumerate(pieces)]
    launches = None

    def sums() -> torch.Tensor | None:
        return partial_sums(pieces) if launches is None else launches.launch()

    def first() -> torch.Tensor | None:
        nonlocal launches
        if transfers_on(device):
            launches = launches_of(transfers, len(pieces), device)
        return sums()

    first_host_s = host_seconds(first, device)
    again_host_s = host_seconds(sums, device)
    extra_bytes = 0
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        sums()
        extra_bytes = torch.cuda.max_memory_allocated() - before
    taken_s = seconds(sums, device, repeats)
    return {
        "tensors": len(pieces),
        "bytes": size_bytes,
        "seconds": taken_s,
        "gb_per_s": size_bytes / taken_s / 1e9,
        "host_s_first_call": first_host_s,
        "host_s_later_call": again_host_s,
        "extra_device_bytes": extra_bytes,
    }


def on_the_way(shapes: list[Shape], device: torch.device, repeats: int) -> dict[str, float]:
    """Tensors copied and summed by one launch, as into a bucket and out of it, beside their copies alone."""
    pieces = [whole(filled(shape, torch.bfloat16, device)) for shape in shapes]
    targets = [torch.empty_like(piece.tensor) for piece in pieces]
    transfers = [
        Transfer(piece=piece, target=target, total=number)
        for number, (piece, target) in enumerate(zip(pieces, targets, strict=True))
    ]
    size_bytes = sum(piece.tensor.nbytes for piece in pieces)
    taken_s = seconds(launches_of(transfers, len(pieces), device).launch, device, repeats)
    copies_s = seconds(
        lambda: [target.copy_(piece.tensor) for piece, target in zip(pieces, targets, strict=True)], device, repeats
    )
    return {
        "tensors": len(pieces),
        "bytes": size_bytes,
        "seconds": taken_s,
        "gb_per_s": size_bytes / taken_s / 1e9,
        "copies_alone_gb_per_s": size_bytes / copies_s / 1e9,
    }


def same_as_cpu(device: torch.device) -> bool:
    """The digests that the rest is about are right: compared with the CPU on a few shapes."""
    shapes: list[Shape] = [(300, 4096), (77, 576), (5000,), (40, 33, 70), (9000, 3)]
    dtypes = (torch.bfloat16, torch.float32, torch.float8_e4m3fn)
    tensors = [filled(shape, dtype, device) for shape in shapes for dtype in dtypes]
    there = partial_sums([whole(tensor) for tensor in tensors]).cpu()
    return torch.equal(there, partial_sums([whole(tensor.cpu()) for tensor in tensors]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the JSON here as well")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()

    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    repeats = arguments.repeats if device.type == "cuda" else min(arguments.repeats, 3)
    size_bytes, layers = GIB, 36
    if device.type == "cuda":
        torch.cuda.set_device(0)
        device = torch.device("cuda", 0)
        free_bytes = torch.cuda.mem_get_info()[0]
        layers = max(1, min(36, (free_bytes - 6 * GIB) // (400 << 20)))
    else:
        size_bytes, layers = GIB // 8, 1

    result: dict[str, object] = {"machine": facts() | {"device": str(device)}, "same_as_cpu": same_as_cpu(device)}
    result["limits_gb_per_s"] = found = limits(size_bytes, device, repeats)
    cases: dict[str, dict[str, float]] = {}

    def case(name: str, make: Callable[[], list[TensorPiece]]) -> None:
        cases[name] = figures = measure(make(), device, repeats)
        figures["of_read_limit"] = figures["gb_per_s"] / found["read_limit"]
        figures["of_copy"] = figures["gb_per_s"] / found["copy_read_plus_write"]
        if device.type == "cuda":
            torch.cuda.empty_cache()

    for name, make in one_tensor_cases(size_bytes, device).items():
        case(name, make)
    case(
        f"bf16 Qwen3-8B, {layers} of 36 layers, one call",
        lambda: [whole(filled(shape, torch.bfloat16, device)) for shape in qwen3_8b(layers)],
    )
    result["digest"] = cases
    if device.type == "cuda":  # elsewhere these are two passes
        result["copied_and_summed"] = figures = on_the_way(qwen3_8b(max(1, layers // 2)), device, repeats)
        figures["of_copy"] = 2 * figures["gb_per_s"] / found["copy_read_plus_write"]

    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text + "\n")
    return 0 if result["same_as_cpu"] else 1


if __name__ == "__main__":
    sys.exit(main())
