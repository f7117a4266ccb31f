"""What mla.py, sparse_mla.py and joined.py share: the command line, the trial of providers, and rows of 656 bytes."""

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


def tried(results: Sequence[Any], launch_of: Callable[[Any], Any]) -> list[tuple[Any, Any]]:
    """Each result with its launch. launch_of(result) checks the provider's first call, and sets the result's error; a
    provider that does not take the row has a reason in place of a launch.
    """
    launches = []
    for result in results:
        try:
            launches.append((result, launch_of(result)))
        except Exception as error:  # whatever a peer raises is its reason in the report
            result.reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return launches


def rows_of_656_bytes(cache: torch.Tensor) -> torch.Tensor:
    """bfloat16 latents [..., 576] in e4m3 with a float32 scale for each 128 of 512, then the 64 with positions."""
    tokens = cache.view(-1, 576)
    blocks = tokens[:, :512].float().view(-1, 4, 128)
    scales = blocks.abs().amax(-1) / 448
    latents = (blocks / scales[..., None]).to(torch.float8_e4m3fn).view(-1, 512).view(torch.uint8)
    parts = latents, scales.view(torch.uint8), tokens[:, 512:].contiguous().view(torch.uint8)
    return torch.cat(parts, 1).view(*cache.shape[:-1], 656).view(torch.float8_e4m3fn)


def meant_by(rows: torch.Tensor) -> torch.Tensor:
    """The bfloat16 latents [..., 576] that rows of 656 bytes mean."""
    flat = rows.view(torch.uint8).view(-1, 656)
    numbers = flat[:, :512].contiguous().view(torch.float8_e4m3fn).float().view(-1, 4, 128)
    latents = numbers * flat[:, 512:528].contiguous().view(torch.float32)[..., None]
    with_positions = flat[:, 528:].contiguous().view(torch.bfloat16)
    return torch.cat((latents.view(-1, 512).bfloat16(), with_positions), 1).view(*rows.shape[:-1], 576)
