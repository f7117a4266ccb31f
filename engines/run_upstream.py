"""Other libraries' own tests over Quire: python run_upstream.py --tests CHECKOUT/tests [--sample N] [--seed S] [-n 14]

CHECKOUT is a clone of github.com/flashinfer-ai/flashinfer. Its tests import Quire as their flashinfer
(upstream/as_flashinfer/sitecustomize.py). With --suite flex, --tests is test/ of a clone of github.com/pytorch/pytorch of the
installed release, and what its tests of flex_attention compile is Quire's (upstream/as_flex.py). With --suite flash_attn, --tests is a
clone of github.com/Dao-AILab/flash-attention, whose tests of forwards have Quire's functions (upstream/as_flash_attn/sitecustomize.py).
Writes what came of each case as JSON, and prints a table of the files and a line for each reason why cases did not pass.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

#: The files whose subject is attention, or what surrounds it, on Hopper.
FILES = (
    "alibi", "attention_sink", "batch_attention", "batch_decode_kernels", "batch_invariant_fa2", "batch_prefill",
    "batch_prefill_kernels", "block_sparse",
    "decode_fp8_calibration_scale", "decode_prefill_lse", "deepseek_mla", "fmha_v2_prefill", "fp8_prefill", "hopper",
    "hopper_fp8_attention", "hopper_fp8_sliding_window", "logits_cap", "mla_decode_kernel", "mla_page",
    "non_contiguous_decode", "non_contiguous_prefill", "page", "rope", "shared_prefix_kernels", "single_prefill",
    "sliding_window", "tensor_cores_decode", "trtllm_gen_attention_decode_xqa", "workspace_size", "xqa",
    "xqa_batch_decode", "xqa_mla_batch_decode", "xqa_mla_bf16",
)  # fmt: skip
BESIDE = ("utils/test_jit_example.py", "utils/test_pod_kernels.py", "utils/test_quantization.py")

#: torch's tests of flex_attention.
FLEX = "inductor/test_flex_attention.py", "inductor/test_flex_decoding.py"
#: FlashAttention's, of version 2 and of version 3, but for those of backward passes.
FLASH = "tests/test_flash_attn.py", "hopper/test_flash_attn.py"
FORWARDS = "not bwd and not race and not deterministic and not compatibility and not generator"

HERE = Path(__file__).parent / "upstream"
KINDS = "passed", "wrong", "refused", "failed", "skipped"


def outcome(report):
    """One of: passed, wrong (numbers are beyond the test's bound), refused (Quire says that it has no such kernel), failed
    (all else: other texts of errors, missing names), skipped (by the test itself).
    """
    reason = report["reason"][:160]
    if report["outcome"] != "failed":
        return report["outcome"]
    if any(
        word in reason
        for word in ("UnsupportedError", "not supported by this call", "expected a quire.Variant (docs/v")
    ):
        return "refused"
    numbers = ("not close", "Compiled error", "with NaN", "not equal", "Mismatched elements")
    return "wrong" if "AssertionError" in reason and any(word in reason for word in numbers) else "failed"


def group(reason):
    """A reason without its numbers: cases that differ in them alone have one reason."""
    lines = [line for line in reason.splitlines() if line.strip()]
    return re.sub(r"\d+(\.\d+)?(e-?\d+)?", "N", " ".join(lines[:2]))[:240] if lines else "no message"


def weighed(lines, counts):
    """Percent of the cases that would pass, and how many would not be skipped, if each function's are like its sample."""
    functions, run, passed = defaultdict(Counter), 0.0, 0.0
    for line in lines:
        if "case" in line:
            functions[line["case"].partition("[")[0]][outcome(line)] += 1
    for name, n in functions.items():
        cases = counts.get(name, n.total()) / n.total()
        run += cases * (n.total() - n["skipped"])
        passed += cases * n["passed"]
    return 100 * passed / max(run, 1), run


def row(name, cases, counts):
    """A line of the table."""
    numbers = cases, counts.total() - counts["skipped"], *(counts[kind] for kind in KINDS)
    return f"| {name} | " + " | ".join(map(str, numbers)) + " |"


def summarise(lines):
    """The table by file, and the reasons."""
    files, reasons = defaultdict(Counter), defaultdict(Counter)
    counts = next((line["counts"] for line in lines if "counts" in line), {})
    for report in (line for line in lines if "case" in line):
        file, _, function = report["case"].partition("[")[0].partition("::")
        kind = outcome(report)
        files[Path(file).name][kind] += 1
        if kind != "passed":
            reasons[kind, group(report["reason"])][f"{Path(file).stem}::{function}"] += 1
    of_file = Counter()
    for name, count in counts.items():
        of_file[Path(name.partition("::")[0]).name] += count
    yield "| file | cases | run | " + " | ".join(KINDS[:-1]) + " | skipped by the test |"
    yield "|---" * (3 + len(KINDS)) + "|"
    for file in sorted(files | of_file):
        yield row(file, of_file[file], files[file])
    total = sum(files.values(), Counter())
    run = total.total() - total["skipped"]
    yield row("all", of_file.total(), total)
    yield f"\npassed: {100 * total['passed'] / max(run, 1):.1f} % of {run}"
    yield "each test function weighed by its cases: {:.1f} % of about {:.0f}\n".format(*weighed(lines, counts))
    for (kind, text), where in sorted(reasons.items(), key=lambda item: (item[0][0], -item[1].total())):
        named = ", ".join(f"{name} {count}" for name, count in where.most_common(4))
        yield f"- {kind} {where.total()}: {text} ({named})"


def run_for(seconds, command, environment, directory):
    """Run a command and what it starts for at most so long; what it has written by then counts."""
    process = subprocess.Popen(command, env=environment, cwd=directory, stdout=sys.stderr, start_new_session=True)
    try:
        process.wait(seconds or None)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        print(f"stopped after {seconds} s", file=sys.stderr)


def for_cpus(tests, files, scratch):
    """Copies of torch's tests whose lengths of 2048 are 512, and that are not skipped for want of a GPU."""
    for file in files:
        copy, text = Path(scratch) / "test" / file, (tests / file).read_text()
        copy.parent.mkdir(parents=True, exist_ok=True)
        text = re.sub(r"^S = 2048$", "S = 512", text, flags=re.MULTILINE).replace("1000", "250")  # a window in it
        skips = r"^(\w+) = (unittest\.)?skipUnless\(.*?^\)$"
        copy.write_text(re.sub(skips, r"\1 = lambda test: test", text, flags=re.MULTILINE | re.DOTALL))
    return Path(scratch) / "test"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=Path, required=True, help="the directory tests/ of a clone")
    parser.add_argument(
        "--files", nargs="*", help="paths below it; by default those of this list whose subject is attention"
    )
    parser.add_argument("--sample", type=int, default=0, help="cases of each test function; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, default=60, help="seconds a case")
    parser.add_argument("--time", type=int, default=0, help="seconds for all; 0: until done")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--suite", choices=("flashinfer", "flex", "flash_attn"), default="flashinfer")
    parser.add_argument(
        "--compile", default="no", help="flex: the backend of torch.compile for what tests compile; no: they call it"
    )
    parser.add_argument("--json", type=Path, help="the results")
    parser.add_argument("-n", type=int, default=1, help="processes")
    options, rest = parser.parse_known_args()
    tests = options.tests.resolve()
    is_flex = options.suite == "flex"
    is_flash = options.suite == "flash_attn"
    of_flashinfer = *(f"attention/test_{name}.py" for name in FILES), *BESIDE
    files = options.files or (FLEX if is_flex else FLASH if is_flash else of_flashinfer)
    rest += ["-k", FORWARDS] if is_flash else []
    with tempfile.TemporaryDirectory() as scratch:
        tests = for_cpus(tests, files, scratch) if is_flex and options.device == "cpu" else tests
        results = (options.json or Path(scratch) / "results.json").resolve()
        results.unlink(missing_ok=True)
        settings = {
            "SAMPLE": options.sample, "SEED": options.seed, "LIMIT": options.limit, "DEVICE": options.device,
            "RESULTS": results, "SUITE": options.suite, "COMPILE": options.compile, "CHECKOUT": tests,
        }  # fmt: skip
        environment = os.environ | {f"UPSTREAM_{name}": str(value) for name, value in settings.items()}
        places = {
            "flashinfer": [HERE / "as_flashinfer", tests.parent],
            "flash_attn": [HERE / "as_flash_attn"],
            "flex": [],
        }
        path = [str(HERE), *map(str, places[options.suite]), *sys.path[1:]]
        environment["PYTHONPATH"] = os.pathsep.join(path)
        command = [
            sys.executable, "-m", "pytest", "-p", "plugin", "-q", "--noconftest", "-c", os.devnull, f"--rootdir={tests}",
            "-p", "no:cacheprovider", "--tb=short", "--show-capture=no", "-W", "ignore",
        ]  # fmt: skip
        command += ["-p", "as_flex"] if is_flex else []
        command += ["--import-mode=importlib"] if is_flash else []  # both files have one name
        if options.n > 1:
            command += ["--numprocesses", str(options.n), "--dist", "load"]
        paths = [str(tests / file) for file in files if (tests / file).exists()]
        run_for(options.time, [*command, *rest, *paths], environment, scratch)
        if not results.exists():
            sys.exit("no case was run")
        lines = [json.loads(line) for line in results.read_text().splitlines()]
    print("\n".join(summarise(lines)))


if __name__ == "__main__":
    main()
