"""The repository of kernels for the Hugging Face Hub: whole, equal when written again, and loaded by `kernels`."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quire.cli import aot
from quire.jit import Store, host_target
from test_ci import ROOT, script

USE = """
import sys
from pathlib import Path
import torch
from kernels import get_local_kernel

kernel = get_local_kernel(Path(sys.argv[1]), backend="cpu")
bits = kernel.packbits(torch.tensor([1, 0, 0, 0, 0, 0, 0, 0, 1], dtype=torch.bool))
print(sys.modules["quire"].__file__, *bits.tolist())
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one variant of this processor, and one that stands for a GPU's."""
    scripts = [script("jit_cache/prebuild.py"), script("jit_cache/hub.py")]
    package = tmp_path / "quire_jit_cache"
    shutil.copytree(ROOT / "jit_cache/src/quire_jit_cache", package, ignore=shutil.ignore_patterns("store"))
    slug = f"packbits.{host_target()}.any.v1"
    for built in aot.warm([aot.spec_of(slug)], store=Store(package / "store")):
        scripts[0].settle(Path(built.path))
    gpu = package / "store/entries/merge.sm90a.fp16.v8/digest"
    gpu.mkdir(parents=True)
    (gpu / "manifest.json").write_text('{"target": "sm90a"}')
    monkeypatch.setattr(scripts[1], "STORE", package / "store")
    scripts[1].write(tmp_path / "hub")
    return tmp_path / "hub"


def test_the_repository_of_kernels(hub: Path) -> None:
    """Each variant has its entries, the library, and metadata with a digest of each file."""
    slugs = {}
    for backend in ("cuda", "cpu"):
        variant = hub / "build" / f"torch-{backend}"
        described = json.loads((variant / "metadata.json").read_text())
        assert described["backend"]["type"] == backend
        files = {str(path.relative_to(variant)) for path in variant.rglob("*") if path.is_file()}
        assert set(described["digest"]["files"]) == files - {"metadata.json"}
        assert {"__init__.py", "quire/__init__.py", "quire/templates/variant.jinja"} <= files
        slugs[backend] = {path.name.split(".")[1] for path in variant.glob("quire_jit_cache/store/entries/*")}
    assert slugs == {"cuda": {"sm90a", host_target()}, "cpu": {host_target()}}
    assert json.loads((hub / "build/torch-cuda/metadata.json").read_text())["backend"]["archs"] == ["9.0a"]


def test_the_repository_overwrites_itself_only(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = script("jit_cache/hub.py")
    monkeypatch.setattr(program, "STORE", tmp_path / "quire_jit_cache/store")
    before = {path: path.read_bytes() for path in hub.rglob("*") if path.is_file()}
    program.write(hub)
    assert {path: path.read_bytes() for path in hub.rglob("*") if path.is_file()} == before
    with pytest.raises(SystemExit, match="holds something else"):
        program.write(tmp_path)
    monkeypatch.setattr(program, "STORE", tmp_path / "empty")
    with pytest.raises(SystemExit, match="holds no cubin"):
        program.write(hub)


@pytest.mark.slow
@pytest.mark.parametrize("links", [False, True], ids=["files", "links"])
def test_the_kernels_package_loads_it(hub: Path, tmp_path: Path, links: bool) -> None:
    """With what was prebuilt, and no leave to compile; also from a cache whose files are links, as the Hub's are."""
    rust = pytest.importorskip("kernels._rust", reason="kernels is not installed")
    variant = hub / "build/torch-cpu"
    told = rust.Metadata.read_from_file(variant / "metadata.json")
    told.digest.validate(rust.Digest.hash_variant(rust.DigestAlgorithm.SHA256, variant))
    if links:
        for path in [path for path in hub.rglob("*") if path.is_file()]:
            blob = tmp_path / hashlib.sha256(str(path).encode()).hexdigest()
            path.replace(blob)
            path.symlink_to(blob)
    environment = {**os.environ, "QUIRE_JIT": "deny", "QUIRE_CACHE_DIR": str(tmp_path / "empty"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", USE, str(hub)], cwd=tmp_path, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(variant / "quire/__init__.py"), "128", "128"], done.stderr
