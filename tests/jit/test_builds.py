"""Real compilers, failing compilers, damaged caches and competing builders."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import stat
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from processes import Child, alive, wait_for
from scale import DEVICE, HOST, Collect, FakeCompiler

from quire import jit
from quire.errors import CacheError, CompileError, UnsupportedError
from quire.jit import compilation
from quire.jit.builder import entry_lock

needs_nvcc = pytest.mark.skipif(jit.toolchain.Nvcc.find() is None, reason="no nvcc")


class ScaleParams(ctypes.Structure):
    _fields_ = (("x", ctypes.c_void_p), ("n", ctypes.c_int), ("factor", ctypes.c_float))


def scale(module: jit.Module) -> list[float]:
    """What a host module makes of [1, 2, 3] and the factor 1.5."""
    assert isinstance(module, jit.HostModule)
    data = (ctypes.c_float * 3)(1, 2, 3)
    params = ScaleParams(ctypes.addressof(data), 3, 1.5)
    assert module.function(ctypes.addressof(params)) == 0
    return list(data)


# --- real compilers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [HOST.target, "native"])
def test_a_host_library_computes(target: str, templates: Path) -> None:
    spec = replace(HOST, target=target)
    module = jit.get_module(spec, templates=templates)
    assert scale(module) == [3.0, 6.0, 9.0]
    assert jit.get_module(spec, templates=templates) is module


@needs_nvcc
def test_a_cubin_and_its_figures(templates: Path) -> None:
    status, entry = jit.build(DEVICE, templates=templates)
    assert status == "built"
    assert entry.artifact.read_bytes()[:4] == b"\x7fELF"
    manifest = entry.manifest
    assert manifest.registers is not None
    assert (manifest.spills, manifest.warnings, manifest.target) == (0, [], "sm90a")
    assert sorted(path.name for path in entry.path.iterdir()) == [
        "build.log",
        "manifest.json",
        "variant.cu",
        "variant.cubin",
    ]
    assert "__launch_bounds__" in (entry.path / "variant.cu").read_text()


def test_artifacts_hold_no_path_of_the_build(templates: Path, tmp_path: Path) -> None:
    one = jit.build(HOST, store=jit.Store(tmp_path / "one"), templates=templates)[1]
    two = jit.build(HOST, store=jit.Store(tmp_path / "two"), templates=templates)[1]
    assert one.artifact.read_bytes() == two.artifact.read_bytes()


@pytest.mark.parametrize("spec", [HOST, pytest.param(DEVICE, marks=needs_nvcc)])
def test_a_drifted_struct_stops_the_build(spec: jit.Spec, templates: Path) -> None:
    drifted = replace(spec, params=jit.Struct("ScaleParams", 16, (("x", 0), ("n", 12), ("factor", 8))))
    with pytest.raises(CompileError, match=r"ScaleParams\.n is not at offset 12") as raised:
        jit.build(drifted, templates=templates)
    assert "cause:   drifted parameters" in str(raised.value)


def test_a_kernel_that_disagrees_with_the_catalogue_stops_the_build(templates: Path) -> None:
    with pytest.raises(CompileError, match=r"kThreads is not 64(.|\n)*kernel and catalogue disagree"):
        jit.build(replace(HOST, asserts=(("kThreads", 64),)), templates=templates)


def test_a_failure_keeps_its_log_and_leaves_nothing_else(templates: Path, cache: Path) -> None:
    header = templates / "include/quire/core/factor.h"
    header.write_text("#pragma once\nnamespace quire {\nconstexpr int kFactor = nonsense;\n}\n")
    with pytest.raises(CompileError) as raised:
        jit.build(HOST, templates=templates)
    lines = str(raised.value).splitlines()
    assert "error: 'nonsense' was not declared" in lines[0]
    assert "error in the source" in lines[1]
    log = Path(lines[-1].partition("log:")[2].strip())
    assert "nonsense" in log.read_text()
    assert list((cache / "staging").iterdir()) == []
    assert list((cache / "entries").rglob("manifest.json")) == []


@needs_nvcc
def test_an_architecture_the_toolkit_does_not_know(templates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(jit.toolchain.CUDA_TARGETS, "sm999", "999")
    with pytest.raises(CompileError, match="bad architecture"):
        jit.build(replace(DEVICE, target="sm999"), templates=templates)


def test_unknown_targets_are_refused(templates: Path) -> None:
    with pytest.raises(UnsupportedError, match="sm42"):
        jit.build(replace(DEVICE, target="sm42"), templates=templates)


# --- failing compilers -----------------------------------------------------------------------------------------------


def test_a_killed_compiler_gets_one_more_try(templates: Path, fake: FakeCompiler, tmp_path: Path) -> None:
    once = tmp_path / "once"
    fake.write(before=f'[ -e "{once}" ] || {{ touch "{once}"; kill -9 $$; }}')
    assert jit.build(HOST, templates=templates)[0] == "built"
    assert fake.compiles == 2


def test_a_compiler_killed_twice_is_out_of_memory(templates: Path, fake: FakeCompiler) -> None:
    fake.write(before="kill -9 $$")
    with pytest.raises(CompileError, match="out of memory"):
        jit.build(HOST, templates=templates)
    assert fake.compiles == 2


def test_any_other_failure_is_final(templates: Path, fake: FakeCompiler) -> None:
    fake.write(before='echo "x.cpp:1:1: error: no" >&2; exit 1')
    with pytest.raises(CompileError, match=r"x\.cpp:1:1: error: no"):
        jit.build(HOST, templates=templates)
    assert fake.compiles == 1


def test_a_compiler_that_makes_nothing_failed(templates: Path, fake: FakeCompiler) -> None:
    fake.write(before="exit 0")
    with pytest.raises(CompileError, match="said nothing"):
        jit.build(HOST, templates=templates)


def test_a_compiler_that_hangs_is_stopped(
    templates: Path, fake: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "TIME_LIMIT_SECONDS", 0.5)
    fake.write(before=f'echo $$ > "{tmp_path}/pid"; exec sleep 60')
    with pytest.raises(CompileError, match=r"stopped at the time limit of 0\.5 s\n  cause:   time limit"):
        jit.build(HOST, templates=templates)
    assert fake.compiles == 1
    compiler = int((tmp_path / "pid").read_text())
    wait_for(lambda: not alive(compiler))


def test_a_missing_ninja_is_named(templates: Path, fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation.shutil, "which", lambda *_, **__: None)
    with pytest.raises(CompileError, match="pip install ninja"):
        compilation.find_ninja()


def test_a_compiler_sees_only_hashed_headers(templates: Path, fake: FakeCompiler, tmp_path: Path) -> None:
    (templates / "include/quire/core/unreached.h").write_text("")
    seen = tmp_path / "seen"
    fake.write(before=f'find include -type f | sort > "{seen}"; env > "{seen}.env"')
    jit.build(HOST, templates=templates)
    assert seen.read_text().split() == ["include/quire/core/factor.h", "include/quire/kernels/scale.h"]
    assert "LC_ALL=C" in (tmp_path / "seen.env").read_text()


# --- damaged and untrusted entries -----------------------------------------------------------------------------------


def flip_a_byte(entry: jit.Entry) -> None:
    data = bytearray(entry.artifact.read_bytes())
    data[len(data) // 2] ^= 1
    entry.artifact.write_bytes(data)


def truncate(entry: jit.Entry) -> None:
    os.truncate(entry.artifact, 3)


def delete_the_manifest(entry: jit.Entry) -> None:
    (entry.path / "manifest.json").unlink()


def garble_the_manifest(entry: jit.Entry) -> None:
    (entry.path / "manifest.json").write_text("{")


def rewrite_the_manifest(entry: jit.Entry) -> None:
    path = entry.path / "manifest.json"
    path.write_text(path.read_text().replace("(Fake) 1.0", "(Fake) 7.0"))


def put_another_encoding_into_the_manifest(entry: jit.Entry) -> None:
    (entry.path / "manifest.json").write_bytes(b"\xff\xfe")


def nest_the_manifest_deeply(entry: jit.Entry) -> None:
    (entry.path / "manifest.json").write_text("[" * 100_000)


def put_a_pipe_in_the_manifests_place(entry: jit.Entry) -> None:
    (entry.path / "manifest.json").unlink()
    os.mkfifo(entry.path / "manifest.json", 0o644)


def put_numbers_in_the_place_of_words(entry: jit.Entry) -> None:
    manifest = json.loads((entry.path / "manifest.json").read_text())
    text = json.dumps({**manifest, "fields": [1], "toolchain": 5, "artifact": None})
    (entry.path / "manifest.json").write_text(text)


def name_another_symbol(entry: jit.Entry) -> None:
    path = entry.path / "manifest.json"
    path.write_text(path.read_text().replace(f'"entry": "{HOST.entry}"', '"entry": "system"'))


BAD_MANIFESTS = [
    garble_the_manifest,
    put_another_encoding_into_the_manifest,
    nest_the_manifest_deeply,
    put_a_pipe_in_the_manifests_place,
    put_numbers_in_the_place_of_words,
]


def delete_the_artifact(entry: jit.Entry) -> None:
    entry.artifact.unlink()


def open_the_artifact(entry: jit.Entry) -> None:
    entry.artifact.chmod(0o666)


def open_the_directory(entry: jit.Entry) -> None:
    entry.path.chmod(0o777)


def share_the_directory_with_a_group(entry: jit.Entry) -> None:
    os.chown(entry.path, -1, 54321)
    entry.path.chmod(0o775)


def open_the_slugs_directory(entry: jit.Entry) -> None:
    entry.path.parent.chmod(0o777)


def link_the_artifact(entry: jit.Entry) -> None:
    target = entry.path.with_name("elsewhere")
    entry.artifact.rename(target)
    entry.artifact.symlink_to(target)


def give_it_away(entry: jit.Entry) -> None:
    os.chown(entry.artifact, 54321, 54321)


DAMAGES = [
    flip_a_byte,
    truncate,
    delete_the_manifest,
    *BAD_MANIFESTS,
    rewrite_the_manifest,
    name_another_symbol,
    delete_the_artifact,
    open_the_artifact,
    open_the_directory,
    open_the_slugs_directory,
    link_the_artifact,
    pytest.param(
        share_the_directory_with_a_group,
        marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root picks any group"),
    ),
    pytest.param(give_it_away, marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_entry_is_not_used_and_repaired_once(
    damage: Callable[[jit.Entry], None], templates: Path, fake: FakeCompiler, restart: Callable[[], None], cache: Path
) -> None:
    entry = jit.build(HOST, templates=templates)[1]
    damage(entry)
    restart()
    with Collect() as lines:
        status, repaired = jit.build(HOST, templates=templates)
    assert (status, fake.compiles, repaired.path) == ("built", 2, entry.path)
    warnings = [line for line in lines if not line.startswith("compil")]
    assert len(warnings) == 1
    assert warnings[0].startswith("moved the cache entry")
    assert jit.Store(cache).verify(entry.path).manifest == repaired.manifest
    assert len(list((cache / "quarantine").iterdir())) == 1
    assert jit.build(HOST, templates=templates)[0] == "hit"


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_prebuilt_entry_is_passed_over(
    damage: Callable[[jit.Entry], None], templates: Path, fake: FakeCompiler, tmp_path: Path
) -> None:
    root = tmp_path / "prebuilt"
    entry = jit.build(HOST, store=jit.Store(root), templates=templates)[1]
    damage(entry)
    assert jit.lookup(HOST, store=jit.Store(root, readonly=True), templates=templates) is None
    assert entry.path.exists()


@pytest.mark.parametrize("damage", BAD_MANIFESTS)
def test_a_bad_manifest_does_not_disturb_other_variants(
    damage: Callable[[jit.Entry], None], templates: Path, fake: FakeCompiler
) -> None:
    damage(jit.build(replace(HOST, slug="scale.bad"), templates=templates)[1])
    good = jit.build(HOST, templates=templates)[1]
    other = replace(HOST, slug="scale.other", fields=(("backend", "cpu"), ("threads", "64")))
    assert jit.explain_miss(other, templates=templates) == f"nearest is {HOST.slug}: threads=64, not 128"
    assert [path for path, _ in jit.user_store().manifests()] == [good.path]
    without_fields = replace(HOST, slug="scale.other.v4")
    reason = jit.explain_miss(without_fields, templates=templates)
    assert reason == f"nearest is {HOST.slug}: other, not {HOST.slug.split('.')[1]}; v4, not nothing"


def test_a_group_of_ones_own_may_write(templates: Path, fake: FakeCompiler, restart: Callable[[], None]) -> None:
    """Copying under umask 002 leaves such modes behind."""
    entry = jit.build(HOST, templates=templates)[1]
    if entry.path.stat().st_gid != os.geteuid():
        pytest.skip("this user has no group of the same number")
    for path in (entry.path.parent, entry.path, *entry.path.iterdir()):
        path.chmod(path.stat().st_mode | 0o020)
    restart()
    assert jit.build(HOST, templates=templates)[0] == "hit"


def test_leftovers_are_swept_after_an_hour(templates: Path, fake: FakeCompiler, cache: Path) -> None:
    jit.Store(cache).prepare()
    old, young = cache / "staging/1-old", cache / "staging/2-young"
    for path in (old, young):
        path.mkdir()
        (path / "half").write_text("x")
    os.utime(old, (time.time() - 4000,) * 2)
    jit.build(HOST, templates=templates)
    assert [path.name for path in (cache / "staging").iterdir()] == ["2-young"]


def test_the_default_root_is_private(templates: Path, fake: FakeCompiler, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("QUIRE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    entry = jit.build(HOST, templates=templates)[1]
    root = tmp_path / "xdg/quire"
    assert entry.path.is_relative_to(root)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


def test_an_explicit_root_can_be_read_by_others(templates: Path, fake: FakeCompiler, cache: Path) -> None:
    entry = jit.build(HOST, templates=templates)[1]
    for path in (cache, cache / "entries", entry.path.parent, entry.path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o755
    assert stat.S_IMODE(entry.artifact.stat().st_mode) == 0o644


def test_an_unwritable_root_serves_hits_and_says_where_it_builds(
    templates: Path, fake: FakeCompiler, cache: Path, restart: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    jit.build(HOST, templates=templates)
    restart()
    real = os.access

    def access(path: str, mode: int, *, dir_fd: int | None = None) -> bool:
        in_cache = dir_fd is not None and cache.samefile(f"/proc/self/fd/{dir_fd}")
        return not in_cache and real(path, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "access", access)
    with Collect() as lines:
        assert jit.build(HOST, templates=templates)[0] == "hit"
        status, entry = jit.build(replace(HOST, slug="other"), templates=templates)
        assert jit.build(replace(HOST, slug="third"), templates=templates)[0] == "built"
        assert jit.build(replace(HOST, slug="other"), templates=templates)[0] == "hit"
    assert status == "built"
    assert not entry.path.is_relative_to(cache)
    assert stat.S_IMODE(entry.path.parents[2].stat().st_mode) == 0o700
    assert len([line for line in lines if "cannot be written" in line]) == 1


def test_a_root_that_is_a_file_is_an_unwritable_root(templates: Path, fake: FakeCompiler, cache: Path) -> None:
    cache.write_text("not a directory")
    assert jit.build(HOST, templates=templates)[0] == "built"


def test_a_root_that_cannot_be_read_is_an_unwritable_root(
    templates: Path, fake: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the home of another user, or a name that no file system takes."""
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / ("x" * 300)))
    assert jit.build(HOST, templates=templates)[0] == "built"
    assert jit.build(HOST, templates=templates)[0] == "hit"


