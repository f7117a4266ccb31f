"""Fill src/quire_jit_cache/store with the variants of variants.toml, or check that an installation has them.

    python jit_cache/prebuild.py                 compile what is missing, remove what is no longer wanted
    python jit_cache/prebuild.py --only SLUG     compile this one, beside what is there
    python jit_cache/prebuild.py --check PYTHON  PYTHON's quire must find each variant without compiling

Then `python -m build --wheel jit_cache` packs the store. It needs nvcc and g++, and no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10; hatchling brings it along
    import tomli as tomllib

HERE = Path(__file__).resolve().parent
STORE = HERE / "src" / "quire_jit_cache" / "store"


def calls() -> Iterator[list[str]]:
    """The arguments of `quire warmup` for each table."""
    tables = tomllib.loads((HERE / "variants.toml").read_text(encoding="utf-8"))
    hosts = tables.pop("host")
    if platform.machine() not in hosts:
        sys.exit(f"prebuild: variants.toml has no [host.{platform.machine()}]; expected one of {', '.join(hosts)}")
    for table in (*tables.values(), *(hosts[machine] for machine in hosts if can_compile_for(machine))):
        yield [*table.get("slugs", []), *options(table)]


def can_compile_for(machine: str) -> bool:
    """Whether host code for `machine` can be compiled here, be it with a cross compiler."""
    return machine == platform.machine() or shutil.which(f"{machine}-linux-gnu-g++") is not None


def options(table: dict[str, Any]) -> list[str]:
    """{"head-dim": [64, 128]} -> ["--head-dim", "64,128"]."""
    given = {name: value for name, value in table.items() if name != "slugs"}
    return [word for name, value in given.items() for word in (f"--{name}", ",".join(map(str, value)))]


def warmup(python: str, arguments: list[str], **environment: str) -> list[dict[str, Any]]:
    """What `quire warmup --json` says of each variant; ends the program if one failed."""
    command = [python, "-m", "quire", "warmup", "--json", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})
    try:
        variants = json.loads(done.stdout)["variants"]
    except (json.JSONDecodeError, KeyError):
        sys.exit(f"prebuild: {' '.join(command)} exited with {done.returncode} and printed no result: {done.stdout}")
    failed = [variant for variant in variants if variant["status"] == "failed"]
    for variant in failed:
        print(f"prebuild: {variant['slug']}: {variant['error']}", file=sys.stderr)
    if failed or done.returncode:
        sys.exit(f"prebuild: {len(failed)} of {len(variants)} variants failed")
    return variants


def fill() -> None:
    """Compile every wanted variant into the store, and drop what nothing asked for."""
    variants = [variant for call in calls() for variant in warmup(sys.executable, [*call, "--store", str(STORE)])]
    wanted = {Path(variant["path"]) for variant in variants}
    stale = [path for path in STORE.glob("entries/*/*") if path not in wanted]
    for path in stale:
        shutil.rmtree(path)
        if not any(path.parent.iterdir()):
            path.parent.rmdir()
    built = sum(variant["status"] == "built" for variant in variants)
    missing = [machine for machine in ("x86_64", "aarch64") if not can_compile_for(machine)]
    for machine in missing:
        print(f"prebuild: NOTICE: no {machine}-linux-gnu-g++, so the store has no host code for {machine}")
    size = sum(file.stat().st_size for path in wanted for file in path.iterdir())
    print(
        f"prebuild: {len(wanted)} variants in {STORE}, {built} compiled, {len(stale)} dropped, {size / 2**20:.1f} MiB"
    )


def check(python: str) -> None:
    """Every variant is found where compiling is denied and the user's cache is empty."""
    with tempfile.TemporaryDirectory() as empty:
        variants = [
            variant for call in calls() for variant in warmup(python, call, QUIRE_JIT="deny", QUIRE_CACHE_DIR=empty)
        ]
    print(f"prebuild: {python} finds all {len({variant['slug'] for variant in variants})} variants prebuilt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--only", metavar="SLUG")
    action.add_argument("--check", metavar="PYTHON")
    arguments = parser.parse_args()
    if arguments.check:
        check(arguments.check)
    elif arguments.only:
        warmup(sys.executable, ["--exact", arguments.only, "--store", str(STORE)])
    else:
        fill()


if __name__ == "__main__":
    main()
