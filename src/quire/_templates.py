"""Where the templates and kernel headers lie: inside an installed wheel, or at the top of a checkout."""

from __future__ import annotations

from pathlib import Path

from quire.errors import CacheError


def root() -> Path:
    """The directory that holds `variant.jinja`, `build.ninja.jinja` and `include/quire/`."""
    here = Path(__file__).absolute()  # of a link itself: the Hugging Face Hub's cache links single files
    candidates = (here.parent / "templates", here.parents[2] / "templates")
    for candidate in candidates:
        if (candidate / "variant.jinja").is_file():
            return candidate
    raise CacheError(
        f"the kernel templates are missing: looked in {' and '.join(map(str, candidates))}; reinstall quire"
    )