def test_a_library_that_cannot_be_loaded_says_why(
    templates: Path, fake: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "void nowhere(); int quire_scale(void* p) { nowhere(); return 0; }"
    command = ["g++", "-x", "c++", "-shared", "-fPIC", "-o", str(tmp_path / "needy.so"), "-"]
    subprocess.run(command, input=f'extern "C" {{ {source} }}', text=True, check=True)
    monkeypatch.setattr(fake, "library", tmp_path / "needy.so")
    fake.write()
    with pytest.raises(CacheError, match="cannot be loaded"):
        jit.get_module(HOST, templates=templates)


def test_the_store_lists_removes_and_clears(templates: Path, fake: FakeCompiler, cache: Path) -> None:
    for name in ("b", "a"):
        jit.build(replace(HOST, slug=name), templates=templates)
    store = jit.Store(cache)
    assert [entry.slug for entry in store.entries()] == ["a", "b"]
    assert store.total_bytes() >= sum(entry.manifest.size for entry in store.entries()) > 0
    store.remove(next(store.entries()).path)
    assert [entry.slug for entry in store.entries()] == ["b"]
    assert store.clear() == 1
    assert list(store.paths()) == []
    assert jit.build(replace(HOST, slug="a"), templates=templates)[0] == "built"


# --- competing builders ----------------------------------------------------------------------------------------------


def test_threads_compile_once_and_share_a_module(templates: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        modules = list(pool.map(lambda _: jit.get_module(HOST, templates=templates), range(8)))
    assert len(set(map(id, modules))) == 1


def test_a_waiting_process_says_for_whom(templates: Path, fake: FakeCompiler, tmp_path: Path) -> None:
    go = tmp_path / "go"
    fake.write(before=f'while [ ! -e "{go}" ]; do sleep 0.02; done')
    first = Child(lambda: jit.build(HOST, templates=templates)[0])
    wait_for(lambda: fake.compiles == 1)
    seen: list[jit.events.Event] = []

    def release(event: jit.events.Event) -> None:
        seen.append(event)
        go.touch()

    unsubscribe = jit.events.subscribe(release)
    status, _ = jit.build(HOST, templates=templates)
    unsubscribe()
    assert first.result() == "built"
    assert status == "hit"
    assert [event.kind for event in seen] == ["wait", "waited", "hit"]
    assert f"process {first.pid} on " in seen[0].cause


def test_a_file_system_without_locks_still_builds(
    templates: Path, fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with Collect() as lines:
        assert jit.build(HOST, templates=templates)[0] == "built"
    told = [line for line in lines if "no locks in" in line]
    assert len(told) == len(set(told)) == 2  # of the cache, and of the machine's permits


def test_a_lock_that_cannot_say_who_holds_it_holds(
    templates: Path, fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("quire.jit.builder.os.pwrite", full)
    assert jit.build(HOST, templates=templates)[0] == "built"


def test_patience_ends_in_a_build_of_ones_own(
    templates: Path, fake: FakeCompiler, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder is stuck (a stopped process, a lost client of a network file system)."""
    monkeypatch.setattr("quire.jit.builder.PATIENCE_SECONDS", 0.05)
    store = jit.Store(cache)
    store.prepare()
    with entry_lock(store.lock_path(jit._request(HOST, templates)), lambda *_: None) as held:
        assert held
        assert jit.build(HOST, templates=templates)[0] == "built"


def test_a_rival_that_was_first_is_used(templates: Path, fake: FakeCompiler, cache: Path) -> None:
    first = jit.build(HOST, templates=templates)[1]
    store = jit.Store(cache)
    staging = store.new_staging()
    (staging / first.manifest.artifact).write_bytes(first.artifact.read_bytes())
    assert store.publish(staging, first.manifest) == store.verify(first.path)
    assert staging.exists()
    truncate(first)
    manifest = replace(first.manifest, size=4, sha256=hashlib.sha256(b"good").hexdigest())
    (staging / first.manifest.artifact).write_bytes(b"good")
    assert store.publish(staging, manifest).path == first.path
    assert first.artifact.read_bytes() == b"good"


def test_jobs_bound_the_compilers_that_run_at_once(
    templates: Path, fake: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_MAX_JOBS", "2")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # permits are the machine's: other tests run beside this one
    running = tmp_path / "running"
    running.mkdir()
    fake.write(
        before=f'touch "{running}/$$"; ls "{running}" | wc -l >> "{tmp_path}/counts"; sleep 0.1',
        after=f'rm "{running}/$$"',
    )
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda i: jit.build(replace(HOST, slug=f"n{i}"), templates=templates), range(6)))
    counts = [int(line) for line in (tmp_path / "counts").read_text().split()]
    assert len(counts) == 6
    assert max(counts) == 2
