"""What figures depend on: the machine, its limits measured in the same run, and the software."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import quire

__all__ = ["Roof", "clocks", "copy_gigabytes_per_s", "describe", "measure_roof", "write_report"]

_QUERY = "name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active"


def _output(*command: str) -> str:
    """What a command prints, run beside this file; the reason in brackets where it cannot be."""
    if shutil.which(command[0]) is None:
        return f"({command[0]} not found)"
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else f"({command[0]} failed: {done.stderr.strip()[:200]})"


def clocks() -> dict[str, str]:
    """Clocks, power and throttling of the GPU at this moment, as nvidia-smi says."""
    line = _output("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader", "--id=0")
    values = [value.strip() for value in line.split(",")]
    names = _QUERY.split(",")
    return dict(zip(names, values, strict=True)) if len(values) == len(names) else {"nvidia-smi": line}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """Of the checkout, or QUIRE_COMMIT where the tree travels without its history."""
    if named := os.environ.get("QUIRE_COMMIT"):
        return named
    found = _output("git", "rev-parse", "HEAD")
    changed = _output("git", "status", "--porcelain", "--untracked-files=no", "..")
    return found + (" with changes" if changed and not changed.startswith("(") else "")


def describe(device: torch.device) -> dict[str, object]:
    """The head of every report."""
    cuda = device.type == "cuda"
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "device": torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "gpu": clocks() if cuda else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "quire": quire.__version__,
        "commit": commit(),
        "peers": {name: _version(name) for name in ("flashinfer-python", "fa3-fwd")},
    }


def write_report(path: Path | None, report: dict[str, Any]) -> None:
    """As JSON, complete or not at all; a program may write again and again as it learns more. None: nowhere."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    draft.write_text(json.dumps(_finite(report), indent=1, allow_nan=False) + "\n")
    draft.replace(path)


def _finite(value: Any) -> Any:
    """JSON knows no NaN: null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True)
class Roof:
    """Limits measured in this run."""

    tflops: float  #: a square matrix product
    gigabytes_per_s: float  #: the fastest of several large reads by torch

    def us(self, flops: float, num_bytes: float) -> float:
        """No kernel of this work is faster."""
        return max(flops / self.tflops / 1e6, num_bytes / self.gigabytes_per_s / 1e3)


def measure_roof(device: torch.device) -> Roof:
    """A bf16 product of 8192 and reads of 4 GiB on a GPU; much smaller ones in float32 on a cpu."""
    cuda = device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if cuda else (512, torch.float32)
    rows = (1 << 16) if cuda else (1 << 10)
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    product = torch.empty_like(a)
    seconds = _median(lambda: torch.mm(a, b, out=product), device)
    data = torch.randn(rows, 1 << 15, dtype=torch.bfloat16 if cuda else torch.float32, device=device)
    vector = torch.randn(1 << 15, dtype=data.dtype, device=device)
    sums, dots = torch.empty(rows, device=device), torch.empty(rows, dtype=data.dtype, device=device)
    reads: list[Callable[[], object]] = [
        lambda: torch.sum(data, dim=1, dtype=torch.float32, out=sums),
        lambda: torch.mv(data, vector, out=dots),
        lambda: data.view(torch.int32).amax(),
    ]
    fastest = min(_median(read, device) for read in reads)
    return Roof(2.0 * size**3 / seconds / 1e12, data.numel() * data.element_size() / fastest / 1e9)


def copy_gigabytes_per_s(device: torch.device) -> float:
    """Bytes read and written by a large copy on the device."""
    source = torch.randn((1 << 30) if device.type == "cuda" else (1 << 24), device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / _median(lambda: target.copy_(source), device) / 1e9


def _median(call: Callable[[], object], device: torch.device, count: int = 20) -> float:
    """Seconds of a call."""
    for _ in range(3):
        call()
    if device.type == "cpu":
        return statistics.median(_wall(call) for _ in range(count))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) / 1e3 for a, b in pairwise(events))


def _wall(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
