"""What a first call costs: measured in fresh processes, with what an example needs in Quire's cache and without.

An example hands over its own path and answers `--first-call` by making one small call of the kernels it uses. The
process that comes first compiles what the cache lacks (cold), the next one finds it (warm). When an example is repeated
the first one finds it too. The example then runs on the same cache: Quire's own, or that of QUIRE_CACHE_DIR.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

import quire
from quire.jit import config

FLAG = "--first-call"


@dataclass
class Compiled:
    """The variants that this process compiled while `watch()` was open."""

    variants: list[tuple[str, float]] = field(default_factory=list)  #: (slug, seconds)


@contextlib.contextmanager
def watch() -> Iterator[Compiled]:
    """Collect what is compiled inside the block."""
    compiled = Compiled()

    def note(event: quire.events.Event) -> None:
        if event.kind == "end" and not event.error:
            compiled.variants.append((event.slug, event.seconds))

    unsubscribe = quire.events.subscribe(note)
    try:
        yield compiled
    finally:
        unsubscribe()


def answer(call: Callable[[], object]) -> None:
    """Make `call()` in this process and print how long it took and what it compiled, as one line of JSON."""
    with watch() as compiled:
        began = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "compiled": compiled.variants}))


def report(script: str) -> None:
    """Run `script --first-call` in fresh processes until one compiles nothing, two at most, and print what each saw."""
    print(f"cache           {config.cache_root()}", flush=True)
    first = ask(script)
    for slug, seconds in first["compiled"]:
        print(f"compiled        {slug} in {seconds:.2f} s")
    if first["compiled"]:
        print(f"cold first call {first['seconds']:.2f} s, {len(first['compiled'])} compiled", flush=True)
    warm = ask(script) if first["compiled"] else first
    print(f"warm first call {warm['seconds'] * 1e3:.1f} ms, {len(warm['compiled'])} compiled", flush=True)
    if warm["compiled"]:
        sys.exit(f"FAILED: the second process compiled again: {warm['compiled']}")


def ask(script: str) -> dict:
    """The answer of one fresh process."""
    done = subprocess.run([sys.executable, script, FLAG], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def run(call: Callable[[], object], job: Callable[..., None], description: str | None, **options: int) -> None:
    """An example as a program: `job` with the values of its `options`, or `call` where a process was asked for that."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(FLAG, action="store_true", help="make one call and print what it cost, as JSON")
    for name, value in options.items():
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N", help=f"default: {value}")
    given = vars(parser.parse_args())
    if given.pop("first_call"):
        answer(call)
    else:
        job(**given)


def judge(error: float, tolerance: float) -> None:
    """Print the largest error of an example against float64; it fails where that is too large, or no number."""
    print(f"largest error   {error:.2e} absolute against float64 (allowed {tolerance:.0e})")
    if not error <= tolerance:
        sys.exit("FAILED: the output differs from the reference")


def device() -> torch.device:
    """The GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
