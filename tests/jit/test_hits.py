"""A hit starts no process, takes no lock, writes nothing and needs no compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from scale import DEVICE, HOST, FakeCompiler

from quire import jit
from quire.errors import CacheMissError, CompileError
from quire.jit import builder, events


@pytest.fixture
def built(templates: Path, fake: FakeCompiler, restart: Callable[[], None]) -> FakeCompiler:
    """One entry in the cache, and a process that has not seen it."""
    assert jit.build(HOST, templates=templates)[0] == "built"
    restart()
    return fake


def snapshot(root: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.lstat().st_mtime_ns) for path in root.rglob("*"))


def test_a_hit_starts_no_process_and_writes_nothing(
    built: FakeCompiler, templates: Path, cache: Path, no_processes: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_processes()
    monkeypatch.setattr(builder._Lock, "__init__", lambda _, path: pytest.fail(f"a lock was taken: {path}"))
    before = snapshot(cache)
    status, entry = jit.build(HOST, templates=templates)
    assert status == "hit"
    assert entry.path.is_relative_to(cache)
    assert snapshot(cache) == before


def test_a_hit_survives_compilers_that_fail(
    built: FakeCompiler,
    templates: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    no_processes: Callable[[], None],
) -> None:
    """Compilers that merely stand on PATH, unknown to this cache, are not consulted."""
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("g++", "c++", "nvcc", "ninja", "gcc"):
        (broken / name).write_text("#!/bin/sh\nexit 1\n")
        (broken / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(broken))
    monkeypatch.delenv("QUIRE_CXX")
    no_processes()
    assert jit.build(HOST, templates=templates)[0] == "hit"


def test_a_hit_survives_a_named_compiler_that_fails(
    built: FakeCompiler, templates: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_CXX", "/bin/false")
    assert jit.build(HOST, templates=templates)[0] == "hit"


def test_a_hit_needs_no_compiler_at_all(
    built: FakeCompiler, templates: Path, monkeypatch: pytest.MonkeyPatch, no_processes: Callable[[], None]
) -> None:
    no_processes()
    monkeypatch.setenv("QUIRE_CXX", "/nowhere/g++")
    assert jit.build(HOST, templates=templates)[0] == "hit"
    monkeypatch.delenv("QUIRE_CXX")
    monkeypatch.setenv("PATH", "/nowhere")
    assert jit.build(HOST, templates=templates)[0] == "hit"


def test_denied_processes_take_every_compilers_entries(
    built: FakeCompiler, templates: Path, monkeypatch: pytest.MonkeyPatch, no_processes: Callable[[], None]
) -> None:
    built.write(version="9.0")
    monkeypatch.setenv("QUIRE_JIT", "deny")
    no_processes()
    assert jit.build(HOST, templates=templates)[0] == "hit"


def copy_tree(cache: Path, target: Path) -> None:
    shutil.copytree(cache, target, copy_function=shutil.copy)  # without times


def through_tar(cache: Path, target: Path) -> None:
    with tarfile.open(target.with_suffix(".tar"), "w") as archive:
        archive.add(cache, "root")
    with tarfile.open(target.with_suffix(".tar")) as archive:
        archive.extractall(target, filter="data")
    for path in (target / "root").iterdir():
        path.rename(target / path.name)


def into_the_past(cache: Path, target: Path) -> None:
    cache.rename(target)
    for path in target.rglob("*"):
        os.utime(path, (1, 1))


@pytest.mark.parametrize("move", [copy_tree, through_tar, into_the_past])
def test_a_moved_cache_is_as_good(
    move: Callable[[Path, Path], None],
    built: FakeCompiler,
    templates: Path,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    no_processes: Callable[[], None],
) -> None:
    move(cache, tmp_path / "moved")
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "moved"))
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    no_processes()
    assert jit.build(HOST, templates=templates)[0] == "hit"


def test_the_prebuilt_package_is_found_and_never_written(
    templates: Path,
    tmp_path: Path,
    fake: FakeCompiler,
    monkeypatch: pytest.MonkeyPatch,
    no_processes: Callable[[], None],
) -> None:
    """No compiler, an empty user cache, a package of prebuilt variants."""
    package = tmp_path / "site/quire_jit_cache"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    jit.build(HOST, store=jit.Store(package / "store"), templates=templates)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("QUIRE_CXX", "/nowhere/g++")
    no_processes()
    before = snapshot(package)
    status, entry = jit.build(HOST, templates=templates)
    assert status == "hit"
    assert entry.path.is_relative_to(package)
    assert snapshot(package) == before


def test_a_hit_of_native_starts_no_process(
    templates: Path, restart: Callable[[], None], no_processes: Callable[[], None]
) -> None:
    """The compiler's version is learnt before the root exists, and must be there for the next process."""
    native = replace(HOST, target="native")
    assert jit.build(native, templates=templates)[0] == "built"
    restart()
    no_processes()
    assert jit.build(native, templates=templates)[0] == "hit"


