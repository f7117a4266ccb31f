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
from quire.errors import ValidationError
from quire.jit import Spec
from quire.jit.request import make_request
from quire.jit.toolchain import Gxx, Memory, Nvcc


def digest(spec: Spec, templates: Path) -> str:
    return make_request(spec, templates, Memory(None), ask=False).digest


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


@pytest.mark.parametrize("change", [{"warmup": "--other"}, {"slug": "another-name"}])
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


def test_flags_are_in_the_key_without_paths(templates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest(HOST, templates)
    assert "/" not in make_request(HOST, templates, Memory(None), ask=False).parts["flags"]
    monkeypatch.setattr(Gxx, "_COMMON", (*Gxx._COMMON, "-DX"))
    assert digest(HOST, templates) != before


def test_native_never_enters_the_key_unresolved(templates: Path, tmp_path: Path) -> None:
    request = make_request(replace(HOST, target="native"), templates, Memory(None), ask=True)
    assert "-march=native" not in request.flags
    assert any(flag.startswith("-march=") for flag in request.flags)


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
    other = FakeCompiler(tmp_path / "other-g++", fake.log).write(version="3.0")
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
    toolchain = Gxx()
    direct, wrapped = (toolchain.identify(jit.toolchain.Compiler(str(p), True), Memory(None)) for p in (gxx, wrapper))
    assert direct == wrapped


def test_the_memory_forgets_a_replaced_pass(tmp_path: Path) -> None:
    """nvcc is only a driver: replacing ptxas beside it must be noticed."""
    home = tmp_path / "cuda/bin"
    home.mkdir(parents=True)
    for name in ("nvcc", "ptxas"):
        (home / name).write_text("#!/bin/sh\necho release 1\necho build 1\n")
        (home / name).chmod(0o755)
    memory, compiler = Memory(tmp_path / "compilers.json"), jit.toolchain.Compiler(str(home / "nvcc"), True)
    identity = Nvcc().identify(compiler, memory)
    assert Nvcc().recall(compiler, Memory(tmp_path / "compilers.json")) == identity
    (home / "ptxas").write_text("#!/bin/sh\necho another ptxas\n")
    assert Nvcc().recall(compiler, memory) is None
