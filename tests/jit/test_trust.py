"""What others could have written, or have: none of it is used, and nothing that it leads to is hurt."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from scale import HOST, Collect, FakeCompiler

from quire import jit
from quire.errors import CacheError, CacheMissError
from quire.jit import trust
from quire.jit.compilation import stamp_of

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


def open_to_all(path: Path) -> None:
    path.chmod(0o777)


def give_away(path: Path) -> None:
    os.chown(path, 54321, 54321)


UNTRUSTED = [open_to_all, pytest.param(give_away, marks=only_root)]


@pytest.fixture
def built(templates: Path, fake: FakeCompiler, restart: Callable[[], None]) -> jit.Entry:
    """One entry in the cache, and a process that has not seen it."""
    entry = jit.build(HOST, templates=templates)[1]
    restart()
    return entry


# --- the root --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plant", UNTRUSTED)
def test_a_root_that_others_could_have_written_is_not_used(
    plant: Callable[[Path], None], built: jit.Entry, templates: Path, cache: Path
) -> None:
    plant(cache)
    with Collect() as lines:
        status, entry = jit.build(HOST, templates=templates)
    assert status == "built"
    assert not entry.path.is_relative_to(cache)
    warnings = [line for line in lines if "compil" not in line.split(" ")[0]]
    assert len(warnings) == 1
    assert "may be written by others (mode 0777)" in warnings[0] or "belongs to user 54321" in warnings[0]
    assert "QUIRE_CACHE_DIR" in warnings[0]


@pytest.mark.parametrize("plant", UNTRUSTED)
def test_a_denied_process_says_why_it_ignores_such_a_root(
    plant: Callable[[Path], None], built: jit.Entry, templates: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(cache)
    monkeypatch.setenv("QUIRE_JIT", "deny")
    with Collect() as lines, pytest.raises(CacheMissError, match=r"must not be used: cache (may|belongs)"):
        jit.build(HOST, templates=templates)
    assert len(lines) == 1


def test_a_root_like_tmp_is_used(built: jit.Entry, templates: Path, cache: Path) -> None:
    """Others may add names to it, but rename and remove only theirs."""
    cache.chmod(0o1777)
    assert jit.build(HOST, templates=templates)[0] == "hit"


def test_a_root_may_be_reached_through_a_link(
    built: jit.Entry, templates: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(cache)
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "link"))
    assert jit.build(HOST, templates=templates)[0] == "hit"


@pytest.mark.parametrize("level", ["cache", "entries", HOST.slug])
def test_an_exchange_after_the_check_changes_nothing(
    level: str, built: jit.Entry, templates: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user exchanges a directory between its check and the reading of what lies in it."""
    directory = next(path for path in (cache, cache / "entries", built.path.parent) if path.name == level)
    theirs = directory.with_name("theirs")
    shutil.copytree(directory, theirs)
    for manifest in theirs.rglob("manifest.json"):
        found = replace(jit.Manifest.read(manifest.read_text()), size=5, sha256="0" * 64)
        manifest.write_text(found.write())
    jit.user_store().memory.knows("")  # read before
    check, exchanged = trust._check, []

    def check_and_exchange(descriptor: int, name: str, **options: bool) -> os.stat_result:
        status = check(descriptor, name, **options)
        if name == level and not exchanged:
            exchanged.append(directory.rename(directory.with_name("ours")))
            theirs.rename(directory)
        return status

    monkeypatch.setattr(trust, "_check", check_and_exchange)
    entry = jit.lookup(HOST, templates=templates)
    assert exchanged
    assert entry is not None
    assert entry.manifest == built.manifest


def test_a_root_that_is_exchanged_during_a_compile_gives_nothing_to_load(
    templates: Path, fake: FakeCompiler, cache: Path
) -> None:
    fake.write(
        before=f'mv "{cache}" "{cache}.ours"; cp -r "{cache}.ours" "{cache}"',
        after=f'for d in "{cache}"/staging/*; do echo theirs > "$d/variant.so"; done',
    )
    with pytest.raises(CacheError, match=r"expected \d+|sha256"):
        jit.build(HOST, templates=templates)
    assert list((cache / "entries").rglob("variant.so")) == []


