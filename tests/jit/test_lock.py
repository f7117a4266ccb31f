"""Locks of filelock: what it promises, and what is built beside it."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import time
from importlib.metadata import version
from pathlib import Path

import filelock
import pytest
from processes import Child, wait_for
from scale import HOST, Collect, FakeCompiler

from quire import jit
from quire.jit.builder import _Lock, build_permit, entry_lock


@pytest.fixture
def path(cache: Path) -> Path:
    """A lock of an empty cache."""
    jit.Store(cache).prepare()
    return cache / "locks/a.lock"


def refuse(*_: object) -> None:
    raise AssertionError("nobody else holds the lock")


def holding(path: Path, tell: int) -> None:
    """Hold the lock until killed."""
    with entry_lock(path, refuse):
        os.write(tell, b"held")
        time.sleep(60)


def start_holder(path: Path) -> Child:
    """A process that holds the lock at `path`."""
    reader, writer = os.pipe()
    child = Child(lambda: holding(path, writer))
    assert os.read(reader, 4) == b"held"
    os.close(reader)
    os.close(writer)
    return child


def test_the_version_floor_is_kept() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    floor = re.search(r'"filelock>=([\d.]+)"', text)
    assert floor is not None
    assert [int(part) for part in version("filelock").split(".")] >= [int(part) for part in floor[1].split(".")]
    assert callable(filelock.lock_descriptor)


def test_a_lock_file_that_was_left_behind_locks_nobody_out(path: Path) -> None:
    path.write_text('{"pid": 1, "host": "gone", "since": 0}')
    for _ in range(2):
        with entry_lock(path, refuse) as held:
            assert held
    assert path.exists()


def test_a_killed_holder_frees_the_lock_at_once(path: Path) -> None:
    child = start_holder(path)
    probe = _Lock(path)
    assert not probe.take()
    assert re.fullmatch(rf"process {child.pid} on .+ since \d\d:\d\d:\d\d", probe.holder())
    child.kill()
    wait_for(probe.take, seconds=1)
    probe.close()


def test_a_fork_of_the_holder_does_not_keep_the_lock(path: Path) -> None:
    with entry_lock(path, refuse):
        child = Child(lambda: time.sleep(60))
    with entry_lock(path, refuse) as held:
        assert held
    child.kill()


@pytest.mark.parametrize(
    "note", [b"", b"\xff", b"[" * 4000, b"{}", b'{"pid": [], "host": 1, "since": "x"}', b'{"pid": 1']
)
def test_a_note_that_says_nothing_is_another_process(note: bytes, path: Path) -> None:
    path.write_bytes(note)
    lock = _Lock(path)
    assert lock.holder() == "another process"
    lock.close()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EIO])
def test_a_file_system_without_locks_is_told_once(code: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with Collect() as lines:
        for _ in range(2):
            with entry_lock(path, refuse) as held, build_permit(path.parent.parent / "permits", 2):
                assert held
    assert len(lines) == 1
    assert os.strerror(code) in lines[0]


def link(path: Path) -> None:
    path.symlink_to(path.parents[2] / "victim")


@pytest.mark.parametrize("plant", [link, Path.mkdir, os.mkfifo])
def test_what_is_no_lock_file_is_done_without(plant, path: Path, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    plant(path)
    with Collect() as lines, entry_lock(path, refuse) as held:
        assert held
    assert len(lines) == 1
    assert (tmp_path / "victim").read_text() == "mine"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EMFILE])
def test_no_lock_file_is_needed(
    code: int, templates: Path, fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(at: int, name: str) -> int:
        raise OSError(code, os.strerror(code), name)

    monkeypatch.setattr("quire.jit.trust.open_lock", refused)
    with Collect() as lines:
        assert jit.build(HOST, templates=templates)[0] == "built"
    told = [line for line in lines if os.strerror(code) in line]
    assert len(told) == len(set(told)) == 2  # of the cache, and of the machine's permits


def test_permits_are_as_many_as_there_are(path: Path) -> None:
    permits = path.parent.parent / "permits"
    with build_permit(permits, 2):
        second = _Lock(permits / "permit-1")
        first = _Lock(permits / "permit-0")
        assert (first.take(), second.take()) == (False, True)
        first.close()
        second.close()
