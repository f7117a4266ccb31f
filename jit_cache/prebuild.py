"""Fill src/quire_jit_cache/store with the variants of variants.toml, or check that an installation has them.

    python jit_cache/prebuild.py                 compile what is missing, remove what is no longer wanted
    python jit_cache/prebuild.py --arch 8.9,10.0a,12.0a   for these architectures in place of those of variants.toml
    python jit_cache/prebuild.py --only SLUG     compile this one, beside what is there
    python jit_cache/prebuild.py --check PYTHON  PYTHON's quire must find each variant without compiling

Then `python -m build --wheel jit_cache` packs the store. It needs nvcc and g++, and no GPU. What lies in the store does
not depend on when or how fast it was compiled, so that two builds of one tree make equal wheels. With QUIRE_SIGNING_KEY
each entry is signed; Ed25519 signatures of equal entries are equal.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from hatchling.builders.utils import get_reproducible_timestamp

from quire import cli
from quire.jit import Manifest, Store
from quire.jit.store import MANIFEST
from quire.jit.trust import signing_key

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10; hatchling brings it along
    import tomli as tomllib

HERE = Path(__file__).resolve().parent
STORE = HERE / "src" / "quire_jit_cache" / "store"
TESTED = HERE.parent / "build" / "tests"  #: the cache of `make test`, which has some of the host's variants
LARGEST_MB = 30  #: of one target's entries


def calls(arch: list[str] | None = None) -> Iterator[list[str]]:
    """The arguments of `quire warmup` for each table; `arch`: the architectures in place of the tables' own."""
    tables = tomllib.loads((HERE / "variants.toml").read_text(encoding="utf-8"))
    hosts = tables.pop("host")
    if arch:
        tables = {name: {**table, "arch": arch} for name, table in tables.items()}
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


def wanted_slugs(arch: list[str] | None = None) -> list[str]:
    """The variants of all tables, each once."""
    slugs = set[str]()
    for call in calls(arch):
        said = io.StringIO()
        with redirect_stdout(said):
            status = cli.main(["warmup", "--dry-run", "--json", *call])
        if status:
            sys.exit(f"prebuild: quire warmup {' '.join(call)} ended with {status}")
        slugs.update(variant["slug"] for variant in json.loads(said.getvalue())["variants"])
    return sorted(slugs)


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


def fill(arch: list[str] | None) -> None:
    """Compile every wanted variant into the store, and drop what nothing asked for."""
    variants = []
    for slugs in cuda_before_host(wanted_slugs(arch)):
        borrow(slugs)
        variants += warmup(sys.executable, ["--exact", *slugs, "--store", str(STORE)])
    wanted = [Path(variant["path"]) for variant in variants]
    stale = set(STORE.glob("entries/*/*")) - set(wanted)
    for path in stale:
        shutil.rmtree(path)
        if not any(path.parent.iterdir()):
            path.parent.rmdir()
    built = {variant["slug"]: variant["seconds"] for variant in variants if variant["status"] == "built"}
    key = signing_key()
    for path in wanted:
        settle(path)
        if key is not None:
            Store(STORE, trusted_group=True).sign(path, key)
    report(wanted)
    for machine in ("x86_64", "aarch64"):
        if not can_compile_for(machine):
            print(f"prebuild: NOTICE: no {machine}-linux-gnu-g++, so the store has no host code for {machine}")
    slowest = max(built, key=lambda slug: built[slug], default=None)
    print(
        f"prebuild: {len(wanted)} variants in {STORE}, {len(built)} compiled, {len(stale)} dropped"
        + (f"; the slowest took {built[slowest]:.1f} s: {slowest}" if slowest else "")
    )


def cuda_before_host(slugs: Iterable[str]) -> list[list[str]]:
    """The slugs of GPUs, then those of hosts: beside the tests these come last, when the tests have compiled some."""
    parts: dict[bool, list[str]] = defaultdict(list)
    for slug in slugs:
        parts[slug.split(".")[1].startswith("sm")].append(slug)
    return [parts[on_cuda] for on_cuda in (True, False) if parts[on_cuda]]


def borrow(slugs: Iterable[str]) -> None:
    """Copy what the tests compiled. What does not fit is compiled nevertheless, and dropped."""
    for slug in slugs:
        tested, ours = (root / "entries" / slug for root in (TESTED, STORE))
        if tested.is_dir() and not ours.exists():
            shutil.copytree(tested, ours)


def settle(entry: Path) -> None:
    """Leave of an entry what does not depend on its compile: the artifact, and a manifest without times.

    It counts as made at SOURCE_DATE_EPOCH, or at the time that hatchling gives to a wheel's files.
    """
    manifest = Manifest.read((entry / MANIFEST).read_bytes())
    created = float(get_reproducible_timestamp())
    settled = replace(manifest, seconds=0.0, peak_bytes=None, created=created)
    if settled != manifest:
        unfinished = entry / f"{MANIFEST}.new"
        unfinished.write_text(settled.write(), encoding="utf-8")
        unfinished.replace(entry / MANIFEST)
    for file in entry.iterdir():
        if file.name not in (MANIFEST, manifest.artifact):
            file.unlink()


def report(entries: Iterable[Path]) -> None:
    """The bytes of each variant, the largest last; then those of each target, which must not be too many."""
    sizes = {entry.parent.name: sum(file.stat().st_size for file in entry.iterdir()) for entry in entries}
    targets: dict[str, int] = defaultdict(int)
    for slug, size in sorted(sizes.items(), key=lambda item: item[1]):
        targets[slug.split(".")[1]] += size
        print(f"{size:>9}  {slug}")
    for target, size in targets.items():
        count = sum(slug.split(".")[1] == target for slug in sizes)
        print(f"prebuild: {target}: {count} variants, {size / 1e6:.1f} MB of at most {LARGEST_MB}")
    if any(size > LARGEST_MB * 1e6 for size in targets.values()):
        sys.exit(f"prebuild: a target has more than {LARGEST_MB} MB; leave out of variants.toml what few callers need")


def check(python: str) -> None:
    """Every variant is found where compiling is denied and the user's cache is empty."""
    with tempfile.TemporaryDirectory() as empty:
        variants = warmup(python, ["--exact", *wanted_slugs()], QUIRE_JIT="deny", QUIRE_CACHE_DIR=empty)
    print(f"prebuild: {python} finds all {len(variants)} variants prebuilt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group()
    parser.add_argument("--arch", metavar="ARCH,...", type=lambda text: text.split(","))
    action.add_argument("--only", metavar="SLUG")
    action.add_argument("--check", metavar="PYTHON")
    arguments = parser.parse_args()
    if arguments.check:
        check(arguments.check)
    elif arguments.only:
        warmup(sys.executable, ["--exact", arguments.only, "--store", str(STORE)])
    else:
        fill(arguments.arch)


if __name__ == "__main__":
    main()
