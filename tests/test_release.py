"""Releases: wheels that are equal whoever builds them, and `quire verify-release`, which finds what was changed."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import quire
from quire import cli, jit
from quire.cli import new_parser
from quire.cli.aot import spec_of
from quire.cli.provenance import SIGNED, SUMS, Wheel, describe
from quire.jit.toolchain import Nvcc
from quire.jit.trust import PrivateKey

ROOT = Path(__file__).resolve().parent.parent
EPOCH = "1700000000"
FA3 = "attention_fa3.sm90a.bf16-bf16-bf16.d128-128.ragged.none.m128"
PARTS = ("src", "templates", "pyproject.toml", "README.md", "LICENSE")
PARTS_OF_CACHE = ("src", "pyproject.toml", "README.md", "LICENSE", "hatch_build.py")


def script(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def copy_sources(target: Path, root: Path = ROOT, parts: tuple[str, ...] = PARTS) -> Path:
    """The sources of a wheel, as a new checkout with this process's umask."""
    target.mkdir(parents=True)
    for part in parts:
        source = root / part
        ignored = shutil.ignore_patterns("__pycache__", "store")
        if source.is_dir():
            shutil.copytree(source, target / part, copy_function=shutil.copyfile, ignore=ignored)
        else:
            shutil.copyfile(source, target / part)
    return target


