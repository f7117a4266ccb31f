"""Runs tests with AddressSanitizer and UndefinedBehaviorSanitizer in all code that Quire compiles for the CPU.

    python tests/sanitize.py                                      # all tests that compute on the CPU, as in TARGETS
    python tests/sanitize.py tests/test_page.py -k append         # arguments are pytest's
    QUIRE_CPU_TARGET=x86-64-v3 python tests/sanitize.py tests/test_decode.py

A report does not end the run: all are printed at the end, each place once. The exit status is 1 if there is a report or
a test fails.

The compiler is a script that adds flags to g++. The sanitizers' libraries are loaded before Python's, so memory of
torch and of Python comes from AddressSanitizer's malloc: a read or write beyond any tensor is found. The sanitizers do
not find a misaligned access at a constant distance from a pointer (g++ merges the two before it adds the check), an
access beyond a member of an object by a pointer, overflow in vectors of integers, or accesses by most intrinsics.
test_amx.py emulates AMX.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "sanitize"

#: Files that compute nothing on the CPU, or only in processes and programs that they start.
LEFT_OUT = frozenset(
    {
        *("test_aarch64.py", "test_cuda.py", "test_graph.py", "test_planner.py", "test_upload.py"),  # other processors
        *("test_catalogue.py", "test_matrix.py", "test_options.py"),  # the choice of a kernel
        *("test_aot.py", "test_cli.py", "test_doctor.py", "test_hub.py", "test_import.py"),  # processes and caches
        *("test_benchmarks.py", "test_ci.py", "test_docs.py", "test_examples.py", "test_packaging.py"),  # programs
        "test_release.py",  # which compares binaries byte by byte
        *("test_figures.py", "test_floors.py", "test_language.py", "test_surface.py", "test_typing.py"),  # source text
        "test_sanitize.py",  # which starts sanitizers itself
    }
)

#: Tests of the other files that end a process by SIGSEGV, which AddressSanitizer reports.
DESELECTED = (
    "test_fuzz.py::test_a_failure_is_made_again_by_its_seed",
    "test_fuzz.py::test_a_read_outside_a_tensor_is_seen",
)

#: The second run is of code for AVX2, in files that between them run all kernels.
TARGETS: dict[str, tuple[str, ...]] = {
    "": (),
    "x86-64-v3": (
        *("test_cascade.py", "test_cascade_launch.py", "test_decode.py", "test_deep_gemm.py", "test_flash_mla_rows.py"),
        *("test_fp8.py", "test_head_dims.py"),
        *("test_latent_append.py", "test_mla.py", "test_packed_latents.py", "test_page.py", "test_page_selection.py"),
        *("test_positions.py", "test_prefill.py", "test_quantization.py", "test_rope.py", "test_rope_append.py"),
        *("test_schedule.py", "test_token_selection.py", "test_variants.py", "test_widen_ahead.py"),
    ),
}

#: -Og without inlining and common subexpressions: compiles in a third of the time of -O2, and removes fewer faults.
FLAGS = (
    *("-fsanitize=address,undefined,float-cast-overflow", "-fsanitize-recover=all", "-fno-omit-frame-pointer"),
    *("-g1", "-Og", "-fno-inline", "-fno-gcse"),
)

#: Not detect_stack_use_after_return: it aligns variables to 32 bytes, and vectors of AVX-512 need 64 (GCC PR 110027).
ASAN_OPTIONS = {
    "halt_on_error": 0,
    "detect_leaks": 0,  # Python leaves much at its end
    "detect_odr_violation": 0,  # variants export the same names
    "alloc_dealloc_mismatch": 0,  # of torch's libraries
    "allocator_may_return_null": 1,  # for tests that ask for more than there is
    "quarantine_size_mb": 64,
}

_COMPILER = """#!/bin/sh
# The compiler itself runs without the sanitizers.
unset LD_PRELOAD
exec {compiler} "$@" {flags}
"""

# The two libraries export one function that reads the option log_path. The first of them to be loaded gets both paths,
# and the other writes to stderr, which pytest keeps to itself.
_REPORT_PATH = """
#include <dlfcn.h>
#include <stdlib.h>
__attribute__((constructor)) static void set_path() {
  void* library = dlopen(getenv("SANITIZE_LIBRARY"), RTLD_NOW | RTLD_NOLOAD);
  void* set_report_path = library ? dlsym(library, "__sanitizer_set_report_path") : nullptr;
  if (set_report_path) reinterpret_cast<void (*)(const char*)>(set_report_path)(getenv("SANITIZE_REPORTS"));
}
"""


def library(name: str) -> Path | None:
    """A library of g++'s sanitizers, or None where it is not installed."""
    command = ["g++", f"-print-file-name={name}"]
    path = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    return path.resolve() if path.is_absolute() else None


def is_installed() -> bool:
    """Whether g++ and its sanitizers are."""
    return shutil.which("g++") is not None and None not in (library("libasan.so"), library("libubsan.so"))


def environment(directory: Path) -> dict[str, str]:
    """The environment of a process whose compiled code is checked. `directory` gets what reports_in() reads."""
    (directory / "reports").mkdir(parents=True, exist_ok=True)
    options = {**ASAN_OPTIONS, "log_path": directory / "reports" / "address"}
    ubsan = str(library("libubsan.so"))
    return {
        **os.environ,
        "LD_PRELOAD": f"{library('libasan.so')} {ubsan} {_report_path()}",
        "ASAN_OPTIONS": ":".join(f"{name}={value}" for name, value in options.items()),
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "SANITIZE_LIBRARY": ubsan,
        "SANITIZE_REPORTS": str(directory / "reports" / "undefined"),
        "SANITIZE_VARIANTS": str(directory / "variants"),
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "tests", ROOT / "src"))),  # before what is installed
        "QUIRE_CXX": str(compiler()),
        "TESTS_CACHE_DIR": str(BUILD / "cache"),
    }


