"""What a first call costs: measured in fresh processes, once with an empty cache and once with what that left behind.

An example hands over its own path and answers `--first-call` by making one small call of the kernels it uses. The
process that comes first compiles them (cold), the second one finds them (warm). The example itself then runs on the
same cache.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

import quire

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
    """Run `script --first-call` in two fresh processes on the current cache and print what each of them saw."""
    cold, warm = ask(script), ask(script)
    for slug, seconds in cold["compiled"]:
        print(f"compiled        {slug} in {seconds:.2f} s")
    print(f"cold first call {cold['seconds']:.2f} s, {len(cold['compiled'])} compiled")
    print(f"warm first call {warm['seconds'] * 1e3:.1f} ms, {len(warm['compiled'])} compiled")
    if warm["compiled"]:
        sys.exit(f"FAILED: the second process compiled again: {warm['compiled']}")


def ask(script: str) -> dict:
    """The answer of one fresh process."""
    done = subprocess.run([sys.executable, script, FLAG], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@contextlib.contextmanager
def empty_cache() -> Iterator[None]:
    """Let this process and its children work in a cache of their own that starts empty and is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="quire-example-") as directory:
        os.environ["QUIRE_CACHE_DIR"] = directory
        yield


def device() -> torch.device:
    """The GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
