"""What a release needs beside its code.

    python .ci/release.py build OUT [--prebuilt]   the wheels, and what lies beside them
    python .ci/release.py figures [STORE]          the paragraph of figures for the section of CHANGELOG.md
    python .ci/release.py notes [VERSION]          that section

build: OUT gets the wheels, SHA256SUMS, a bill of materials for each wheel, and with QUIRE_SIGNING_KEY the signature of
SHA256SUMS. With --prebuilt also quire-attention-jit-cache, from the store that jit_cache/prebuild.py has filled. Times
in the wheels are SOURCE_DATE_EPOCH, or the time of the last commit. `quire verify-release OUT/*.whl --source .` checks
all of it.

figures: MB of each architecture in the store (default: that of jit_cache), the first call on this machine, compiled and
from the cache, and the share of the presets' variants and of FlashInfer's arguments that are covered.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections import defaultdict
from pathlib import Path

from hatchling.builders.utils import get_reproducible_timestamp

import quire
from quire.cli.aot import PRESETS, Selection, select
from quire.cli.provenance import describe
from quire.jit import Store
from quire.jit.trust import signing_key

ROOT = Path(__file__).resolve().parent.parent
STORE = ROOT / "jit_cache" / "src" / "quire_jit_cache" / "store"

#: Decode of one request in a new process: the seconds of its first call, from plan to result, without importing torch.
FIRST_CALL = """
import time, torch, quire
device = "cuda" if torch.cuda.is_available() else "cpu"
k = torch.randn(300, 2, 128, dtype=torch.bfloat16, device=device)
q = torch.randn(8, 128, dtype=torch.bfloat16, device=device)
start = time.perf_counter()
o = quire.single_decode_with_kv_cache(q, k, k)
o.float().sum().item()
print(time.perf_counter() - start, torch.cuda.get_device_name() if device == "cuda" else "the CPU", sep=";")
"""


def epoch() -> str:
    """Seconds of SOURCE_DATE_EPOCH; else of the last commit; outside of a checkout, what hatchling takes."""
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    if "SOURCE_DATE_EPOCH" not in os.environ and (ROOT / ".git").exists() and shutil.which("git"):
        return subprocess.check_output(command, text=True).strip()
    return str(get_reproducible_timestamp())


def build(out: Path, prebuilt: bool) -> str:
    """Build the wheels into the empty directory `out`; returns SHA256SUMS."""
    if out.exists() and any(out.iterdir()):
        sys.exit(f"release: expected an empty directory, got {out}")
    for source in (ROOT, *([ROOT / "jit_cache"] if prebuilt else [])):
        command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(out), str(source)]
        done = subprocess.run(command, env={**os.environ, "SOURCE_DATE_EPOCH": epoch()}, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"release: {source} cannot be built:\n{done.stdout}{done.stderr}")
    describe(out, signing_key())
    return (out / "SHA256SUMS").read_text(encoding="utf-8")


def sizes(store: Store) -> dict[str, tuple[int, int]]:
    """For each target its variants and their bytes."""
    found: dict[str, list[int]] = defaultdict(list)
    for path, manifest in store.manifests():
        found[manifest.target].append(sum(file.stat().st_size for file in path.iterdir()))
    return {target: (len(bytes_), sum(bytes_)) for target, bytes_ in sorted(found.items())}


def first_calls() -> tuple[float, float, str]:
    """Seconds of a first call that compiles, of one that finds its variants in a cache, and the device."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {
            **os.environ,
            "QUIRE_CACHE_DIR": cache,
            "QUIRE_SYSTEM_CACHE": f"{cache}/none",
            "QUIRE_LOG": "off",
        }
        command = [sys.executable, "-c", FIRST_CALL]
        said = [subprocess.check_output(command, env=environment, text=True).strip().split(";") for _ in range(2)]
    return float(said[0][0]), float(said[1][0]), said[0][1]


def of_presets(store: Store) -> tuple[int, int]:
    """How many of the presets' variants, for the GPUs of the store, are in it, and how many there are."""
    targets = tuple(target for target in sizes(store) if target.startswith("sm"))
    chosen = (Selection(**{**preset, "targets": targets}) for preset in PRESETS.values()) if targets else ()
    wanted = {spec.slug for selection in chosen for spec in select(selection) if spec.target in targets}
    return len(wanted & set(store.slugs())), len(wanted)


def of_arguments() -> tuple[int, int]:
    """How many arguments of FlashInfer's functions have a use or are permissions, and how many there are."""
    rows = re.findall(r"^\| (?:\*\*)?[\w*]+(?:\*\*)? \| (\w+)", (ROOT / "docs/surface.md").read_text(), re.MULTILINE)
    return sum(word != "refused" for word in rows), len(rows)


def figures(store: Store) -> str:
    """The paragraph."""
    parts = [f"{target} {size / 1e6:.1f} MB ({count} variants)" for target, (count, size) in sizes(store).items()]
    compiled, found, device = first_calls()
    (there, wanted), (taken, arguments) = of_presets(store), of_arguments()
    text = f"Figures: prebuilt are {', '.join(parts) or 'no variants'}. "
    if wanted:
        text += f"These are {there} of the {wanted} variants ({there / wanted:.0%}) of all presets. "
    text += (
        f"A first call on {device} takes {compiled:.2f} s where it compiles and {found:.2f} s where the cache has its "
        f"variants. Of {arguments} arguments of FlashInfer's functions {taken} ({taken / arguments:.0%}) are taken."
    )
    return textwrap.fill(text, 140)


def notes(version: str) -> str:
    """The section of a version in CHANGELOG.md."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(rf"^## \[{re.escape(version)}\].*?\n(.*?)(?=^## \[|\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None or not found.group(1).strip():
        sys.exit(f"release: CHANGELOG.md has no section [{version}], or an empty one")
    return found.group(1).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(required=True, dest="action")
    built = actions.add_parser("build")
    built.add_argument("out", type=Path, metavar="OUT")
    built.add_argument("--prebuilt", action="store_true")
    actions.add_parser("figures").add_argument("store", type=Path, nargs="?", default=STORE, metavar="STORE")
    actions.add_parser("notes").add_argument("version", nargs="?", default=quire.__version__, metavar="VERSION")
    given = parser.parse_args()
    if given.action == "build":
        print(build(given.out.absolute(), given.prebuilt), end="")
    else:
        print(
            figures(Store(given.store.absolute(), readonly=True)) if given.action == "figures" else notes(given.version)
        )


if __name__ == "__main__":
    main()
