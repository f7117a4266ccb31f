"""A cache in one file: the same bytes every time, and nothing unverified comes in."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from scale import HOST, FakeCompiler

from quire import jit
from quire.errors import CacheError


@pytest.fixture
def store(templates: Path, fake: FakeCompiler, tmp_path: Path) -> jit.Store:
    store = jit.Store(tmp_path / "filled")
    for slug in ("one", "two"):
        jit.build(replace(HOST, slug=slug), store=store, templates=templates)
    return store


def test_a_round_trip_needs_no_compiler(
    store: jit.Store, templates: Path, tmp_path: Path, cache: Path, no_processes: Callable[[], None]
) -> None:
    assert jit.export_entries(store.entries(), tmp_path / "cache.tgz") == 2
    assert jit.import_entries(tmp_path / "cache.tgz", jit.user_store()) == (2, 0)
    assert jit.import_entries(tmp_path / "cache.tgz", jit.user_store()) == (0, 2)
    assert list((cache / "staging").iterdir()) == []
    (Path(tmp_path) / "fake-g++").unlink()
    no_processes()
    assert jit.build(replace(HOST, slug="one"), templates=templates)[0] == "hit"


def test_the_same_entries_give_the_same_bytes(store: jit.Store, tmp_path: Path) -> None:
    jit.export_entries(store.entries(), tmp_path / "a.tgz")
    for entry in store.entries():
        entry.artifact.touch()
    jit.export_entries(reversed(list(store.entries())), tmp_path / "b.tgz")
    assert (tmp_path / "a.tgz").read_bytes() == (tmp_path / "b.tgz").read_bytes()


def test_a_damaged_entry_is_replaced_on_import(store: jit.Store, tmp_path: Path) -> None:
    jit.export_entries(store.entries(), tmp_path / "cache.tgz")
    entry = next(store.entries())
    entry.artifact.write_bytes(b"x")
    assert [path for path, _ in store.problems()] == [entry.path]
    assert jit.import_entries(tmp_path / "cache.tgz", store) == (1, 1)
    assert list(store.problems()) == []


@pytest.mark.parametrize(
    "name", ["../../evil", "/etc/evil", "one/short/manifest.json", f"one/{'a' * 40}-{'b' * 12}/../x"]
)
def test_foreign_names_are_refused(name: str, tmp_path: Path, cache: Path) -> None:
    archive = tmp_path / "evil.tar"
    with tarfile.open(archive, "w") as tar:
        member = tarfile.TarInfo(name)
        member.size = 1
        tar.addfile(member, io.BytesIO(b"x"))
    with pytest.raises(CacheError, match="not an archive of a Quire cache"):
        jit.import_entries(archive, jit.user_store())
    assert list(jit.user_store().paths()) == []


def test_a_tampered_artifact_is_refused(store: jit.Store, tmp_path: Path) -> None:
    next(store.entries()).artifact.write_bytes(b"other code")
    jit.export_entries([jit.Entry(path, manifest) for path, manifest in store.manifests()], tmp_path / "bad.tgz")
    target = jit.Store(tmp_path / "target")
    with pytest.raises(CacheError, match=r"its artifact has 10 bytes"):
        jit.import_entries(tmp_path / "bad.tgz", target)
    assert list(target.paths()) == []


def test_what_is_not_an_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "no.tgz").write_bytes(b"hello")
    with pytest.raises(CacheError, match="cannot be imported"):
        jit.import_entries(tmp_path / "no.tgz", jit.user_store())
