"""The common CUDA variants of Quire's kernels, compiled beforehand.

Quire looks into `store/` beside this file when the package is installed; there is nothing to import or to configure. An
entry is used only if its content digest matches what this installation of Quire would compile.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["__version__", "directory", "slugs"]

__version__ = "0.1.0"


def directory() -> Path:
    """The read-only store: `entries/<slug>/<digest>/` with a manifest and a cubin each."""
    return Path(__file__).resolve().parent / "store"


def slugs() -> tuple[str, ...]:
    """The readable names of the variants in the package, sorted."""
    entries = directory() / "entries"
    return tuple(sorted(path.name for path in entries.iterdir())) if entries.is_dir() else ()