def test_an_explicit_store_is_the_only_one(built: FakeCompiler, templates: Path, tmp_path: Path) -> None:
    other = jit.Store(tmp_path / "other")
    assert jit.lookup(HOST, store=other, templates=templates) is None
    assert jit.build(HOST, store=other, templates=templates)[0] == "built"
    assert [entry.slug for entry in other.entries()] == [HOST.slug]


def test_events_tell_the_story(templates: Path, fake: FakeCompiler) -> None:
    seen: list[events.Event] = []
    unsubscribe = events.subscribe(seen.append)
    jit.build(HOST, templates=templates)
    jit.build(HOST, templates=templates)
    unsubscribe()
    unsubscribe()
    jit.build(HOST, templates=templates)
    assert [event.kind for event in seen] == ["begin", "end", "hit"]
    assert seen[0].cause == "the cache is empty"
    assert Path(seen[1].path).is_dir()


def test_a_cold_build_speaks_and_a_warm_one_is_silent(
    templates: Path, fake: FakeCompiler, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.jit.events._logger.hasHandlers", lambda: False)
    monkeypatch.setattr("quire.jit.events.HEARTBEAT_SECONDS", 0.1)
    fake.write(before="sleep 0.3")
    jit.build(HOST, templates=templates)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith(f"quire: compiling {HOST.slug} for {HOST.target} into ")
    assert any("still compiling" in line for line in lines)
    assert lines[-1].startswith(f"quire: compiled {HOST.slug} in ")
    jit.build(HOST, templates=templates)
    assert capfd.readouterr().err == ""


def test_warnings_are_remembered_up_to_a_limit(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.jit.events._logger.hasHandlers", lambda: False)
    monkeypatch.setattr(events, "_MOST_WARNED", 10)
    for number in range(50):
        events.warn_once(f"text {number // 2}")
        assert len(events._warned) <= 10
    assert capfd.readouterr().err.splitlines() == [f"quire: text {number}" for number in range(25)]


def test_other_ranks_are_silent(
    templates: Path, fake: FakeCompiler, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.jit.events._logger.hasHandlers", lambda: False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    jit.build(HOST, templates=templates)
    assert capfd.readouterr().err == ""


# --- denied ----------------------------------------------------------------------------------------------------------


def test_deny_names_the_slug_the_cause_and_the_line(
    built: FakeCompiler, templates: Path, monkeypatch: pytest.MonkeyPatch, no_processes: Callable[[], None]
) -> None:
    monkeypatch.setenv("QUIRE_JIT", "deny")
    no_processes()
    fields = (("backend", "cpu"), ("threads", "64"), ("mask", "causal"))
    wanted = replace(HOST, slug="scale.host-64", constants=(("kThreads", 64),), asserts=(), fields=fields)
    with pytest.raises(CacheMissError) as raised:
        jit.get_module(wanted, templates=templates)
    text = str(raised.value)
    assert text.startswith("scale.host-64 is not in the cache")
    assert "nearest is scale.host: threads=64, not 128; mask=causal, not unset" in text
    assert f"quire warmup {HOST.warmup}" in text


def test_a_sealed_process_compiles_nothing(built: FakeCompiler, templates: Path) -> None:
    jit.seal()
    assert jit.sealed()
    assert jit.build(HOST, templates=templates)[0] == "hit"
    with pytest.raises(CacheMissError, match="this process is sealed"):
        jit.build(replace(HOST, slug="new"), templates=templates)
    assert built.compiles == 1


def test_native_under_deny_asks_nobody(
    templates: Path, monkeypatch: pytest.MonkeyPatch, no_processes: Callable[[], None]
) -> None:
    monkeypatch.setenv("QUIRE_JIT", "deny")
    no_processes()
    with pytest.raises(CacheMissError):
        jit.build(replace(HOST, target="native"), templates=templates)


# --- why a miss ------------------------------------------------------------------------------------------------------


def test_a_miss_names_the_part_that_changed(built: FakeCompiler, templates: Path) -> None:
    header = templates / "include/quire/core/factor.h"
    header.write_text(header.read_text() + "// changed\n")
    assert jit.explain_miss(HOST, templates=templates) == "header quire/core/factor.h changed"
    other = replace(HOST, constants=(("kThreads", 32),), asserts=())
    assert "variant.jinja changed, or the values" in jit.explain_miss(other, templates=templates)


def test_a_good_entry_is_said_to_be_there(built: FakeCompiler, templates: Path, cache: Path) -> None:
    assert jit.explain_miss(HOST, templates=templates).startswith(f"it is in the cache: {cache}")


def test_a_miss_names_the_compiler(built: FakeCompiler, templates: Path) -> None:
    built.write(version="2.0")
    seen: list[events.Event] = []
    unsubscribe = events.subscribe(seen.append)
    jit.build(HOST, templates=templates)
    unsubscribe()
    assert seen[0].cause == "the compiler is (Fake) 2.0, the cache has (Fake) 1.0"


def test_a_miss_without_a_compiler_lists_the_places(
    templates: Path, monkeypatch: pytest.MonkeyPatch, no_processes: Callable[[], None]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    no_processes()
    with pytest.raises(CompileError) as raised:
        jit.build(HOST, templates=templates)
    text = str(raised.value)
    assert "no g++ was found" in text
    assert "g++ on PATH: nothing there" in text
    assert "QUIRE_CXX" in text
    assert len(text.splitlines()) <= 20


# --- the process -----------------------------------------------------------------------------------------------------

ISOLATED = """
import sys, types
package = types.ModuleType("quire"); package.__path__ = [{source!r}]; sys.modules["quire"] = package
"""


def run_isolated(code: str, environment: dict[str, str], **options: object) -> subprocess.CompletedProcess[str]:
    """Run `code` in a new Python that has `quire.jit` but neither torch nor Quire's surface."""
    source = str(Path(jit.__file__).parents[1])
    prelude = ISOLATED.format(source=source)
    return subprocess.run(
        [sys.executable, "-c", prelude + code], env=environment, capture_output=True, text=True, check=False, **options
    )


def test_import_does_nothing(tmp_path: Path) -> None:
    code = """
import os
def forbid(event, arguments):
    if event in ("subprocess.Popen", "os.mkdir", "os.fork", "os.posix_spawn", "ctypes.dlopen", "os.system"):
        assert not arguments or arguments[0] is None, (event, arguments)
    if event == "open" and arguments[1] and set(arguments[1]) & set("wax+"):
        raise AssertionError(arguments)
sys.addaudithook(forbid)
import quire.jit
assert "torch" not in sys.modules and "jinja2" not in sys.modules, "imported too much"
"""
    done = run_isolated(code, {"PATH": "/nowhere", "PYTHONDONTWRITEBYTECODE": "1"}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_warm_process_reads_each_file_once_and_does_nothing_else(templates: Path, cache: Path) -> None:
    """What a hit costs, in counts: the files that decide the key, the manifest, the artifact to verify and to load."""
    entry = jit.build(DEVICE, templates=templates)[1]
    code = f"""
from pathlib import Path
import quire.jit as jit
from quire.jit import Spec, Struct
opened = []
def watch(event, arguments):
    if event in ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.mkdir", "os.rename", "os.remove", "fcntl.flock"):
        raise AssertionError((event, arguments))
    if event == "open":
        opened.append(Path(str(arguments[0])).name)
sys.addaudithook(watch)
jit.get_module({DEVICE!r}, templates=Path({str(templates)!r}))
assert "torch" not in sys.modules and "jinja2" not in sys.modules, "imported too much"
print(*opened)
"""
    run = run_isolated(code, dict(os.environ))
    assert (run.returncode, run.stderr) == (0, "")
    names = ["compilers.json", "factor.h", "manifest.json", "scale.h", entry.artifact.name, "variant.jinja"]
    opened = [name for name in run.stdout.split() if Path(name).suffix]
    assert sorted(name for name in opened if name in names) == sorted(names)


def test_a_warm_lookup_takes_two_milliseconds(templates: Path) -> None:
    """Of this process's own time, the least of twenty: other tests run beside this one."""
    jit.build(DEVICE, templates=templates)
    seconds = []
    for _ in range(20):
        began = time.process_time()
        assert jit.lookup(DEVICE, templates=templates) is not None
        seconds.append(time.process_time() - began)
    assert min(seconds) <= 0.002


def test_record_appends_each_variant_once(templates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep/used.jsonl"
    monkeypatch.setenv("QUIRE_RECORD", str(path))
    jit.get_module(HOST, templates=templates)
    jit.get_module(HOST, templates=templates)
    jit.forget()
    jit.get_module(HOST, templates=templates)
    lines = path.read_text().splitlines()
    assert len(lines) == 1
    assert '"warmup": "--backend cpu --head-dim 64"' in lines[0]
