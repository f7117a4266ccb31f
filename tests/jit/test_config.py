"""Every knob, every spelling."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from quire.errors import ValidationError
from quire.jit import config, machine
from quire.jit.machine import CUDA_TARGETS


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        ("8.0", ["sm80"]),
        ("80", ["sm80"]),
        ("sm80", ["sm80"]),
        ("sm_80", ["sm80"]),
        ("SM_80", ["sm80"]),
        ("compute_80", ["sm80"]),
        ("8.0+PTX", ["sm80"]),
        ("9.0a", ["sm90a"]),
        ("90a", ["sm90a"]),
        ("9.0A", ["sm90a"]),
        ("sm_90a", ["sm90a"]),
        ("10.0", ["sm100"]),
        ("10.0a", ["sm100a"]),
        ("100f", ["sm100f"]),
        ("12.0", ["sm120"]),
        ("12.1a", ["sm121a"]),
        ("90-real", ["sm90"]),
        ("90-virtual", ["sm90"]),
        ("8.0 9.0a", ["sm80", "sm90a"]),
        ("8.0;9.0a", ["sm80", "sm90a"]),
        ("8.0,9.0a", ["sm80", "sm90a"]),
        (" 8.0 ; 9.0a, ", ["sm80", "sm90a"]),
        ("8.0\t8.6\n8.9", ["sm80", "sm86", "sm89"]),
        ("9.0a,9.0a;90a", ["sm90a"]),
        ("Ampere", ["sm80", "sm86"]),
        ("Hopper+PTX", ["sm90a"]),
        ("", []),
    ],
)
def test_arch_list_spellings(text: str, targets: list[str]) -> None:
    assert list(config.parse_arch_list(text)) == targets
    assert all(target in CUDA_TARGETS for target in targets)


@pytest.mark.parametrize("text", ["all", "native", "9", "9.0b", "sm_", "8.0:9.0", "9.0++PTX", "1.2.3"])
def test_arch_list_refuses(text: str) -> None:
    with pytest.raises(ValidationError, match="QUIRE_CUDA_ARCH_LIST"):
        config.parse_arch_list(text)


def test_arch_list_is_none_when_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_CUDA_ARCH_LIST", raising=False)
    assert config.arch_list() is None
    monkeypatch.setenv("QUIRE_CUDA_ARCH_LIST", "8.0;9.0a")
    assert config.arch_list() == ("sm80", "sm90a")


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("QUIRE_JIT", "maybe", config.jit_denied),
        ("QUIRE_MAX_JOBS", "0", config.max_jobs),
        ("QUIRE_MAX_JOBS", "two", config.max_jobs),
        ("QUIRE_LOG", "loud", config.log_level),
        ("QUIRE_TOOLCHAIN", "clang", config.toolchain),
    ],
)
def test_a_bad_value_names_its_variable(name, value, read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValidationError, match=f"{name}: expected .*{value}"):
        read()


def test_values_are_read_at_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_JIT", "deny")
    assert config.jit_denied()
    monkeypatch.setenv("QUIRE_JIT", "")
    assert not config.jit_denied()
    monkeypatch.setenv("QUIRE_LOG", "warning")
    assert config.log_level() == logging.WARNING
    monkeypatch.setenv("QUIRE_MAX_JOBS", "3")
    assert config.max_jobs() == 3


def test_cuda_home_survives_stray_colons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", ":/opt/cuda:")
    assert config.cuda_home() == Path("/opt/cuda")


def test_the_root_is_absolute_even_without_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", "relative/cache")
    assert config.cache_root() == Path.cwd() / "relative/cache"
    monkeypatch.delenv("QUIRE_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert config.cache_root() == tmp_path / ".cache/quire"
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: f"~/.cache/{name}")
    root = config.cache_root()
    assert root.is_absolute()
    assert "~" not in str(root)


def test_a_user_without_a_home_has_a_root(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: str) -> str:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("QUIRE_CACHE_DIR")
    monkeypatch.setattr("platformdirs.user_cache_dir", refuse)
    assert config.cache_root().name == f"quire-{os.geteuid()}"


@pytest.mark.parametrize(
    ("name", "read"), [("QUIRE_CACHE_DIR", config.cache_root), ("QUIRE_RECORD", config.record_path)]
)
def test_the_home_of_nobody_is_refused(name, read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "~no-such-user/x")
    with pytest.raises(ValidationError, match=f"{name}: expected a path .* got '~no-such-user/x'"):
        read()


def test_a_compiler_sees_no_flag_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH"):
        monkeypatch.setenv(name, "-DEVIL")
    environment = config.child_environment(TMPDIR="/x")
    assert "-DEVIL" not in environment.values()
    assert environment["TMPDIR"] == "/x"
    assert environment["LC_ALL"] == "C"


def test_the_cpu_target_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CPU_TARGET", "native")
    assert machine.host_target() == "native"
    monkeypatch.setenv("QUIRE_CPU_TARGET", "z80")
    with pytest.raises(ValidationError, match="QUIRE_CPU_TARGET: expected"):
        machine.host_target()
    other = "x86-64-v3" if machine.supports("aarch64") else "aarch64"
    monkeypatch.setenv("QUIRE_CPU_TARGET", other)
    with pytest.raises(ValidationError, match="does not run"):
        machine.host_target()
    monkeypatch.delenv("QUIRE_CPU_TARGET")
    assert machine.supports(machine.host_target())
