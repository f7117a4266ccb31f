"""The key changes exactly when the artifact can change."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from scale import DEVICE, HOST, FakeCompiler

from quire import jit
from quire.errors import CompileError, ValidationError
from quire.jit import Spec, machine
from quire.jit.compilation import Memory
from quire.jit.toolchain import Gxx, Nvcc, for_target
from quire.jit.unit import make_request, toolchain_digest


def digest(spec: Spec, templates: Path) -> str:
    return make_request(spec, templates).digest


def edit_header_with_older_time(templates: Path) -> None:
    header = templates / "include/quire/core/factor.h"
    header.write_text(header.read_text().replace("2", "3"))
    os.utime(header, (1, 1))


def edit_template(templates: Path) -> None:
    template = templates / "variant.jinja"
    template.write_text(template.read_text() + "\nstatic_assert(sizeof(int) == 4);\n")


def touch_everything(templates: Path) -> None:
    for path in templates.rglob("*"):
        os.utime(path, (4e9, 4e9))


def add_an_unreached_header(templates: Path) -> None:
    (templates / "include/quire/core/other.h").write_text("#pragma once\n")


def edit_ninja_template(templates: Path) -> None:
    template = templates / "build.ninja.jinja"
    template.write_text("# a remark\n" + template.read_text())


@pytest.mark.parametrize("change", [edit_header_with_older_time, edit_template])
def test_content_is_in_the_key(change: Callable[[Path], None], templates: Path) -> None:
    before = digest(HOST, templates)
    change(templates)
    assert digest(HOST, templates) != before


@pytest.mark.parametrize("change", [touch_everything, add_an_unreached_header, edit_ninja_template])
def test_times_and_bystanders_are_not(change: Callable[[Path], None], templates: Path) -> None:
    before = digest(HOST, templates)
    change(templates)
    assert digest(HOST, templates) == before


@pytest.mark.parametrize(
    "change",
    [
        {"constants": (("kThreads", 64),), "asserts": (("kThreads", 64),)},
        {"types": (("T", "double"),)},
        {"entry": "quire_other"},
        {"asserts": ()},
        {"target": "x86-64-v4"},
        {"target": "sm90a"},
    ],
)
def test_fields_that_reach_the_unit_are_in_the_key(change: dict[str, object], templates: Path) -> None:
    assert digest(replace(HOST, **change), templates) != digest(HOST, templates)


@pytest.mark.parametrize("change", [{"warmup": "--other"}, {"slug": "another-name"}, {"fields": (("mask", "none"),)}])
def test_names_are_not(change: dict[str, object], templates: Path) -> None:
    assert digest(replace(HOST, **change), templates) == digest(HOST, templates)


@pytest.mark.parametrize("target", ["sm80", "sm90", "sm100a"])
def test_each_architecture_has_its_own_key(target: str, templates: Path) -> None:
    assert digest(replace(DEVICE, target=target), templates) != digest(DEVICE, templates)


def test_place_and_home_are_not_in_the_key(templates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest(HOST, templates)
    moved = tmp_path / "elsewhere with a blank"
    shutil.copytree(templates, moved)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert digest(HOST, moved) == before


def test_the_request_knows_no_toolchain(templates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another toolchain, with flags of its own, must be able to serve the same request."""
    before = make_request(HOST, templates)
    monkeypatch.setattr(Gxx, "_COMMON", ("-O0",))
    assert make_request(HOST, templates) == before
    assert not [part for part in before.parts.values() if part.startswith("-")]


@pytest.mark.parametrize("target", [HOST.target, "native", "sm80", "sm90a"])
def test_flags_are_in_the_toolchains_half_without_paths(target: str) -> None:
    parts = for_target(target)("/some/where", named=True).parts(target, "1.0")
    assert sorted(parts) == ["flags", "toolchain", "version"]
    assert "/" not in parts["flags"]


