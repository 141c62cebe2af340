"""``python -m weightcast.lab.conformance URL --checkpoints A B``: checks a running engine and prints a table."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

import torch

from weightcast.config import Target, parse_size
from weightcast.errors import ConfigError, WeightcastError
from weightcast.lab.conformance.engine import ConformanceSettings
from weightcast.lab.conformance.result import Row
from weightcast.lab.conformance.run import conform

_FAILED, _USAGE = 1, 2


def main(argv: list[str] | None = None) -> int:
    """Runs the checks and returns the exit code: 0 if none failed, 1 if one did, 2 if they could not begin."""
    args = _parser().parse_args(argv)
    if (os.cpu_count() or 1) < 8:
        torch.set_num_threads(1)  # the engine usually runs on the same machine
    logging.getLogger("weightcast").setLevel(logging.CRITICAL)  # failures are part of the run, and the rows name them
    try:
        target = Target(
            args.url,
            api_key=args.api_key,
            engine=args.engine,
            ca_file=args.ca_file,
            cert_file=args.cert_file,
            key_file=args.key_file,
        )
        size = parse_size(args.bucket_bytes) if args.bucket_bytes else None
        settings = ConformanceSettings(timeout_s=args.timeout, bucket_bytes=size, transport=args.via)
        result = conform(target, args.checkpoints, settings, told=None if args.json else _tell)
    except WeightcastError as error:
        hint = f"\n\nhint: {error.hint}" if error.hint else ""
        print(f"error: {error}{hint}", file=sys.stderr)
        return _USAGE if isinstance(error, ConfigError) else _FAILED
    print(result.to_json() if args.json else result.markdown() if args.markdown else result.text())
    return 0 if result.ok else _FAILED


def _tell(row: Row) -> None:
    print(f"{row.seconds:6.1f} s  {row.outcome}: {row.check}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m weightcast.lab.conformance",
        description="Checks a running engine: updates, answers, digests, versions, pause modes under load, trainers "
        "that die, and malformed messages. The engine must serve a model like those of the checkpoints, and nobody "
        "else may use it meanwhile. The exit code is 0 only if no check failed.",
    )
    parser.add_argument("url", help="URL of the engine")
    parser.add_argument(
        "--checkpoints", nargs=2, type=Path, required=True, metavar=("A", "B"), help="folders of two models of one kind"
    )
    parser.add_argument("--engine", default="auto", help="kind of engine: auto, native, vllm, sglang")
    parser.add_argument("--via", default="auto", help="transport of the updates that are not about one")
    parser.add_argument("--bucket-bytes", help="size of a bucket, such as 64MiB; a sixth of the checkpoint by default")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="deadline of one wait, in seconds")
    parser.add_argument("--api-key", default=os.environ.get("WEIGHTCAST_API_KEY"), help="key of the engine")
    parser.add_argument("--ca-file", help="PEM file of trusted certificate authorities")
    parser.add_argument("--cert-file", help="PEM file of the client certificate")
    parser.add_argument("--key-file", help="PEM file of its private key")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    return parser


if __name__ == "__main__":
    sys.exit(main())
