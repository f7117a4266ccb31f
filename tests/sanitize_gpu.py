"""compute-sanitizer over each shipped variant of the attention kernels. It takes a GPU.

    python tests/sanitize_gpu.py                              # every tool, every backend
    python tests/sanitize_gpu.py --tool racecheck --backend fa3 --update

memcheck, synccheck and initcheck must report nothing. What racecheck reports must be what racecheck.txt lists with its
reasons; --update writes that list's lines of the variants that ran. Variants are compiled without the tool first, since
it slows g++ and nvcc, too.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import own_environment  # noqa: F401  # before torch is

# isort: split
from every_variant import ANNOUNCEMENT

TOOLS = ("memcheck", "synccheck", "initcheck", "racecheck")
LIST = Path(__file__).with_name("racecheck.txt")
#: The tool names first whichever access has more partners, which changes between runs.
_RACE = re.compile(r"=+ (Error|Warning): Race reported between \w+ access")
_ERRORS = re.compile(r"=+ ERROR SUMMARY: (\d+) errors?")


def races(log: Iterable[str]) -> dict[str, str]:
    """What racecheck reports, by variant: kinds of hazards, as "Error, Warning"."""
    found: dict[str, set[str]] = {}
    variant = ""
    for line in log:
        if line.startswith(ANNOUNCEMENT):
            variant = line.removeprefix(ANNOUNCEMENT).strip()
        elif match := _RACE.match(line):
            found.setdefault(variant, set()).add(match[1])
    return {name: ", ".join(sorted(kinds)) for name, kinds in found.items()}


def listed() -> dict[str, str]:
    """racecheck.txt: by variant, what is known and harmless."""
    lines = [line for line in LIST.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split(": ", 1) for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", choices=TOOLS, action="append")
    parser.add_argument("--backend", default="decode,fa2,fa3,fp8")
    parser.add_argument("--update", action="store_true")
    options = parser.parse_args()
    program = [sys.executable, str(Path(__file__).with_name("every_variant.py")), "--backend", options.backend]
    subprocess.run(program, check=True, stdout=subprocess.DEVNULL)
    failed = False
    for tool in options.tool or TOOLS:
        command = ["compute-sanitizer", "--tool", tool, "--print-limit", "100000", *program, "--announce"]
        said = subprocess.run(command, check=False, capture_output=True, text=True)
        lines = (said.stdout + said.stderr).splitlines()
        if tool == "racecheck":
            failed |= not _compare(races(lines), lines, options.update)
        else:
            errors = [int(match[1]) for line in lines if (match := _ERRORS.match(line))]
            failed |= said.returncode != 0 or errors != [0]
            print(f"{tool}: {errors} errors, exit status {said.returncode}")
            if errors != [0]:
                print(*lines[:60], sep="\n")
    return int(failed)


def _compare(found: dict[str, str], lines: list[str], update: bool) -> bool:
    """Whether racecheck reports what is listed, of the variants that ran."""
    ran = {line.removeprefix(ANNOUNCEMENT).strip() for line in lines if line.startswith(ANNOUNCEMENT)}
    known = listed()
    if update:
        head = [line for line in LIST.read_text().splitlines() if line.startswith("#")]
        kept = {name: kinds for name, kinds in known.items() if name not in ran} | found
        LIST.write_text("\n".join([*head, *(f"{name}: {kept[name]}" for name in sorted(kept))]) + "\n")
        return True
    expected = {name: kinds for name, kinds in known.items() if name in ran}
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            print(f"racecheck: {name}: expected {expected.get(name)}, got {found.get(name)}")
    print(f"racecheck: {len(ran)} variants, {dict(Counter(found.values()))}")
    return found == expected and bool(ran)


if __name__ == "__main__":
    sys.exit(main())
