"""Refuse a store with a variant that spills, lost performance, does not use tensor cores, or differs in each build.

    python .ci/lint_cubins.py STORE

Exit 1 and one line for each fault. The instruction check needs cuobjdump (from the CUDA toolkit or its wheel); without
one it says so, and fails if CI=true.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elftools.elf.elffile import ELFFile

#: ptxas: wgmma serialised or setmaxnreg ignored, C7508 to C7518.
LOST_PERFORMANCE = re.compile(r"C75(0[89]|1[0-8])")
#: The tensor-core instruction that a kernel family must show in its machine code.
TENSOR_CORE = {
    "attention_decode": re.compile(r"\bHMMA\."),
    "attention_fa2": re.compile(r"\bHMMA\."),
    "attention_fa3": re.compile(r"\bHGMMA\."),
    "attention_fa3_fp8": re.compile(r"\bQGMMA\."),
    "attention_wide": re.compile(r"\bHMMA\."),
    "attention_mla_decode": re.compile(r"\bHGMMA\."),
    "attention_mla_fa2": re.compile(r"\bHMMA\."),
    "attention_mla_fa3": re.compile(r"\bHGMMA\."),
    "mqa_logits": re.compile(r"\bHMMA\."),
    "pod": re.compile(r"\bHGMMA\."),
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


def own_names(cubin: Path) -> Iterator[str]:
    """What to say of a constant of one unit, whose name contains a number that is another one in each build."""
    if cubin.exists() and b"_INTERNAL_" in cubin.read_bytes():
        yield "a name with _INTERNAL_ differs from build to build: no constant or static variable beside functions"


def find_cuobjdump() -> str | None:
    """On PATH, beside nvcc, or in the wheel nvidia-cuda-cuobjdump."""
    site = Path(sysconfig.get_path("purelib"))
    candidates = sorted(site.glob("nvidia/*/bin/cuobjdump"))
    if nvcc := shutil.which(os.environ.get("QUIRE_NVCC", "nvcc")):
        candidates.insert(0, Path(nvcc).resolve().parent / "cuobjdump")
    return shutil.which("cuobjdump") or next((str(c) for c in candidates if os.access(c, os.X_OK)), None)


class Instructions:
    """Whether cubins have their family's tensor-core instruction.

    Disassembling takes a third of a compile. So one cubin of a family and target is disassembled, the opcodes of the
    instruction are learnt from it, and the others are searched for them. A cubin without them is disassembled too.
    """

    def __init__(self, cuobjdump: str) -> None:
        self._cuobjdump = cuobjdump
        self._opcodes: dict[tuple[str, str], set[bytes]] = {}
        self.disassembled = 0

    def missing(self, directory: Path, manifest: dict[str, Any]) -> str | None:
        """What to say of a cubin without its instruction; None if it has it, or its family needs none."""
        family = manifest["slug"].split(".")[0]
        wanted, cubin = TENSOR_CORE.get(family), directory / manifest["artifact"]
        if wanted is None:
            return None
        known = self._opcodes.setdefault((family, manifest["target"]), set())
        if known & opcodes_in(cubin.read_bytes()):
            return None
        listing = self._disassemble(cubin)
        if listing.returncode:
            return f"cuobjdump failed: {listing.stderr.strip() or listing.stdout.strip()}"
        known |= (found := opcodes_of(wanted, listing.stdout))
        return None if found else f"no {wanted.pattern.strip(chr(92) + 'b.')} in its machine code"

    def _disassemble(self, cubin: Path) -> subprocess.CompletedProcess[str]:
        self.disassembled += 1
        path = f"{Path(self._cuobjdump).parent}{os.pathsep}{os.environ['PATH']}"  # it runs nvdisasm
        command = [self._cuobjdump, "-sass", str(cubin)]
        return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": path})


def opcodes_of(wanted: re.Pattern[str], listing: str) -> set[bytes]:
    """The opcodes of the instructions that `wanted` finds: the low 12 bits of an instruction's 128."""
    lines = (line for line in listing.splitlines() if wanted.search(line))
    words = (re.search(r"/\* 0x[0-9a-f]{12}([0-9a-f]{4}) \*/", line) for line in lines)
    return {_opcode(int(word[1][2:], 16), int(word[1][:2], 16)) for word in words if word}


def opcodes_in(cubin: bytes) -> set[bytes]:
    """The opcodes in the code of a cubin."""
    code = b"".join(s.data() for s in ELFFile(io.BytesIO(cubin)).iter_sections() if s.name.startswith(".text"))
    return {_opcode(*pair) for pair in set(zip(code[0::16], code[1::16], strict=True))}


def _opcode(low: int, high: int) -> bytes:
    return bytes((low, high & 0x0F))


def main(store: Path) -> int:
    """The number of faults."""
    found = list(manifests(store))
    if not found:
        print(f"lint: {store} holds no cubin", file=sys.stderr)
        return 1
    lines = [f"{manifest['slug']}: {fault}" for _, manifest in found for fault in faults(manifest)]
    for directory, manifest in found:
        lines += [f"{manifest['slug']}: {fault}" for fault in own_names(directory / manifest["artifact"])]
    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        print("lint: NOTICE: no cuobjdump, the machine code was not looked at (pip install nvidia-cuda-cuobjdump)")
        if os.environ.get("CI") == "true":
            lines.append("cuobjdump is missing, and CI=true")
    else:
        instructions = Instructions(cuobjdump)
        answers = [(manifest["slug"], instructions.missing(directory, manifest)) for directory, manifest in found]
        lines += [f"{slug}: {answer}" for slug, answer in answers if answer]
    for line in lines:
        print(f"lint: {line}", file=sys.stderr)
    most = max(manifest["registers"] or 0 for _, manifest in found)
    print(f"lint: {len(found)} cubins, {len(lines)} faults, at most {most} registers")
    return len(lines)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(1 if main(Path(sys.argv[1])) else 0)