def test_a_changed_flag_is_another_entry(
    templates: Path, fake: FakeCompiler, restart: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = jit.build(HOST, templates=templates)[1]
    monkeypatch.setattr(Gxx, "_COMMON", (*Gxx._COMMON, "-DX"))
    restart()
    assert jit.lookup(HOST, templates=templates) is None
    assert jit.explain_miss(HOST, templates=templates) == "flags changed: nothing -> -DX"
    status, second = jit.build(HOST, templates=templates)
    assert (status, fake.compiles) == ("built", 2)
    halves = [entry.path.name.split("-") for entry in (first, second)]
    assert halves[0][0] == halves[1][0]
    assert halves[0][1] != halves[1][1]


def test_any_difference_of_two_toolchains_is_another_half() -> None:
    here = {"toolchain": "nvcc", "version": "13.0", "flags": "-O3"}
    others = [{**here, label: "x"} for label in here]
    assert len({toolchain_digest(parts) for parts in (here, *others)}) == 4


def test_another_toolchain_serves_the_same_request(
    templates: Path, fake: FakeCompiler, restart: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing can be compiled, whoever made an entry is as good as any other."""

    class Another(Gxx):
        name = "another"

        def flags(self, target: str) -> tuple[str, ...]:
            return (f"--for={target}",)

    monkeypatch.setattr(jit.toolchain, "_BUILDS", ((Another, jit.toolchain.HOST_TARGETS),))
    entry = jit.build(HOST, templates=templates)[1]
    assert entry.manifest.toolchain == {
        "toolchain": "another",
        "version": "(Fake) 1.0\nfake-linux\n" + entry.manifest.toolchain["version"].splitlines()[2],
        "flags": f"--for={HOST.target}",
    }
    monkeypatch.undo()
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(entry.path.parents[2]))
    monkeypatch.setenv("QUIRE_CXX", "/nowhere/g++")
    restart()
    assert jit.build(HOST, templates=templates) == ("hit", entry)


def test_another_machines_code_takes_a_cross_compiler(
    templates: Path, fake: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """QUIRE_CXX names this machine's compiler only."""
    target, machine = ("aarch64", "aarch64") if HOST.target != "aarch64" else ("x86-64-v3", "x86_64")
    foreign = replace(HOST, slug="scale.foreign", target=target)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompileError, match=rf"{machine}-linux-gnu-g\+\+ on PATH: nothing there(.|\n)*cross compiler"):
        jit.build(foreign, templates=templates)
    cross = FakeCompiler(tmp_path / f"{machine}-linux-gnu-g++", tmp_path / "cross.log").write(version="7.0")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.defpath}")
    entry = jit.build(foreign, templates=templates)[1]
    assert (cross.compiles, fake.compiles) == (1, 0)
    assert entry.manifest.toolchain["toolchain"] == "g++"
    assert entry.manifest.toolchain["version"].startswith("(Fake) 7.0")


def test_a_toolchain_builds_in_a_directory_of_its_own(templates: Path, fake: FakeCompiler, tmp_path: Path) -> None:
    """`build` needs no store: it takes a request and a directory, and tells the outcome."""
    toolchain = Gxx(str(fake.path), named=True)
    outcome = toolchain.build(make_request(HOST, templates), tmp_path)
    assert outcome.failure is None
    assert b"made by 1.0" in (tmp_path / toolchain.artifact).read_bytes()
    assert outcome.command.startswith(f"{fake.path} -march=")
    assert str(tmp_path) not in outcome.command.removeprefix(str(fake.path))
    fake.write(before="echo 'x.cpp:1:1: error: no' >&2; exit 1")
    failed = toolchain.build(make_request(HOST, templates), tmp_path)
    assert failed.failure is not None
    assert (failed.failure.line, failed.failure.was_killed) == ("x.cpp:1:1: error: no", False)


