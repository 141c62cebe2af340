"""Sends random inputs to the decoders and the engine behind them: ``python -m tests.fuzz.decoders --count 1000000``.

With ``--guided`` atheris (libFuzzer) chooses inputs by the coverage that they reach in our Python code; the JSON
decoder below is compiled, and reached by mutations that know JSON.  Without it inputs come from a seed alone, the same
each time.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from typing import Any

CHECK_EVERY = 5000
SLOW_S = 5.0  # one input


def plain(count: int, seed: int, *, target: Any = None) -> Any:
    """Runs ``count`` inputs from a seed and returns the target."""
    from tests.fuzz.inputs import make
    from tests.fuzz.target import Target

    target = target or Target()
    random_ = random.Random(seed)
    for number in range(1, count + 1):
        data = make(random_)
        started = time.monotonic()
        target.feed(data)
        assert time.monotonic() - started < SLOW_S, data
        if number % CHECK_EVERY == 0 or number == count:
            target.end_session()
            target.check()
    return target


def guided(count: int, seed: int) -> None:
    """Runs ``count`` inputs chosen by libFuzzer; ends the process."""
    import atheris

    with atheris.instrument_imports(include=["weightcast"], enable_loader_override=False):
        from tests.fuzz.inputs import HONEST, make
        from tests.fuzz.target import Target

    target = Target()
    started = time.monotonic()
    seen = 0

    def one_input(data: bytes) -> None:
        nonlocal seen
        seen += 1
        target.feed(bytes(data))
        if seen % CHECK_EVERY == 0 or seen == count:
            target.end_session()
            target.check()
        if seen == count:
            report(target, time.monotonic() - started)

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        random_ = random.Random(seed)
        if random_.random() < 0.5:
            return make(random_)[:max_size]
        if random_.random() < 0.1:
            data = random_.choice(HONEST)
        return atheris.Mutate(bytes(data)[:max_size], max_size)

    options = [sys.argv[0], f"-runs={count}", f"-seed={seed + 1}", "-max_len=6000", "-timeout=5", "-verbosity=0"]
    atheris.Setup(options, one_input, custom_mutator=mutate)
    atheris.Fuzz()


def report(target: Any, seconds: float) -> None:
    for name, number in sorted(target.counts.items()):
        print(f"{name:24} {number}")
    print(f"{seconds:.1f} s, {target.counts['inputs'] / seconds:.0f} inputs a second; nothing changed", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--guided", action="store_true")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if args.guided:
        guided(args.count, args.seed)
        return
    started = time.monotonic()
    target = plain(args.count, args.seed)
    report(target, time.monotonic() - started)
    target.close()


if __name__ == "__main__":
    main()
