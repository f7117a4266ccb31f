"""Many processes that want the same, and processes that are killed while they build."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from processes import Child, alive, wait_for
from scale import HOST, FakeCompiler

from quire import jit

SLUGS = [replace(HOST, slug=f"scale.n{index}") for index in range(12)]


def at_once(count: int, function: Callable[[], object]) -> list[object]:
    """What `function` returns in so many processes that begin together."""
    reader, writer = os.pipe()

    def run() -> object:
        os.close(writer)
        os.read(reader, 1)  # until all are there
        return function()

    children = [Child(run) for _ in range(count)]
    os.close(reader)
    os.close(writer)
    return [child.result() for child in children]


def wanted_by_many(templates: Path, fake: FakeCompiler, cache: Path) -> None:
    statuses = at_once(64, lambda: jit.build(HOST, templates=templates)[0])
    assert sorted(statuses) == ["built"] + ["hit"] * 63
    assert fake.compiles == 1
    assert list((cache / "staging").iterdir()) == []


def test_sixty_four_processes_compile_once(templates: Path, fake: FakeCompiler, cache: Path) -> None:
    fake.write(before="sleep 0.2")
    wanted_by_many(templates, fake, cache)


@pytest.mark.slow
def test_sixty_four_processes_and_a_compiler_that_takes_no_time(
    templates: Path, fake: FakeCompiler, cache: Path, restart: Callable[[], None]
) -> None:
    """In a cache that was emptied: the entry is there before the last of them looks for it."""
    jit.build(HOST, templates=templates)
    jit.Store(cache).clear()
    fake.log.unlink()
    restart()
    wanted_by_many(templates, fake, cache)


def test_processes_that_want_many_variants_compile_each_once(templates: Path, fake: FakeCompiler) -> None:
    def build_all() -> int:
        mine = random.sample(SLUGS, len(SLUGS))
        return sum(jit.build(spec, templates=templates)[0] == "built" for spec in mine)

    assert sum(at_once(8, build_all)) == fake.compiles == len(SLUGS)


# --- killed ----------------------------------------------------------------------------------------------------------


def compiler_that_tells(fake: FakeCompiler, pids: Path, *, deaf: bool) -> None:
    """It takes 0.4 s, has a child as g++ has cc1plus, and perhaps both ignore SIGTERM."""
    trap = "trap '' TERM; " if deaf else ""
    wait = "for i in 1 2 3 4 5 6 7 8; do sleep 0.05; done"
    fake.write(before=f'{trap}echo $$ >> "{pids}"; ( {wait} ) & echo $! >> "{pids}"; wait $!')


def builder(templates: Path) -> None:
    jit.build(HOST, templates=templates)


def parent_of_a_builder(templates: Path) -> None:
    Child(lambda: builder(templates))
    time.sleep(60)


KILLED = [
    pytest.param(builder, False, id="builder"),
    pytest.param(parent_of_a_builder, False, id="its-parent"),
    pytest.param(builder, True, id="compiler-ignores-sigterm"),
]


def kill_at(seconds: float, templates: Path, pids: Path, start: Callable[[Path], None], orphans: bool) -> None:
    """Kill a process so long after its start; the next one is right, and no compiler of the killed one lives on."""
    child = Child(lambda: start(templates))
    time.sleep(seconds)
    child.kill()
    before = pids.read_text().split() if pids.exists() else []
    entry = jit.build(HOST, templates=templates)[1]
    assert b"made by" in entry.image
    if not orphans:
        wait_for(lambda: not any(alive(int(pid)) for pid in before), seconds=20)


@pytest.mark.parametrize(("start", "deaf"), KILLED)
@pytest.mark.parametrize("times", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_killed_process_stops_nobody_and_leaves_no_compiler(
    times: int, start: Callable[[Path], None], deaf: bool, templates: Path, fake: FakeCompiler, tmp_path: Path,
    cache: Path, restart: Callable[[], None],
) -> None:  # fmt: skip
    compiler_that_tells(fake, tmp_path / "pids", deaf=deaf)
    for _ in range(times):
        # A builder whose parent was killed goes on, and ends by itself.
        kill_at(random.uniform(0.05, 0.5), templates, tmp_path / "pids", start, orphans=start is parent_of_a_builder)
        assert list(jit.Store(cache).problems()) == []
        jit.Store(cache).clear()
        restart()


def test_a_compiler_that_ignores_sigterm_is_killed(templates: Path, fake: FakeCompiler, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    fake.write(before=f"trap '' TERM; echo $$ > \"{pids}\"; while :; do sleep 0.1; done")
    child = Child(lambda: builder(templates))
    wait_for(lambda: pids.exists() and pids.read_text().strip() != "")
    child.kill()
    wait_for(lambda: not alive(int(pids.read_text())), seconds=20)


@pytest.mark.parametrize("sends", ["sys.exit()", "raise KeyboardInterrupt", "os._exit(0)"])
def test_a_process_that_ends_in_the_middle_leaves_no_compiler(
    sends: str, templates: Path, fake: FakeCompiler, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    fake.write(before=f'echo $$ > "{pids}"; exec sleep 60')

    def end() -> None:
        import signal
        import sys

        def stop(*_: object) -> None:
            if sends == "os._exit(0)":
                os._exit(0)
            raise KeyboardInterrupt if "Keyboard" in sends else sys.exit()

        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        builder(templates)

    child = Child(end)
    child.wait()
    wait_for(lambda: not pids.exists() or not alive(int(pids.read_text() or -1)), seconds=20)


# --- compilers that say that they have succeeded ---------------------------------------------------------------------

GARBAGE = {
    "nothing": ': > "$2"',
    "text": 'echo garbage > "$2"',
    "half": 'head -c 700 "{library}" > "$2"',
    "another library": 'cp "{other}" "$2"',
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_found_before_it_is_published(
    name: str, templates: Path, fake: FakeCompiler, cache: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.so"
    other.write_bytes(fake.library.read_bytes().replace(b"quire_scale", b"quire_wrong"))
    make = GARBAGE[name].format(library=fake.library, other=other)
    fake.write(before=f'while [ $# -gt 0 ]; do if [ "$1" = -o ]; then {make}; fi; shift; done; exit 0')
    with pytest.raises(jit.CompileError, match="reported success, but what it made cannot be used"):
        jit.build(HOST, templates=templates)
    assert list(jit.Store(cache).paths()) == []
    assert list((cache / "staging").iterdir()) == []
    fake.write()
    assert jit.build(HOST, templates=templates)[0] == "built"