# --- what lies in the root -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["entries", "locks", "permits", "staging", "logs", "quarantine"])
def test_a_link_in_the_place_of_a_directory_is_not_followed(
    name: str, templates: Path, fake: FakeCompiler, cache: Path, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    (victim / "deep").mkdir(parents=True)
    (victim / "deep/file").write_text("mine")
    for path in (victim / "deep", victim):
        os.utime(path, (1, 1))
    jit.Store(cache).prepare()
    (cache / name).rmdir()
    (cache / name).symlink_to(victim)
    with Collect() as lines:
        status, entry = jit.build(HOST, templates=templates)
    assert status == "built"
    assert not entry.path.is_relative_to(cache)
    assert [line for line in lines if f"{name} is not a plain directory" in line]
    assert [path.name for path in victim.rglob("*")] == ["deep", "file"]


@only_root
@pytest.mark.parametrize("name", ["entries", "locks", "permits", "staging", "logs", "quarantine"])
def test_a_directory_of_another_user_is_not_used(name: str, templates: Path, fake: FakeCompiler, cache: Path) -> None:
    jit.Store(cache).prepare()
    give_away(cache / name)
    with Collect() as lines:
        entry = jit.build(HOST, templates=templates)[1]
    assert not entry.path.is_relative_to(cache)
    assert [line for line in lines if f"{name} belongs to user 54321" in line]


def test_a_linked_lock_is_not_followed(templates: Path, fake: FakeCompiler, cache: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    store = jit.Store(cache)
    store.prepare()
    for lock in (store.lock_path(jit._request(HOST, templates)), cache / "permits/permit-0"):
        lock.symlink_to(victim)
    with Collect() as lines:
        assert jit.build(HOST, templates=templates)[0] == "built"
    assert victim.read_text() == "mine"
    assert [line for line in lines if "is not a plain file" in line]


def test_a_linked_log_is_not_followed(templates: Path, fake: FakeCompiler, cache: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    jit.Store(cache).prepare()
    (cache / "logs" / f"{HOST.slug}.{jit._request(HOST, templates).digest[:12]}.log").symlink_to(victim)
    fake.write(before="echo error: no >&2; exit 1")
    with pytest.raises(jit.CompileError):
        jit.build(HOST, templates=templates)
    assert victim.read_text() == "mine"


def test_leftovers_of_any_kind_are_swept_and_links_are_not_followed(
    templates: Path, fake: FakeCompiler, cache: Path, tmp_path: Path
) -> None:
    jit.Store(cache).prepare()
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("mine")
    (cache / "staging/link").symlink_to(victim)
    (cache / "staging/file").write_text("x")
    for path in (cache / "staging/link", cache / "staging/file"):
        os.utime(path, (time.time() - 4000,) * 2, follow_symlinks=False)
    jit.build(HOST, templates=templates)
    assert list((cache / "staging").iterdir()) == []
    assert (victim / "file").read_text() == "mine"


def test_files_beside_our_own_code_may_be_links(built: jit.Entry, templates: Path, cache: Path, tmp_path: Path) -> None:
    """As in the Hugging Face Hub's cache: whoever could change them could change our code."""
    for file in list(built.path.iterdir()):
        file.rename(tmp_path / file.name)
        file.symlink_to(tmp_path / file.name)
    found = [jit.Store(cache, readonly=True, trusted_group=trusted) for trusted in (False, True)]
    assert [jit.lookup(HOST, store=store, templates=templates) is not None for store in found] == [False, True]


def link_to_nowhere(entry: jit.Entry) -> None:
    shutil.rmtree(entry.path)
    entry.path.symlink_to("nowhere")


def file_for_an_entry(entry: jit.Entry) -> None:
    shutil.rmtree(entry.path)
    entry.path.write_text("x")


def file_for_a_slug(entry: jit.Entry) -> None:
    shutil.rmtree(entry.path.parent)
    entry.path.parent.write_text("x")


def link_for_a_slug(entry: jit.Entry) -> None:
    entry.path.parent.rename(entry.path.parents[2] / "elsewhere")
    entry.path.parent.symlink_to(entry.path.parents[2] / "elsewhere")


@pytest.mark.parametrize("damage", [link_to_nowhere, file_for_an_entry, file_for_a_slug, link_for_a_slug])
def test_what_stands_in_the_way_is_moved_away_once(
    damage: Callable[[jit.Entry], None], built: jit.Entry, templates: Path, cache: Path, restart: Callable[[], None]
) -> None:
    damage(built)
    with Collect() as lines:
        assert jit.build(HOST, templates=templates)[0] == "built"
    assert len([line for line in lines if "moved the cache entry" in line]) == 1
    restart()
    assert jit.build(HOST, templates=templates)[0] == "hit"
    assert len(list((cache / "quarantine").iterdir())) == 1


# --- compilers.json --------------------------------------------------------------------------------------------------


def planted(cache: Path, fake: FakeCompiler) -> Path:
    """An answer that the compiler never gave, with the right stamp."""
    path = cache / "compilers.json"
    answer = {"stamp": stamp_of([str(fake.path)]), "version": "planted"}
    path.write_text(json.dumps({str(fake.path): answer}))
    return path


@pytest.mark.parametrize("plant", UNTRUSTED)
def test_compilers_that_others_could_have_written_are_not_believed(
    plant: Callable[[Path], None], built: jit.Entry, fake: FakeCompiler, templates: Path, cache: Path
) -> None:
    plant(planted(cache, fake))
    with Collect() as lines:
        status, entry = jit.build(HOST, templates=templates)
    assert (status, entry.path) == ("hit", built.path)
    assert len([line for line in lines if "ignored" in line and "compilers.json" in line]) == len(lines) == 1


def test_a_planted_answer_is_believed_where_only_we_could_have_written_it(
    built: jit.Entry, fake: FakeCompiler, templates: Path, cache: Path
) -> None:
    """So the test above tests something."""
    planted(cache, fake)
    assert jit.build(HOST, templates=templates)[1].manifest.toolchain["version"] == "planted"


BAD_ANSWERS = {
    "encoding": b"\xff\xfe{",
    "nesting": b"[" * 100_000,
    "half": b'{"a": {"stamp": [["/bin/sh", 1',
    "list": b"[1, 2]",
    "number": b"5",
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
def test_bad_answers_are_asked_again_once(
    name: str, built: jit.Entry, templates: Path, cache: Path, restart: Callable[[], None]
) -> None:
    (cache / "compilers.json").write_bytes(BAD_ANSWERS[name])
    with Collect() as lines:
        assert jit.build(HOST, templates=templates)[0] == "hit"
    assert len(lines) == 1
    assert "compilers.json" in lines[0]
    restart()
    with Collect() as lines:
        assert jit.build(HOST, templates=templates)[0] == "hit"
    assert lines == []


def test_a_pipe_in_the_place_of_answers(built: jit.Entry, templates: Path, cache: Path) -> None:
    (cache / "compilers.json").unlink()
    os.mkfifo(cache / "compilers.json")
    assert jit.build(HOST, templates=templates)[0] == "hit"
    assert (cache / "compilers.json").is_file()


@pytest.mark.parametrize(
    "answer", [5, [], {"stamp": 5, "version": "1"}, {"stamp": [[]], "version": "1"}, {"stamp": []}]
)
def test_answers_of_other_types_are_asked_again(
    answer: object, built: jit.Entry, fake: FakeCompiler, templates: Path, cache: Path
) -> None:
    (cache / "compilers.json").write_text(json.dumps({str(fake.path): answer}))
    assert jit.build(HOST, templates=templates)[0] == "hit"


# --- each byte -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [10, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["manifest.json", "variant.so"])
def test_each_flipped_byte_is_noticed(name: str, step: int, built: jit.Entry, cache: Path) -> None:
    store, file, passed = jit.Store(cache), built.path / name, []
    good = file.read_bytes()
    for position in range(0, len(good), step):
        file.write_bytes(good[:position] + bytes([good[position] ^ 128 >> position // step % 8]) + good[position + 1 :])
        try:
            passed.append((position, store.verify(built.path)))
        except CacheError:
            continue
    assert passed == []
    file.write_bytes(good)
    assert store.verify(built.path).manifest == built.manifest


HOSTILE = [
    {"artifact": name} for name in ("../variant.so", "/etc/passwd", "..", ".", "", "a\0b", "a/b", "x" * 300, "-\n")
] + [{"slug": slug} for slug in ("../../x", "/etc", "", "A", "x" * 300)]  # fmt: skip


@pytest.mark.parametrize("change", HOSTILE, ids=repr)
def test_a_hostile_manifest_names_nothing_outside(change: dict[str, str], built: jit.Entry) -> None:
    with pytest.raises(CacheError, match="no plain file or slug"):
        jit.Manifest.read(replace(built.manifest, **change).write())


@pytest.mark.parametrize("change", [{"size": "5"}, {"size": None}, {"fields": [1]}, {"exports": 5}, {"created": "x"}])
def test_a_manifest_of_other_types_is_refused(change: dict[str, object], built: jit.Entry) -> None:
    with pytest.raises(CacheError, match="unreadable"):
        jit.Manifest.read(replace(built.manifest, **change).write())