def test_native_is_this_processor(templates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor of other abilities must not find the entry, whoever compiled it."""
    native = replace(HOST, target="native")
    before = digest(native, templates)
    assert digest(native, templates) == before
    monkeypatch.setattr(machine, "fingerprint", lambda: "another processor")
    assert digest(native, templates) != before


def test_a_slug_must_be_a_file_name(templates: Path) -> None:
    for slug in ("", "Upper", "a/b", "../x", "a" * 201):
        with pytest.raises(ValidationError, match="slug"):
            digest(replace(HOST, slug=slug), templates)


# --- who the compiler is ---------------------------------------------------------------------------------------------


def test_another_compiler_makes_another_entry(templates: Path, fake: FakeCompiler, restart: Callable[[], None]) -> None:
    assert jit.build(HOST, templates=templates)[0] == "built"
    fake.write(version="2.0")
    restart()
    assert jit.lookup(HOST, templates=templates) is None
    status, entry = jit.build(HOST, templates=templates)
    assert (status, fake.compiles) == ("built", 2)
    assert b"made by 2.0" in entry.artifact.read_bytes()


def test_a_compiler_at_another_path_is_asked(
    templates: Path, fake: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jit.build(HOST, templates=templates)
    other = replace(fake, path=tmp_path / "other-g++").write(version="3.0")
    monkeypatch.setenv("QUIRE_CXX", str(other.path))
    assert jit.build(HOST, templates=templates)[0] == "built"


def test_a_wrapper_with_other_flags_is_another_compiler(
    templates: Path, fake: FakeCompiler, restart: Callable[[], None]
) -> None:
    jit.build(HOST, templates=templates)
    fake.write(note="exec g++ -O0, one day")
    restart()
    assert jit.build(HOST, templates=templates)[0] == "built"


def test_a_touched_compiler_is_the_same(templates: Path, fake: FakeCompiler, restart: Callable[[], None]) -> None:
    jit.build(HOST, templates=templates)
    os.utime(fake.path, (1, 1))
    restart()
    assert jit.build(HOST, templates=templates)[0] == "hit"


def test_a_script_that_only_executes_is_looked_through(tmp_path: Path) -> None:
    gxx = shutil.which("g++")
    assert gxx is not None
    wrapper = tmp_path / "nice-g++"
    wrapper.write_text(f'#!/bin/sh\n# the site\'s compiler\nexec {gxx} "$@"\n')
    wrapper.chmod(0o755)
    direct, wrapped = (Gxx(str(path), named=True).version(Memory(None)) for path in (gxx, wrapper))
    assert direct == wrapped


def test_the_memory_forgets_a_replaced_pass(tmp_path: Path) -> None:
    """nvcc is only a driver: replacing ptxas beside it must be noticed."""
    home = tmp_path / "cuda/bin"
    home.mkdir(parents=True)
    for name in ("nvcc", "ptxas"):
        (home / name).write_text("#!/bin/sh\necho release 1\necho build 1\n")
        (home / name).chmod(0o755)
    memory, nvcc = Memory(tmp_path / "compilers.json"), Nvcc(str(home / "nvcc"), named=True)
    version = nvcc.version(memory)
    assert nvcc.known_version(Memory(tmp_path / "compilers.json")) == version
    (home / "ptxas").write_text("#!/bin/sh\necho another ptxas\n")
    assert nvcc.known_version(memory) is None


@pytest.mark.parametrize(
    "text", [b"\xff", b"[1]", b"[" * 100_000, b'{"PATH": 5}', b'{"PATH": {"stamp": 5, "version": "1"}}',
             b'{"PATH": {"stamp": [[5]], "version": "1"}}', b'{"PATH": {"stamp": [[]], "version": "1"}}',
             b'{"PATH": {"stamp": [["PATH", 1, 1]], "version": 1}}'],
)  # fmt: skip
def test_a_damaged_memory_only_costs_asking_again(text: bytes, fake: FakeCompiler, tmp_path: Path) -> None:
    path = tmp_path / "compilers.json"
    path.write_bytes(text.replace(b"PATH", str(fake.path).encode()))
    toolchain = Gxx(str(fake.path), named=True)
    assert toolchain.known_version(Memory(path)) is None
    version = toolchain.version(Memory(path))
    assert toolchain.known_version(Memory(path)) == version


def test_a_compiler_that_says_nothing_is_unusable(tmp_path: Path) -> None:
    mute = tmp_path / "mute"
    mute.write_text("#!/bin/sh\nexit 0\n")
    mute.chmod(0o755)
    for kind in (Gxx, Nvcc):
        with pytest.raises(CompileError, match=r"mute --version failed with exit status 0: it said nothing"):
            kind(str(mute), named=True).version(Memory(None))
