"""Refuse a store that holds a variant which spills, was compiled with lost performance, or does not use tensor cores.

    python .ci/lint_cubins.py STORE

Exit 1 and one line for each fault. The instruction check needs cuobjdump (from the CUDA toolkit or its wheel); without
one it says so, and fails if CI=true.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

#: ptxas: wgmma serialised or setmaxnreg ignored, C7508 to C7518.
LOST_PERFORMANCE = re.compile(r"C75(0[89]|1[0-8])")
#: The tensor-core instruction that a kernel family must show in its machine code.
TENSOR_CORE = {
    "attention_decode": re.compile(r"\bHMMA\."),
    "attention_fa2": re.compile(r"\bHMMA\."),
    "attention_fa3": re.compile(r"\bHGMMA\."),
}


def manifests(store: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """(directory, manifest) of every cubin in the store."""
    for path in sorted(store.glob("entries/*/*/manifest.json")):
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["target"].startswith("sm"):
            yield path.parent, manifest


def faults(manifest: dict[str, Any]) -> Iterator[str]:
    """What the compiler reported against this variant."""
    if manifest["spills"] is None:
        yield "the manifest does not say whether registers spill"
    elif manifest["spills"]:
        yield f"{manifest['spills']} bytes of registers spill ({manifest['registers']} registers)"
    yield from (f"lost performance: {line}" for line in manifest["warnings"] if LOST_PERFORMANCE.search(line))
    yield from (f"warning: {line}" for line in manifest["warnings"] if not LOST_PERFORMANCE.search(line))


def find_cuobjdump() -> str | None:
    """On PATH, beside nvcc, or in the wheel nvidia-cuda-cuobjdump."""
    site = Path(sysconfig.get_path("purelib"))
    candidates = sorted(site.glob("nvidia/*/bin/cuobjdump"))
    if nvcc := shutil.which(os.environ.get("QUIRE_NVCC", "nvcc")):
        candidates.insert(0, Path(nvcc).resolve().parent / "cuobjdump")
    return shutil.which("cuobjdump") or next((str(c) for c in candidates if os.access(c, os.X_OK)), None)


def missing_instruction(cuobjdump: str, directory: Path, manifest: dict[str, Any]) -> str | None:
    """Says so if the machine code lacks its family's tensor-core instruction."""
    wanted = TENSOR_CORE.get(manifest["slug"].split(".")[0])
    if wanted is None:
        return None
    here = {**os.environ, "PATH": f"{Path(cuobjdump).parent}{os.pathsep}{os.environ['PATH']}"}  # it runs nvdisasm
    listing = subprocess.run(
        [cuobjdump, "-sass", str(directory / manifest["artifact"])], capture_output=True, text=True, env=here
    )
    if listing.returncode:
        return f"cuobjdump failed: {listing.stderr.strip() or listing.stdout.strip()}"
    return None if wanted.search(listing.stdout) else f"no {wanted.pattern.strip(chr(92) + 'b.')} in its machine code"


def main(store: Path) -> int:
    """The number of faults."""
    found = list(manifests(store))
    if not found:
        print(f"lint: {store} holds no cubin", file=sys.stderr)
        return 1
    lines = [f"{manifest['slug']}: {fault}" for _, manifest in found for fault in faults(manifest)]
    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        print("lint: NOTICE: no cuobjdump, the machine code was not looked at (pip install nvidia-cuda-cuobjdump)")
        if os.environ.get("CI") == "true":
            lines.append("cuobjdump is missing, and CI=true")
    else:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            answers = pool.map(lambda each: missing_instruction(cuobjdump, *each), found)
            lines += [f"{each[1]['slug']}: {answer}" for each, answer in zip(found, answers, strict=True) if answer]
    for line in lines:
        print(f"lint: {line}", file=sys.stderr)
    most = max(manifest["registers"] or 0 for _, manifest in found)
    slowest = max(found, key=lambda each: each[1]["seconds"])[1]
    print(
        f"lint: {len(found)} cubins, {len(lines)} faults, at most {most} registers, "
        f"slowest compile {slowest['seconds']:.2f} s ({slowest['slug']})"
    )
    return len(lines)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(1 if main(Path(sys.argv[1])) else 0)
