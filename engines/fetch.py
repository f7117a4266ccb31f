"""What the runners execute, into a directory: python fetch.py DIRECTORY

The packages come from the index that pip uses, newest releases, and only the files that are needed are unpacked. TGI and
mini-SGLang are no packages: their repositories are cloned, or taken where DIRECTORY/tgi and DIRECTORY/mini exist.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

PACKAGES = {
    "sglang": ("sglang/srt/", "sglang/kernels/ops/attention/"),
    "vllm": ("vllm/v1/attention/", "vllm/vllm_flash_attn/flash_attn_interface.py"),
}
REPOSITORIES = {"tgi": "huggingface/text-generation-inference", "mini": "sgl-project/mini-sglang"}


def fetch_package(name: str, prefixes: tuple[str, ...], into: Path) -> None:
    """The files of a wheel under `prefixes`, into the directory `name`."""
    if (into / name).is_dir():
        return
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", name]
    subprocess.run([*download, "--dest", str(into)], check=True)
    for wheel in into.glob(f"{name}-*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(into / name, [n for n in archive.namelist() if n.startswith(prefixes)])
        print(f"fetched {wheel.name}")
        wheel.unlink()


def fetch_repository(name: str, repository: str, into: Path) -> None:
    """A shallow clone, into the directory `name`; says so where it cannot be had."""
    if (into / name).is_dir():
        return
    clone = ["git", "clone", "--quiet", "--depth", "1", f"https://github.com/{repository}", str(into / name)]
    if subprocess.run(clone, check=False).returncode:
        print(f"NOT RUN: {repository}, which could not be cloned; put a checkout at {into / name}", file=sys.stderr)


def main() -> None:
    """Fetch what is not there."""
    into = Path(sys.argv[1])
    into.mkdir(parents=True, exist_ok=True)
    for name, prefixes in PACKAGES.items():
        fetch_package(name, prefixes, into)
    for name, repository in REPOSITORIES.items():
        fetch_repository(name, repository, into)


main()
