"""Lay out a repository of kernels for the Hugging Face Hub, which `kernels.get_kernel()` loads without installing.

    python jit_cache/prebuild.py          fill the store
    python jit_cache/hub.py build/hub     the library with the store's entries: build/torch-cuda and build/torch-cpu

Each variant of the repository is the whole library, with the templates and with what was compiled beforehand for its
kind of device; other variants of kernels are compiled as in an installation. Two runs over one tree write equal files.
Upload the directory with `hf upload --repo-type kernel`.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10; hatchling brings it along
    import tomli as tomllib

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
STORE = HERE / "src" / "quire_jit_cache" / "store"

README = """\
---
license: apache-2.0
tags:
- kernels
---
# quire-attention

Attention kernels for LLM serving with FlashInfer's surface, compiled just in time.

```python
from kernels import get_kernel

quire = get_kernel("OWNER/quire-attention", version=1)
o = quire.single_prefill_with_kv_cache(q, k, v, causal=True)
```

`build/torch-cuda` has prebuilt variants for compute capability {archs}; with nvcc or NVRTC others are compiled where
they are needed, also for newer devices (`check_arch=False`). `build/torch-cpu` has those of the CPU. It needs the
packages {packages}.
"""

INIT = '''\
"""Quire {version} for the `kernels` package: the library beside this file, as the package `quire`."""

import importlib.util
import sys
from pathlib import Path

HERE, VERSION, NEEDED = Path(__file__).parent, "{version}", {modules}


def _package(name):
    """The package `name` beside this file; its modules import one another by this name."""
    spec = importlib.util.spec_from_file_location(
        name, HERE / name / "__init__.py", submodule_search_locations=[str(HERE / name)]
    )
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _load():
    """The library; one that the program has imported already must be of the same version."""
    missing = [package for package, module in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ImportError(f"quire-attention needs {{', '.join(missing)}}: pip install {{' '.join(missing)}}")
    present = sys.modules.get("quire")
    if present is None:
        _package("quire_jit_cache")
        return _package("quire")
    if present.__version__ != VERSION:
        raise ImportError(f"quire {{present.__version__}} is imported already and this is {{VERSION}}: use one of them")
    return present


_quire = _load()
__all__ = [*_quire.__all__]
globals().update({{name: getattr(_quire, name) for name in __all__}})
'''

#: Packages that are imported by another name than their own.
_MODULES = {"pyelftools": "elftools"}


def project() -> dict[str, Any]:
    """The project's table of pyproject.toml."""
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found


def dependencies() -> dict[str, str]:
    """What the library needs: package -> the module that is imported."""
    names = (re.split(r"[<>=!~; ]", line)[0] for line in project()["dependencies"])
    return {name: _MODULES.get(name, name) for name in names}


def entries(backend: str) -> Iterator[Path]:
    """The entries that a backend takes: the GPU's with host code, which plans for it, or host code alone."""
    for manifest in sorted(STORE.glob("entries/*/*/manifest.json")):
        target = json.loads(manifest.read_text(encoding="utf-8"))["target"]
        if backend == "cuda" or not target.startswith("sm"):
            yield manifest.parent


def archs() -> list[str]:
    """Compute capabilities of the store's cubins: sm90a -> 9.0a."""
    targets = {path.parent.name.split(".")[1] for path in entries("cuda")}
    return [re.sub(r"sm(\d+)(\d)", r"\1.\2", target) for target in sorted(targets) if target.startswith("sm")]


def write_variant(variant: Path, backend: str) -> None:
    """One directory of `build`: the library, the entries, and metadata with a digest of each file."""
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    shutil.copytree(ROOT / "src" / "quire", variant / "quire", ignore=ignored)
    shutil.copytree(ROOT / "templates", variant / "quire" / "templates", ignore=ignored)
    package = STORE.parent
    for path in entries(backend):
        shutil.copytree(path, variant / package.name / path.relative_to(package))
    shutil.copy(package / "__init__.py", variant / package.name / "__init__.py")
    init = INIT.format(version=project()["version"], modules=dependencies())
    (variant / "__init__.py").write_text(init, encoding="utf-8")
    (variant / "metadata.json").write_text(json.dumps(metadata(variant, backend), indent=2) + "\n", encoding="utf-8")


def metadata(variant: Path, backend: str) -> dict[str, Any]:
    """What `kernels` reads of a variant; `id` names the module in a process, so that it follows from the files."""
    files = {
        path.relative_to(variant).as_posix(): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        for path in sorted(variant.rglob("*"))
        if path.is_file() and path.name != "metadata.json"
    }
    digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()[:12]
    name = project()["name"]
    return {
        "id": f"_{name.replace('-', '_')}_{backend}_{digest}",
        "name": name,
        "version": 1,
        "license": project()["license"],
        "python-depends": [],
        "backend": {"type": backend, **({"archs": archs()} if backend == "cuda" else {})},
        "digest": {"algorithm": "sha256", "files": files},
    }


def write(out: Path) -> None:
    """The repository; one that is there is made anew."""
    if not archs():
        sys.exit(f"hub: {STORE} holds no cubin; run `python jit_cache/prebuild.py` first")
    if out.exists() and any(out.iterdir()) and not (out / "build" / "torch-cuda" / "metadata.json").is_file():
        sys.exit(f"hub: {out} holds something else; name an empty directory, or one that this program wrote")
    shutil.rmtree(out, ignore_errors=True)
    for backend in ("cuda", "cpu"):
        write_variant(out / "build" / f"torch-{backend}", backend)
    shutil.copy(ROOT / "LICENSE", out / "LICENSE")
    packages = ", ".join(f"`{name}`" for name in dependencies())
    readme = README.format(archs=", ".join(archs()), packages=packages)
    (out / "README.md").write_text(readme, encoding="utf-8")
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    print(f"hub: {out}: torch-cuda ({', '.join(archs())}) and torch-cpu, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="DIR")
    write(parser.parse_args().out)
