"""The command line of mla.py and sparse_mla.py, the benchmarks of latent attention: which rows, and the report."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from machine import describe, write_report


def measure_rows(
    description: str | None, all_rows: Sequence[Any], providers: Iterable[str],
    measure: Callable[[Any, Sequence[str], torch.device, int], Sequence[Any]], line: Callable[[Any, Any], str],
    arguments: Sequence[str] | None,
) -> int:  # fmt: skip
    """Measure and print the rows that the command line names; returns the exit status.

    measure(row, providers, device, rounds) gives a row's results, line(row, result) what is printed of one.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="parts of names of rows, with commas; all")
    parser.add_argument("--providers", default=",".join(providers), help="with commas")
    parser.add_argument("--rounds", type=int, default=5, help="0: check results only")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, help="where the report goes")
    args = parser.parse_args(arguments)
    device, report, is_bad = torch.device(args.device), [], False
    rows = [row for row in all_rows if any(part in row.name for part in args.rows.split(","))]
    for row in rows:
        results = measure(row, args.providers.split(","), device, args.rounds)
        print("\n".join(line(row, result) for result in results), flush=True)
        report.append({"row": asdict(row), "results": [asdict(result) for result in results]})
        write_report(args.json, {"machine": describe(device), "rows": report})
        is_bad |= any(result.is_bad for result in results)
    return int(is_bad or not rows)
