"""Broken environments, each made here: `quire doctor` names what is wrong and what to do, and ends with 1."""

from __future__ import annotations

import json
import os
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.cli import main
from quire.jit import doctor, machine, stores
from stub_compiler import write_stub

Patch = pytest.MonkeyPatch


def script(path: Path, body: str) -> Path:
    """An executable file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def sound(tmp_path: Path, monkeypatch: Patch) -> None:
    """An environment in which nothing is wrong."""
    for name in [name for name in os.environ if name.startswith("QUIRE_")]:
        monkeypatch.delenv(name)
    (tmp_path / "cache").mkdir(mode=0o700)
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("QUIRE_CXX", str(write_stub(tmp_path / "g++")))
    monkeypatch.setattr(stores, "_stores", {})


def nvcc(root: Path, *passes: str, knows: str = "sm_80 sm_90a") -> Path:
    """A toolkit with these passes beside nvcc."""
    for name in passes:
        script(root / name, "exit 0")
    (root / "bin").mkdir(parents=True, exist_ok=True)
    (root / "bin/nvcc.profile").write_text("")
    return script(root / "bin/nvcc", f'case "$1" in --list-gpu-code) echo {knows};; *) echo Cuda; echo V13.0;; esac')


WHOLE = ("bin/ptxas", "nvvm/bin/cicc")


def _misspelt_value(tmp: Path, patch: Patch) -> None:
    patch.setenv("QUIRE_JIT", "maybe")


def _misspelt_name(tmp: Path, patch: Patch) -> None:
    patch.setenv("QUIRE_CACHEDIR", "/data")


def _foreign_cpu(tmp: Path, patch: Patch) -> None:
    patch.setenv("QUIRE_CPU_TARGET", "aarch64" if machine.host_target() != "aarch64" else "x86-64-v3")


def _no_gxx(tmp: Path, patch: Patch) -> None:
    patch.delenv("QUIRE_CXX")
    patch.setenv("PATH", str(tmp))
    (tmp / "g++").unlink()


def _lost_gxx(tmp: Path, patch: Patch) -> None:
    patch.setenv("QUIRE_CXX", "/opt/gone/g++")


def _broken_gxx(tmp: Path, patch: Patch) -> None:
    script(tmp / "g++", "echo 'g++: error while loading shared libraries: libisl.so' >&2; exit 127")


def _c_only(tmp: Path, patch: Patch) -> None:
    script(tmp / "g++", 'case "$1" in -print-prog-name=*) echo cc1plus;; *) echo "gcc (Debian) 12";; esac')


def _no_nvcc(tmp: Path, patch: Patch) -> None:
    patch.setenv("QUIRE_CUDA_ARCH_LIST", "9.0a")
    patch.setenv("QUIRE_NVCC", "/usr/local/cuda-99/bin/nvcc")


def _half_a_toolkit(tmp: Path, patch: Patch) -> None:
    patch.setenv("QUIRE_NVCC", str(nvcc(tmp / "cuda", "bin/ptxas")))


def _old_toolkit(tmp: Path, patch: Patch) -> None:
    patch.setenv("QUIRE_NVCC", str(nvcc(tmp / "cuda", *WHOLE)))
    patch.setenv("QUIRE_CUDA_ARCH_LIST", "12.0")


def _no_ninja(tmp: Path, patch: Patch) -> None:
    patch.setitem(__import__("sys").modules, "ninja", None)
    patch.setenv("PATH", str(tmp))


def _no_driver(tmp: Path, patch: Patch) -> None:
    (tmp / "nvidiactl").write_text("")
    patch.setattr(doctor, "_GPU_FILES", (tmp / "nvidiactl",))
    patch.setattr(doctor.machine, "available", lambda: False)


def _torch_without_cuda(tmp: Path, patch: Patch) -> None:
    patch.setattr(doctor.machine, "present_targets", lambda: ("sm90a",))
    patch.setattr(doctor.importlib.metadata, "version", lambda name: "2.13.0+cpu")
    patch.setenv("QUIRE_NVCC", str(nvcc(tmp / "cuda", *WHOLE)))


def _file_as_root(tmp: Path, patch: Patch) -> None:
    (tmp / "file").write_text("")
    patch.setenv("QUIRE_CACHE_DIR", str(tmp / "file"))


def _open_root(tmp: Path, patch: Patch) -> None:
    (tmp / "cache").chmod(0o777)


def _foreign_root(tmp: Path, patch: Patch) -> None:
    if os.geteuid():
        pytest.skip("only root can give a directory away")
    os.chown(tmp / "cache", 12345, 12345)


def _disk(patch: Patch, **changes: int) -> None:
    """File systems that say something else of themselves, as those of other machines do."""
    real = os.statvfs

    def statvfs(path: object) -> object:
        found = real(path)  # type: ignore[arg-type]
        names = [name for name in dir(found) if name.startswith("f_")]
        return types.SimpleNamespace(**{**{name: getattr(found, name) for name in names}, **changes})

    patch.setattr(doctor.os, "statvfs", statvfs)


def _read_only(tmp: Path, patch: Patch) -> None:
    _disk(patch, f_flag=os.ST_RDONLY)


def _full_disk(tmp: Path, patch: Patch) -> None:
    _disk(patch, f_bavail=100)


def _no_inodes(tmp: Path, patch: Patch) -> None:
    _disk(patch, f_files=1000, f_favail=0)


def _no_memory(tmp: Path, patch: Patch) -> None:
    patch.setattr(doctor.machine, "available_bytes", lambda: 100 << 20)


def _damaged_entry(tmp: Path, patch: Patch) -> None:
    assert main(["warmup", "--exact", f"packbits.{machine.host_target()}.any.v1"]) == 0
    next((tmp / "cache").glob("entries/*/*/*.so")).write_bytes(b"x")


def _sealed_and_empty(tmp: Path, patch: Patch) -> None:
    patch.setenv("QUIRE_JIT", "deny")
    patch.setattr("quire.cli.catalogue.prebuilt_stores", lambda: ())


BROKEN: dict[Callable[[Path, Patch], None], tuple[str, str, str]] = {
    _misspelt_value: ("variables", "QUIRE_JIT: expected auto or deny, got 'maybe'", "unset it"),
    _misspelt_name: ("variables", "QUIRE_CACHEDIR is set, and nothing reads it", "Did you mean QUIRE_CACHE_DIR?"),
    _foreign_cpu: ("variables", "this processor does not run", "unset it"),
    _no_gxx: ("g++", "no g++ was found", "apt-get install g++"),
    _lost_gxx: ("g++", "QUIRE_CXX=/opt/gone/g++ is no program", "set QUIRE_CXX"),
    _broken_gxx: ("g++", "libisl.so", "name another compiler"),
    _c_only: ("g++", "has no cc1plus", "apt-get install g++"),
    _no_nvcc: ("nvcc", "QUIRE_NVCC=/usr/local/cuda-99/bin/nvcc is no program", "nvidia-cuda-nvcc"),
    _half_a_toolkit: ("nvcc", "lacks cicc", "nvvm"),
    _old_toolkit: ("nvcc", "does not know sm120", "Update the CUDA toolkit"),
    _no_ninja: ("ninja", "no ninja was found", "pip install ninja"),
    _no_driver: ("driver", "there is a GPU, but its driver", "--gpus all"),
    _torch_without_cuda: ("torch", "torch 2.13.0+cpu cannot use a GPU", "CUDA index"),
    _file_as_root: ("cache", "file is no directory", "QUIRE_CACHE_DIR"),
    _open_root: ("cache", "may be written by others (mode 0777)", "chmod go-w"),
    _foreign_root: ("cache", "belongs to user 12345", "chown"),
    _read_only: ("cache", "read-only file system", "warm up beforehand"),
    _full_disk: ("cache", "MB left", "quire cache gc"),
    _no_inodes: ("cache", "no inodes left", "Remove files"),
    _no_memory: ("memory", "100 MB are left", "memory limit"),
    _damaged_entry: ("entries", "bytes, expected", "quire cache prune"),
    _sealed_and_empty: ("entries", "QUIRE_JIT=deny forbids compiling, and nothing is compiled", "quire warmup"),
}


@pytest.mark.parametrize("fault", BROKEN, ids=lambda fault: fault.__name__.strip("_"))
def test_a_broken_environment_is_diagnosed(
    fault: Callable[[Path, Patch], None], tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    check, text, fix = BROKEN[fault]
    fault(tmp_path, monkeypatch)
    capsys.readouterr()
    assert main(["doctor", "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    found = [f for f in findings if f["check"] == check and f["status"] == "fault" and text in f["text"]]
    assert found and fix in found[0]["fix"], findings
    follow = {"cache": {"entries"}, "variables": {"g++"}}.get(check, set())  # what is wrong because of it
    assert {f["check"] for f in findings if f["status"] == "fault"} <= {check} | follow, findings


def test_a_sound_environment_has_no_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.endswith("nothing is in the way\n")
