"""`quire matrix` prints which kernels run where, `quire show` describes one variant."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import Any

import quire
from quire.cli import parser
from quire.cli.aot import spec_of
from quire.cli.parser import add_command, print_table, spell_bytes, tell
from quire.jit import Spec, explain_miss, lookup, render_unit
from quire.jit.doctor import examine
from quire.jit.stores import prebuilt_stores, user_store
from quire.jit.toolchain import for_target
from quire.kernels import KERNELS, AttentionKernel, AttentionProblem
from quire.kernels.attention import MLA_DIMS
from quire.kernels.features import read_mask
from quire.kernels.types import dtype_of

#: GPUs and processors on which variants were compared with the oracle. Variants of other targets are only compiled.
RAN_ON = {
    "sm90a": "H100, H200",
    "x86-64-v3": "x86-64 with AVX2",
    "x86-64-v4": "x86-64 with AVX-512",
    "x86-64-v4-bf16": "EPYC with AVX512-BF16",
    "x86-64-v4-amx": "Xeon with AMX",
}
_ON_ARM = "tested under an emulator; no Arm machine has run it"
_GPUS = ("sm80", "sm86", "sm89", "sm90a", "sm100a", "sm120a")
_TARGETS = (*_GPUS, "x86-64-v3", "x86-64-v4", "x86-64-v4-bf16", "x86-64-v4-amx", "aarch64")
_TYPES = (("fp32", "fp32"), ("fp16", "fp16"), ("bf16", "bf16"), ("bf16", "e4m3"), ("bf16", "e5m2"))


def add_commands(commands: Any) -> None:
    """Add `matrix`, `show` and `doctor` to the parser."""
    matrix = add_command(
        commands, "matrix", _matrix, "which kernels run where",
        "Say which kernels take which number types on which targets. Nothing is compiled.",
    )  # fmt: skip
    matrix.add_argument("--head-dim", type=parser.head_dims, default=((128, 128),), help="such as 128 or 192x128")
    matrix.add_argument("--page-size", type=parser.page_sizes, default=(16,), help="or ragged (default 16)")
    matrix.add_argument("--mask", type=parser.masks, default=("causal",), help="as of `quire warmup` (default causal)")
    matrix.add_argument("--arch", type=parser.targets, help="GPU architectures, such as 8.0,9.0a")
    show = add_command(commands, "show", _show, "what a variant is", "Say what a variant is and how it is built.")
    show.add_argument("slug", metavar="SLUG")
    show.add_argument("--source", action="store_true", help="print the unit that is compiled")
    text = "find what keeps Quire from compiling, caching or loading"
    add_command(commands, "doctor", _doctor, text, f"{text.capitalize()}. Exit status 1 if there is a fault.")


# --- matrix ----------------------------------------------------------------------------------------------------------


def _cells(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A cell for each kernel, number types and target; `reason` is None if the kernel accepts all options."""
    for kernel, (q, kv), target in product(KERNELS, _TYPES, options.arch or _TARGETS):
        if kernel.on_cuda == target.startswith("sm"):
            asked = product(options.head_dim, options.page_size, options.mask)
            reasons = (_reason(kernel, target, q, kv, *values) for values in asked)
            reason = next((reason for reason in reasons if reason), None)
            yield {"kernel": kernel.name, "q": q, "kv": kv, "target": target, "reason": reason, "ran": target in RAN_ON}


def _reason(kernel: AttentionKernel, target: str, q: str, kv: str, dims: Any, page_size: int, mask: str) -> str | None:
    number, cached, (qk, vo) = dtype_of(q, "dtype"), dtype_of(kv, "kv_dtype"), dims
    problem = AttentionProblem(
        target, number, cached, number, qk, vo, page_size, **read_mask(mask), rows=1, is_mla=dims == MLA_DIMS
    )
    return kernel.refusal(problem)


def _matrix(options: argparse.Namespace) -> int:
    cells = list(_cells(options))
    return tell(options, partial(_print_cells, cells), cells=cells, ran_on=RAN_ON)


def _print_cells(cells: list[dict[str, Any]]) -> None:
    targets = list(dict.fromkeys(cell["target"] for cell in cells))
    marks = {(c["kernel"], c["q"], c["kv"], c["target"]): _mark(c) for c in cells}
    names = dict.fromkeys((c["kernel"], c["q"], c["kv"]) for c in cells)
    print_table(
        ("kernel", "q", "kv", *targets),
        ((*name, *(marks.get((*name, target), "") for target in targets)) for name in names),
    )
    print("\nyes: has run and been checked, on " + "; ".join(f"{t}: {on}" for t, on in RAN_ON.items() if t in targets))
    print("compiles: its machine code has run on no such card")
    if "aarch64" in targets:
        print(f"aarch64: {_ON_ARM}")
    reasons = dict.fromkeys((cell["kernel"], cell["reason"]) for cell in cells if cell["reason"])
    print(*(f"no: {kernel}: {reason}" for kernel, reason in reasons), sep="\n")


def _mark(cell: dict[str, Any]) -> str:
    return "no" if cell["reason"] else "yes" if cell["ran"] else "compiles"


# --- show ------------------------------------------------------------------------------------------------------------


def _show(options: argparse.Namespace) -> int:
    spec = spec_of(options.slug)
    if options.source:
        print(render_unit(spec))
        return 0
    answer = _answer(spec)
    texts = {n: ", ".join(f"{k}={v}" for k, v in a.items()) if isinstance(a, dict) else a for n, a in answer.items()}
    return tell(options, "\n".join(f"{name:<10} {text}" for name, text in texts.items()), **answer)


def _ran_on(target: str) -> str:
    return RAN_ON.get(target) or (_ON_ARM if target == "aarch64" else "no such card or processor")


def _answer(spec: Spec) -> dict[str, Any]:
    entry, toolchain = lookup(spec), for_target(spec.target)
    answer: dict[str, Any] = {
        "variant": spec.slug, "target": spec.target, "ran on": _ran_on(spec.target),
        "header": spec.header, "fields": dict(spec.fields), "types": dict(spec.types),
        "constants": dict(spec.constants), "compiler": toolchain.name, "warm-up": f"quire warmup {spec.warmup}",
    }  # fmt: skip
    if entry is None:
        return {**answer, "entry": f"none: {explain_miss(spec)}"}
    m = entry.manifest
    figures = {"registers": m.registers, "spills": m.spills, "stack": m.stack, "smem": m.smem, **m.exports}
    return {
        **answer, "entry": str(entry.path), "size": spell_bytes(m.size),
        "compiled": f"in {m.seconds:.2f} s" if m.seconds else "beforehand",
        "figures": {name: value for name, value in figures.items() if value is not None},
    }  # fmt: skip


def _doctor(options: argparse.Namespace) -> int:
    findings = examine(user_store(), prebuilt_stores())
    faults = sum(finding.status == "fault" for finding in findings)
    lines = [f"quire {quire.__version__}"]
    for finding in findings:
        lines.append(f"{finding.status:<6} {finding.check:<10} {finding.text}")
        if finding.fix and finding.status != "ok":
            lines.append(f"{'':<17} -> {finding.fix}")
    text = "\n".join([*lines, f"{faults} faults" if faults else "nothing is in the way"])
    tell(options, text, version=quire.__version__, ok=not faults, findings=[asdict(f) for f in findings])
    return int(bool(faults))
