"""Places that cannot be written, executed, filled or found: hits work, and misses work or say why not."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from processes import Child
from scale import HOST, Collect, FakeCompiler
from test_builds import scale

from quire import jit
from quire.errors import CacheError, CompileError, ValidationError
from quire.jit import compilation, config, module

USER = 54321  #: without a name, a home or anything else
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user, or mounts")
OTHER = replace(HOST, slug="scale.other")


@pytest.fixture
def place(fake: FakeCompiler, templates: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory that every user can reach, with a fake compiler and templates beside it; pytest's are private."""
    with tempfile.TemporaryDirectory(prefix="quire-test-") as directory:
        place = Path(directory)
        place.chmod(0o755)
        compiler = FakeCompiler(place / "g++", place / "log")
        monkeypatch.setattr(compiler, "library", shutil.copy(fake.library, place))
        compiler.write()
        compiler.log.touch()
        compiler.log.chmod(0o666)
        shutil.copytree(templates, place / "templates")
        monkeypatch.setenv("QUIRE_CXX", str(compiler.path))
        monkeypatch.setenv("QUIRE_CACHE_DIR", str(place / "cache"))
        yield place


def build(place: Path, *specs: jit.Spec) -> Callable[[], list[list[str]]]:
    """What a fresh process makes of `specs`: [status, directory], and the lines that it logs."""

    def run() -> list[list[str]]:
        with Collect() as lines:
            results = [jit.build(spec, templates=place / "templates") for spec in specs]
        return [[status, str(entry.path)] for status, entry in results] + [lines]

    return run


def warnings(lines: list[str]) -> list[str]:
    return [line for line in lines if not line.startswith("compil")]


# --- users -----------------------------------------------------------------------------------------------------------


@only_root
def test_another_user_has_hits_in_roots_cache_and_compiles_privately(place: Path) -> None:
    jit.build(HOST, templates=place / "templates")
    before = sorted(place.rglob("*"))
    hit, miss, lines = Child(build(place, HOST, OTHER), user=USER).result()
    assert hit[0] == "hit"
    assert Path(hit[1]).is_relative_to(place / "cache")
    assert miss[0] == "built"
    assert not Path(miss[1]).is_relative_to(place / "cache")
    assert len(warnings(lines)) == 1
    assert sorted(place.rglob("*")) == before