def compiler() -> Path:
    """g++ with the sanitizers. Its path and text are part of the keys of what it compiles."""
    text = _COMPILER.format(compiler=shutil.which("g++"), flags=" ".join(FLAGS))
    return _written("g++", text.encode(), mode=0o755)


def _report_path() -> Path:
    """A library that tells UndefinedBehaviorSanitizer where to write."""
    name = f"report_path.{hashlib.sha256(_REPORT_PATH.encode()).hexdigest()[:16]}"
    source, made = _written(f"{name}.cpp", _REPORT_PATH.encode()), BUILD / f"{name}.so"
    if not made.exists():
        own = made.with_suffix(f".{os.getpid()}")
        subprocess.run(["g++", "-shared", "-fPIC", "-o", own, source], check=True)
        own.replace(made)
    return made


def _written(name: str, content: bytes, mode: int = 0o644) -> Path:
    """A file in BUILD, which no process ever sees half written."""
    path = BUILD / name
    if not path.exists() or path.read_bytes() != content:
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.with_name(f"{path.name}.{os.getpid()}")
        own.write_bytes(content)
        own.chmod(mode)
        own.replace(path)
    return path


def load_from_files() -> None:
    """Load what is compiled from files that stay, so that reports name functions and lines; note which variants."""
    from quire.jit import module as loader

    def load(slug: str, image: bytes) -> ctypes.CDLL:
        with Path(os.environ["SANITIZE_VARIANTS"]).open("a") as file:
            file.write(f"{slug}\n")
        return ctypes.CDLL(str(_written(f"loaded/{hashlib.sha256(image).hexdigest()[:32]}.so", image)))

    loader._load = load


def variants_in(directory: Path) -> set[str]:
    """The slugs of the variants that were loaded."""
    path = directory / "variants"
    return set(path.read_text().split()) if path.exists() else set()


def pytest_configure() -> None:
    """This file is also a plugin of the tests that it runs."""
    load_from_files()


_UNDEFINED = re.compile(r"^(?P<place>\S+:\d+:\d+): runtime error: (?P<words>.*)$")
_ADDRESS = re.compile(r"^==\d+==ERROR: AddressSanitizer: (?P<words>[\w-]+)")
_FRAME = re.compile(r"^ +#\d+ 0x\w+ (?:in (?P<name>.*) )?(?P<place>\S+)$")


def reports_in(directory: Path) -> dict[str, tuple[int, str]]:
    """What was found: its kind and place, with how often it was, and the text of the first."""
    counts, texts = Counter[str](), dict[str, str]()
    for path in sorted((directory / "reports").iterdir()):
        lines = path.read_text(errors="replace").splitlines()
        begins = [i for i, line in enumerate(lines) if _UNDEFINED.match(line) or _ADDRESS.match(line)]
        for begin, end in zip(begins, [*begins[1:], len(lines)], strict=True):
            title = _title(lines[begin:end])
            counts[title] += 1
            texts.setdefault(title, "\n".join(lines[begin : min(end, begin + 40)]))
        if lines and not begins:  # of another kind
            counts[path.name] += 1
            texts[path.name] = "\n".join(lines[:40])
    return {title: (count, texts[title]) for title, count in counts.items()}


def _title(lines: list[str]) -> str:
    """The kind and the place of a report: the first frame of a header of Quire, or the innermost one."""
    if undefined := _UNDEFINED.match(lines[0]):
        return f"{undefined['place']}: {re.sub(r'0x[0-9a-f]+|-?[0-9.e+]{2,}', 'N', undefined['words'])}"
    found = _ADDRESS.match(lines[0])
    places = [frame["place"] for line in lines if (frame := _FRAME.match(line))]
    place = next((place for place in places if "quire/" in place and ":" in place), (places or ["?"])[0])
    return f"{place}: {found['words'] if found else lines[0]}"


def print_reports(found: Mapping[str, tuple[int, str]]) -> None:
    """What was found, with its first stack; then a line for each."""
    for title, (_, text) in found.items():
        print(f"\n---- {title}\n{text}")
    print(f"\n{len(found)} places with a report by the sanitizers")
    for title, (count, _) in found.items():
        print(f"  {count} times {title}")


def run(arguments: list[str], target: str = "") -> bool:
    """Run pytest; whether all tests passed and nothing was found."""
    directory = BUILD / (target or "best")
    shutil.rmtree(directory, ignore_errors=True)
    env = environment(directory)
    if target:
        env["QUIRE_CPU_TARGET"] = target
    left = [word for test in DESELECTED for word in ("--deselect", f"tests/{test}")]
    command = [sys.executable, "-m", "pytest", "-p", "sanitize", *left, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, check=False)
    found = reports_in(directory)
    print(f"{len(variants_in(directory))} variants ran")
    print_reports(found)
    return done.returncode == 0 and not found


def files(chosen: tuple[str, ...]) -> list[str]:
    """The files of tests, or those of them that are `chosen`."""
    names = sorted(path.name for path in (ROOT / "tests").glob("test_*.py") if path.name not in LEFT_OUT)
    return [f"tests/{name}" for name in names if not chosen or name in chosen]


def main() -> int:
    """Arguments that name no test are for all."""
    arguments = sys.argv[1:]
    if not is_installed():
        print("sanitize: g++ or its sanitizers (libasan, libubsan) are not installed", file=sys.stderr)
        return 1
    if any(word.partition("::")[0].endswith(".py") for word in arguments):
        return 0 if run(arguments) else 1
    fine = [run([*arguments, *files(chosen)], target) for target, chosen in TARGETS.items()]
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
