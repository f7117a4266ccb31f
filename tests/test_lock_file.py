"""Lock files: `quire warmup --lock` writes the digests of entries, `quire warmup --locked` takes no others."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import quire
from quire import cli, jit
from quire.jit.store import MANIFEST, Manifest
from stub_compiler import write_stub

SLUGS = (f"packbits.{jit.host_target()}.any.v1", f"append.{jit.host_target()}.u16.v8")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a compiler that takes no time."""
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("QUIRE_CXX", str(write_stub(tmp_path / "stub-g++")))
    return tmp_path / "cache"


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    """The lock of two variants, which are in the cache."""
    path = tmp_path / "quire.lock"
    assert cli.main(["warmup", *SLUGS, "--exact", "--lock", str(path)]) == 0
    return path


Run = Callable[..., "tuple[int, dict[str, dict[str, Any]]]"]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """The exit status of `quire warmup --locked`, and its answer for each variant."""

    def run(lock: Path, *arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
        capsys.readouterr()
        status = cli.main(["warmup", "--locked", str(lock), *arguments, "--json"])
        text = capsys.readouterr().out
        return status, {one["slug"]: one for one in json.loads(text)["variants"]} if text else {}

    return run


def change(lock: Path, slug: str, **values: str) -> None:
    """Change a pin of the lock."""
    found = json.loads(lock.read_text())
    for pin in found["entries"]:
        if pin["slug"] == slug:
            pin.update(values)
    lock.write_text(json.dumps(found))


def test_a_lock_names_entries_and_is_the_same_each_time(lock: Path, tmp_path: Path) -> None:
    found = json.loads(lock.read_text())
    assert [pin["slug"] for pin in found["entries"]] == sorted(SLUGS)
    for pin in found["entries"]:
        (path,) = (tmp_path / "cache/entries" / pin["slug"]).iterdir()
        manifest = Manifest.read((path / MANIFEST).read_bytes())
        assert (pin["name"], pin["sha256"]) == (path.name, manifest.sha256)
    assert cli.main(["warmup", *reversed(SLUGS), "--exact", "--lock", str(tmp_path / "again.lock")]) == 0
    assert (tmp_path / "again.lock").read_text() == lock.read_text()


def test_what_the_lock_names_is_found_or_built(
    lock: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, found = run(lock)
    assert status == 0 and {one["status"] for one in found.values()} == {"hit"} and set(found) == set(SLUGS)
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "elsewhere"))
    status, found = run(lock)
    assert status == 0 and {one["status"] for one in found.values()} == {"built"}
    assert all((tmp_path / "elsewhere") in Path(one["path"]).parents for one in found.values())
    status, found = run(lock, "--store", str(tmp_path / "store"))
    assert status == 0 and all((tmp_path / "store") in Path(one["path"]).parents for one in found.values())


def test_another_entry_in_the_cache_is_refused(lock: Path, run: Run) -> None:
    change(lock, SLUGS[0], sha256="0" * 64)
    status, found = run(lock)
    assert status == 1
    assert (found[SLUGS[0]]["status"], found[SLUGS[1]]["status"]) == ("failed", "hit")
    assert f"{'0' * 64} in the lock" in found[SLUGS[0]]["error"]


def test_another_build_is_refused_and_not_kept(
    lock: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(lock, SLUGS[0], sha256="0" * 64)
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "elsewhere"))
    status, found = run(lock)
    assert status == 1 and "this machine" in found[SLUGS[0]]["error"]
    assert [path.name for path in (tmp_path / "elsewhere/entries").iterdir()] == [SLUGS[1]]


def test_another_compiler_is_refused_and_named(
    lock: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin = next(pin for pin in json.loads(lock.read_text())["entries"] if pin["slug"] == SLUGS[0])
    change(lock, SLUGS[0], name=pin["name"].partition("-")[0] + "-000000000000", compiler="g++ 99")
    for place in ("cache", "elsewhere"):
        monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / place))
        status, found = run(lock)
        error = found[SLUGS[0]]["error"]
        assert status == 1 and "by g++ 99" in error and pin["compiler"] in error and pin["name"] in error


def test_other_sources_are_refused_before_a_build(lock: Path, run: Run, tmp_path: Path, monkeypatch) -> None:
    change(lock, SLUGS[0], name=f"{'1' * 40}-000000000000")
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "elsewhere"))
    status, found = run(lock)
    assert status == 1 and "its sources are others" in found[SLUGS[0]]["error"]
    assert not (tmp_path / "elsewhere/entries" / SLUGS[0]).exists()


def test_a_dry_run_builds_and_locks_nothing(lock: Path, run: Run, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "elsewhere"))
    status, found = run(lock, "--dry-run")
    assert status == 0 and {one["status"] for one in found.values()} == {"missing"}
    path = tmp_path / "another.lock"
    assert cli.main(["warmup", SLUGS[0], "--exact", "--dry-run", "--lock", str(path)]) == 1
    assert not path.exists()


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", '{"lock": 2, "entries": []}', '{"lock": 1, "entries": []}',
        '{"lock": 1, "entries": [{"slug": "x"}]}', '{"lock": 1, "entries": [{"slug": 1}]}',
    ],
)  # fmt: skip
def test_what_is_no_lock_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "quire.lock").write_text(text)
    assert cli.main(["warmup", "--locked", str(tmp_path / "quire.lock")]) == 2
    assert "expected a file of `quire warmup --lock`" in capsys.readouterr().err


def test_a_lock_decides_alone(lock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([SLUGS[0]], ["--preset", "llama"], ["--head-dim", "64"], ["--lock", "x"], ["--arch", "9.0a"]):
        assert cli.main(["warmup", "--locked", str(lock), *arguments]) == 2
        assert "the lock decides the variants" in capsys.readouterr().err


@pytest.mark.slow
def test_a_lock_has_the_text_of_a_custom_variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process knows the variant from the lock alone."""
    monkeypatch.delenv("QUIRE_CXX")
    variant = quire.Variant(lambda score, q_idx, kv_idx, head: score * 1.25)
    q, k = torch.randn(5, 2, 64), torch.randn(9, 2, 64)
    quire.record(tmp_path / "used.jsonl")
    quire.single_prefill_with_kv_cache(q, k, k, variant=variant)
    quire.record(None)
    lines = [json.loads(line) for line in (tmp_path / "used.jsonl").read_text().splitlines()]
    slug = next(line["slug"] for line in lines if "batch" in line)
    lock = tmp_path / "quire.lock"
    assert cli.main(["warmup", slug, "--exact", "--lock", str(lock)]) == 0
    command = [sys.executable, "-m", "quire", "warmup", "--locked", str(lock), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [one["status"] for one in json.loads(done.stdout)["variants"]] == ["hit"]