@only_root
@pytest.mark.parametrize("home", [None, "/root", "/nowhere", ""])
def test_a_user_without_a_home_compiles_and_finds_it_again(
    home: str | None, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a directory of the user's id under the temporary one or, with a home that is not theirs, in a private one."""
    for name in ("QUIRE_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    if home is not None:
        monkeypatch.setenv("HOME", home)
    (place / "tmp").mkdir()
    (place / "tmp").chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(place / "tmp"))
    status, path = Child(build(place, HOST), user=USER).result()[0]
    assert status == "built"
    if home is None:
        root = place / f"tmp/quire-{USER}"
        assert Path(path).is_relative_to(root)
        assert (root.stat().st_mode & 0o777, root.stat().st_uid) == (0o700, USER)
        assert Child(build(place, HOST), user=USER).result()[0] == ["hit", path]


@only_root
def test_a_directory_that_another_user_has_made_in_tmp_is_not_used(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("QUIRE_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    (place / "tmp").mkdir()
    (place / "tmp").chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(place / "tmp"))
    planted = place / f"tmp/quire-{USER}"
    planted.mkdir()
    os.chown(planted, 4444, 4444)
    planted.chmod(0o777)
    built, lines = Child(build(place, HOST), user=USER).result()
    assert not Path(built[1]).is_relative_to(planted)
    assert "belongs to user 4444" in warnings(lines)[0]
    assert list(planted.iterdir()) == []


@only_root
def test_a_slug_that_another_user_may_not_read_is_passed_over(place: Path) -> None:
    """As with a cache that root has filled under umask 077."""
    entry = jit.build(HOST, templates=place / "templates")[1]
    entry.path.parent.chmod(0o700)
    first, second, _ = Child(build(place, HOST, OTHER), user=USER).result()
    assert (first[0], second[0]) == ("built", "built")


@pytest.mark.parametrize("variable", ["QUIRE_CACHE_DIR", "QUIRE_RECORD"])
def test_a_home_of_nobody_is_named(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "~nosuchuser/x")
    with pytest.raises(ValidationError, match=f"{variable}.*known user.*~nosuchuser/x"):
        config.cache_root() if variable == "QUIRE_CACHE_DIR" else config.record_path()


def test_without_any_temporary_directory_hits_work_and_a_miss_says_what_to_do(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jit.build(HOST, templates=place / "templates")

    def none() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    monkeypatch.setattr(jit.Store, "prepare", lambda _: "it is read-only")
    assert jit.build(HOST, templates=place / "templates")[0] == "hit"
    with pytest.raises(CacheError, match=r"nor elsewhere \(No usable temporary directory found\).*QUIRE_CACHE_DIR"):
        jit.build(OTHER, templates=place / "templates")
    monkeypatch.delenv("QUIRE_CACHE_DIR")
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda _: "~/cache")
    assert config.cache_root() == Path(f"/tmp/quire-{os.geteuid()}")


@only_root
def test_a_machine_without_tmp(place: Path, fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """No directory for temporary files can be written; a cache that can be written needs none."""
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.delenv(name, raising=False)
    compiler = FakeCompiler(place / "g++", Path("/mnt/log"))
    monkeypatch.setattr(compiler, "library", Path("/mnt/nothing.so"))
    compiler.write()
    monkeypatch.setenv("QUIRE_CXX", "/mnt/g++")
    monkeypatch.setenv("QUIRE_CACHE_DIR", "/mnt/cache")
    libc = ctypes.CDLL(None)

    def run() -> list[list[str]]:
        assert libc.unshare(0x20000) == 0  # CLONE_NEWNS
        assert libc.mount(b"none", b"/", None, 0x44000, None) == 0  # MS_REC | MS_PRIVATE
        assert libc.mount(str(place).encode(), b"/mnt", None, 0x1000, None) == 0  # MS_BIND
        for name in (name for name in ("/tmp", "/var/tmp", "/usr/tmp") if Path(name).is_dir()):
            assert libc.mount(b"none", name.encode(), b"tmpfs", 1, b"size=64k") == 0  # MS_RDONLY
        os.chdir("/sys")
        tempfile.tempdir = None
        with pytest.raises(FileNotFoundError):
            tempfile.gettempdir()
        return build(Path("/mnt"), HOST, HOST)()

    if not Path("/mnt").is_dir() or Child(lambda: libc.unshare(0x20000)).result():
        pytest.skip("no mount namespaces here")
    built, hit, lines = Child(run).result()
    assert (built[0], hit[0], warnings(lines)) == ("built", "hit", [])


# --- file systems ----------------------------------------------------------------------------------------------------


@pytest.fixture
def mount(place: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a small file system with the given options; it is gone after the test."""
    point = place / "mounted"
    point.mkdir()

    def mount(options: str) -> Path:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(point)], capture_output=True)
        if done.returncode:
            pytest.skip(f"cannot mount here: {done.stderr.decode().strip()}")
        return point

    yield mount
    subprocess.run(["umount", "-l", str(point)], capture_output=True)


@only_root
def test_a_read_only_file_system(
    place: Path, mount: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, restart: Callable[[], None]
) -> None:
    root = mount("size=4m") / "cache"
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(root))
    jit.build(HOST, templates=place / "templates")
    subprocess.run(["mount", "-o", "remount,ro", str(root.parent)], check=True)
    restart()
    hit, miss, lines = build(place, HOST, OTHER)()
    assert (hit[0], miss[0]) == ("hit", "built")
    assert not Path(miss[1]).is_relative_to(root)
    assert len(warnings(lines)) == 1
    assert "is not writable" in warnings(lines)[0]


@only_root
def test_a_file_system_that_forbids_execution(
    templates: Path, place: Path, mount: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library in memory is not affected; a copy in TMPDIR would be."""
    root = mount("size=4m,noexec")
    monkeypatch.delenv("QUIRE_CXX")
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(root / "cache"))
    monkeypatch.setattr(module, "_libraries", {})
    entry = jit.build(HOST, templates=templates)[1]
    assert scale(jit.load(entry)) == [3, 6, 9]

    def refused(*_: object) -> int:
        raise PermissionError("forbidden here")

    monkeypatch.setattr(module, "_libraries", {})
    monkeypatch.setattr(os, "memfd_create", refused)
    monkeypatch.setattr(tempfile, "tempdir", str(root))
    with pytest.raises(CacheError, match=f"{root} is mounted noexec: set TMPDIR"):
        jit.load(entry)


@only_root
@pytest.mark.parametrize("size", ["4k", "16k", "32k", "48k", "64k", "96k", "400k"])
def test_a_full_disk_is_named_as_such(
    size: str, place: Path, mount: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, restart: Callable[[], None]
) -> None:
    """Each size ends at another write: a directory, a lock, the unit, the artifact, the manifest, or nowhere."""
    root = mount(f"size={size}") / "cache"
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(root))
    for index in range(12):
        try:
            jit.build(replace(HOST, slug=f"n{index}"), templates=place / "templates")
        except (CacheError, CompileError) as error:
            assert "No space left on device" in str(error) or "full disk" in str(error), error
            assert "QUIRE_CACHE_DIR" in str(error)
            break
    restart()
    assert list(jit.Store(root).problems()) == []
    for entry in jit.Store(root).entries():
        assert jit.build(replace(HOST, slug=entry.slug), templates=place / "templates")[0] == "hit"


def test_a_log_that_a_full_disk_has_cut_is_no_error_in_the_source() -> None:
    found = compilation.diagnose("x.cpp:1:1: err", 1)
    assert (found.is_unknown, compilation.diagnose("x: No space left on device", 1).is_unknown) == (True, False)
    told = compilation.full_disk(found)
    assert (told.kind, told.line) == ("full disk", found.line)
    assert "QUIRE_CACHE_DIR" in told.remedy


def test_without_a_network(templates: Path, place: Path) -> None:
    """Neither a hit nor a miss connects anywhere: a network namespace of its own has no interface that is up."""
    done = subprocess.run(["unshare", "-n", "true"], capture_output=True)
    if done.returncode:
        pytest.skip("no network namespaces here")

    def run() -> list[list[str]]:
        assert ctypes.CDLL(None).unshare(0x40000000) == 0  # CLONE_NEWNET
        return [*build(place, HOST)(), *build(place, HOST)()]

    built, _, hit, _ = Child(run).result()
    assert (built[0], hit[0]) == ("built", "hit")


LIMITS = [(resource.RLIMIT_FSIZE, n) for n in (0, 500, 2000, 100_000)]
LIMITS += [(resource.RLIMIT_NOFILE, n) for n in (8, 12, 16, 20, 24, 32)]


@pytest.mark.parametrize(("limit", "value"), LIMITS)
def test_a_process_with_narrow_limits_builds_or_says_what_it_lacks(limit: int, value: int, place: Path) -> None:
    """Of file sizes and of open files; the next process is right."""

    def run() -> str:
        open_files = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
        offset = open_files if limit == resource.RLIMIT_NOFILE else 0  # the test's own
        resource.setrlimit(limit, (value + offset, value + offset))
        try:
            return jit.build(HOST, templates=place / "templates")[0]
        except (CacheError, CompileError) as error:
            return str(error)

    answer = Child(run).result()
    assert answer == "built" or any(word in answer for word in ("File too large", "Too many open files", "File size"))
    assert jit.build(HOST, templates=place / "templates")[0] == ("hit" if answer == "built" else "built")