def build(source: Path, out: Path, umask: int = 0o022) -> Path:
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(out), str(source)]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": EPOCH}
    subprocess.run(command, check=True, capture_output=True, env=environment, umask=umask)
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of two prebuilt entries, settled as jit_cache/prebuild.py does."""
    root = tmp_path_factory.mktemp("prebuilt") / "store"
    settle = script("jit_cache/prebuild.py").settle
    for slug in (f"packbits.{jit.host_target()}.any.v1", f"append.{jit.host_target()}.u16.v8"):
        settle(jit.build(spec_of(slug), store=jit.Store(root))[1].path)
    return root


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Path:
    """A directory with both wheels."""
    base = tmp_path_factory.mktemp("release")
    build(copy_sources(base / "quire"), base / "a")
    cache = copy_sources(base / "cache", ROOT / "jit_cache", PARTS_OF_CACHE)
    shutil.copytree(store / "entries", cache / "src/quire_jit_cache/store/entries")
    build(cache, base / "b")
    dist = base / "dist"
    dist.mkdir()
    for wheel in base.glob("[ab]/*.whl"):
        wheel.rename(dist / wheel.name)
    return dist


@pytest.fixture
def dist(built: Path, tmp_path: Path) -> Path:
    """The wheels, described and not signed."""
    shutil.copytree(built, tmp_path / "dist")
    describe(tmp_path / "dist", None)
    return tmp_path / "dist"


def run(capsys: pytest.CaptureFixture[str], dist: Path, *arguments: str) -> tuple[int, list[str]]:
    """The exit status of `quire verify-release`, and the faults that it names."""
    capsys.readouterr()
    wheels = [str(wheel) for wheel in sorted(dist.glob("*.whl"))]
    status = cli.main(["verify-release", *wheels, *arguments, "--json"])
    answer = json.loads(capsys.readouterr().out)
    return status, [fault for wheel in answer["wheels"] for fault in wheel["faults"]]


# --- equal wheels and cubins -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_wheels_are_equal_in_other_directories_umasks_and_times(built: Path, tmp_path: Path, store: Path) -> None:
    digests = {wheel.name: hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in built.glob("*.whl")}
    before = os.umask(0o077)
    try:
        source = copy_sources(tmp_path / "a longer name of a directory/quire")
        cache = copy_sources(tmp_path / "another/cache", ROOT / "jit_cache", PARTS_OF_CACHE)
        place = cache / "src/quire_jit_cache/store/entries"
        shutil.copytree(store / "entries", place, copy_function=shutil.copyfile)
    finally:
        os.umask(before)
    for file in (*source.rglob("*"), *cache.rglob("*")):
        os.utime(file, (1, 1))
    for wheel in (build(source, tmp_path / "out", 0o077), build(cache, tmp_path / "out-cache", 0o002)):
        assert hashlib.sha256(wheel.read_bytes()).hexdigest() == digests[wheel.name]


@pytest.mark.slow
@pytest.mark.skipif(Nvcc.find() is None, reason="there is no nvcc")
@pytest.mark.parametrize(
    "slug", ["packbits.sm90a.any.v1", "attention_fa3.sm90a.bf16-bf16-bf16.d128-128.ragged.none.m128"]
)
def test_nvcc_makes_equal_cubins_in_other_directories(slug: str, tmp_path: Path) -> None:
    (tmp_path / "a longer name of a directory").mkdir()
    stores = [jit.Store(tmp_path / "one"), jit.Store(tmp_path / "a longer name of a directory/two")]
    entries = [jit.build(spec_of(slug), store=store)[1] for store in stores]
    assert entries[0].path != entries[1].path
    assert entries[0].artifact.read_bytes() == entries[1].artifact.read_bytes()
    settle = script("jit_cache/prebuild.py").settle
    for entry in entries:
        settle(entry.path)
    one, two = ({file.name: file.read_bytes() for file in entry.path.iterdir()} for entry in entries)
    assert one == two, "what the wheel of prebuilt variants has of them"


# --- verify-release --------------------------------------------------------------------------------------------------


def test_a_release_is_as_it_was(dist: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, dist, "--source", str(ROOT), "--recompile", "1") == (0, [])
    listed = dict(reversed(line.split("  ")) for line in (dist / SUMS).read_text().splitlines())
    assert set(listed) == {file.name for file in dist.iterdir()} - {SUMS}
    subprocess.run(["sha256sum", "--check", "--strict", SUMS], cwd=dist, check=True, capture_output=True)


def test_the_bill_of_materials_names_files_requirements_and_compilers(dist: Path) -> None:
    for wheel in dist.glob("*.whl"):
        bill = json.loads(wheel.with_name(f"{wheel.name}.cdx.json").read_text())
        assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
        component = bill["metadata"]["component"]
        assert component["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}]
        assert component["licenses"] == [{"license": {"id": "Apache-2.0"}}]
        files = {one["name"]: one for one in bill["components"] if one["type"] == "file"}
        assert sorted(files) == Wheel(wheel).members
        needed = {one["name"] for one in bill["components"] if one["type"] == "library" and one["scope"] == "required"}
        compiled = [file for file in files.values() if "properties" in file]
        if "jit_cache" in wheel.name:
            assert needed == {"quire-attention"} and len(compiled) == 2
            properties = {p["name"]: p["value"] for p in compiled[0]["properties"]}
            assert properties["quire:target"] == jit.host_target() and properties["quire:compiler"].startswith("g++ ")
        else:
            assert {"torch", "jinja2"} <= needed and not compiled


def changed_member(dist: Path, part: str, change: Callable[[bytes], bytes], wheel: str) -> None:
    """Write a wheel again with one member changed, and describe it anew, as somebody who replaces a release would."""
    (path,) = dist.glob(f"{wheel}*.whl")
    with zipfile.ZipFile(path) as archive:
        members = [(info, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for info, data in members:
            archive.writestr(info, change(data) if info.filename.endswith(part) else data)


def flip(data: bytes) -> bytes:
    return data[:40] + bytes([data[40] ^ 1]) + data[41:]


def _flip_wheel(dist: Path) -> None:
    (path,) = dist.glob("quire_attention-*.whl")
    path.write_bytes(path.read_bytes() + b"\0")


def edit(dist: Path, pattern: str, old: str, new: str) -> None:
    for file in dist.glob(pattern):
        file.write_text(file.read_text().replace(old, new))


def describe_with(dist: Path, part: str, wheel: str) -> None:
    changed_member(dist, part, flip, wheel)
    describe(dist, None)


TAMPERED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "the wheel": (_flip_wheel, "its sha256 is"),
    "the sums": (lambda d: edit(d, SUMS, "a", "b"), f"{SUMS} says"),
    "no sums": (lambda d: (d / SUMS).unlink(), f"there is no {SUMS}"),
    "the bill": (lambda d: edit(d, "*.json", "1.6", "1.5"), "another than"),
    "no bill": (lambda d: [f.unlink() for f in d.glob("*.json")], "is missing"),
    "a member": (lambda d: describe_with(d, "quire/errors.py", "quire_attention-"), "errors.py is not the file"),
    "an artifact": (
        lambda d: describe_with(d, ".so", "quire_attention_jit_cache"),
        "artifact's sha256 is not the manifest's",
    ),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_what_was_changed_is_named(what: str, dist: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, message = TAMPERED[what]
    change(dist)
    status, faults = run(capsys, dist)
    assert status == 1 and any(message in fault for fault in faults), faults


def test_a_signed_release(dist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key, other = PrivateKey.generate("release"), PrivateKey.generate("release")
    public = key.write(tmp_path / "release.key", None)
    keys = ("--keys", str(public))
    (only,) = dist.glob("quire_attention_jit_cache*.whl")
    only.unlink()  # whose entries are not signed
    assert "it is not signed" in "".join(run(capsys, dist, *keys)[1])
    describe(dist, key)
    assert run(capsys, dist, *keys) == (0, [])
    describe(dist, other)
    status, faults = run(capsys, dist, *keys)
    assert status == 1 and "does not fit" in faults[0]
    describe(dist, key)
    with (dist / SUMS).open("a") as sums:
        sums.write(f"{'0' * 64}  evil.whl\n")
    status, faults = run(capsys, dist, *keys)
    assert status == 1 and "does not fit" in faults[0]
    assert (dist / SIGNED).is_file()


def test_entries_of_a_signed_release_are_signed(dist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = PrivateKey.generate("release")
    public = key.write(tmp_path / "release.key", None)
    describe(dist, key)
    status, faults = run(capsys, dist, "--keys", str(public))
    assert status == 1 and len(faults) == 2 and all("it is not signed" in fault for fault in faults)


def test_a_rebuild_names_the_files_that_differ(dist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkout = copy_sources(tmp_path / "checkout")
    shutil.copytree(ROOT / "jit_cache", checkout / "jit_cache", ignore=shutil.ignore_patterns("store"))
    with (checkout / "src/quire/errors.py").open("a") as file:
        file.write("# another line\n")
    status, faults = run(capsys, dist, "--source", str(checkout))
    assert (status, faults) == (1, ["rebuilt from the sources, quire/errors.py is different"])
    assert cli.main(["verify-release", *map(str, dist.glob("*.whl")), "--source", str(tmp_path)]) == 2


def test_what_is_no_wheel_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.whl").write_text("x")
    status, faults = run(capsys, tmp_path)
    assert (status, faults) == (1, [f"expected a wheel, got something else at {tmp_path}/x.whl"])


# --- the script of a release, and what a repository has beside its code ----------------------------------------------


def test_the_paragraph_of_figures(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = script(".ci/release.py")
    monkeypatch.setattr(release, "first_calls", lambda: (1.234, 0.056, "the CPU"))
    text = " ".join(release.figures(jit.Store(store)).split())
    size = sum(file.stat().st_size for file in store.glob("entries/*/*/*"))
    assert f"prebuilt are {jit.host_target()} {size / 1e6:.1f} MB (2 variants)" in text
    assert "A first call on the CPU takes 1.23 s where it compiles and 0.06 s where the cache has" in text
    taken, arguments = release.of_arguments()
    assert 0 < taken < arguments and f"Of {arguments} arguments" in text


@pytest.mark.slow
def test_first_calls_are_measured() -> None:
    compiled, found, device = script(".ci/release.py").first_calls()
    assert 0 < found < compiled and device


def test_coverage_counts_variants_of_presets(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = script(".ci/release.py")
    assert release.of_presets(jit.Store(store)) == (0, 0), "it counts code for GPUs"
    monkeypatch.setattr(release, "sizes", lambda _: {"sm90a": (1, 1)})
    there, wanted = release.of_presets(jit.Store(store))
    assert there == 0 and wanted > 100


def test_a_version_has_notes_and_the_citation_names_it() -> None:
    assert "\n### Added\n" in f"\n{script('.ci/release.py').notes(quire.__version__)}"
    assert f"\nversion: {quire.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    with pytest.raises(SystemExit, match=r"no section \[9.9.9\]"):
        script(".ci/release.py").notes("9.9.9")


def test_files_of_yaml_can_be_read_and_name_what_there_is() -> None:
    files = [*(ROOT / ".github").rglob("*.yml"), ROOT / ".pre-commit-config.yaml", ROOT / "CITATION.cff"]
    found = {file.name: yaml.safe_load(file.read_text(encoding="utf-8")) for file in files}
    steps = [step.get("run", "") for step in found["ci.yml"]["jobs"]["run"]["steps"]]
    assert ".ci/run" in steps
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "constraints-dev.txt").read_text(), re.MULTILINE))
    revisions = {repo["repo"].rpartition("/")[2]: repo.get("rev") for repo in found[".pre-commit-config.yaml"]["repos"]}
    assert revisions["ruff-pre-commit"] == f"v{pinned['ruff']}"
    assert revisions["mirrors-clang-format"] == f"v{pinned['clang-format']}"


def test_the_dockerfile_names_what_there_is() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    for words in re.findall(r"^COPY (?!--)(.*) \S+$", text, re.MULTILINE):
        for name in words.split():
            assert (ROOT / name).exists() and f"!{name}\n" in (ROOT / ".dockerignore").read_text(), name
    for arguments in re.findall(r'WARMUP="(.*?)"', text):
        assert new_parser().parse_args(["warmup", *arguments.split()]).run
    assert new_parser().parse_args(["cache", "verify"]).run
