"""`quire doctor` reports faults of this machine, and what to do about them."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import quire
from quire.cli.output import print_json
from quire.jit import prebuilt_stores, user_store
from quire.jit.doctor import examine


def add_commands(commands: Any) -> None:
    """Add `doctor` to the parser."""
    text = "find what keeps Quire from compiling, caching or loading"
    doctor = commands.add_parser(
        "doctor", help=text, description=f"{text.capitalize()}. Exit status 1 if there is a fault."
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    doctor.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    findings = examine(user_store(), prebuilt_stores())
    faults = sum(finding.status == "fault" for finding in findings)
    if options.json:
        print_json({"version": quire.__version__, "ok": not faults, "findings": [asdict(f) for f in findings]})
        return int(bool(faults))
    print(f"quire {quire.__version__}")
    for finding in findings:
        print(f"{finding.status:<6} {finding.check:<10} {finding.text}")
        if finding.fix and finding.status != "ok":
            print(f"{'':<17} -> {finding.fix}")
    print(f"{faults} faults" if faults else "nothing is in the way")
    return int(bool(faults))
