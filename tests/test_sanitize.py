"""Small problems for all kernels of the CPU, with sanitizers in the compiled code; sanitize.py runs the whole suite."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import sanitize
from quire.kernels.operation import OPERATIONS

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not sanitize.is_installed(), reason="g++ has no sanitizers here")]

#: Tests that between them run all kernels.
TESTS = (
    "test_prefill.py::test_mask_over_many_tiles[cpu-quire:cpu-bfloat16-ragged]",
    "test_decode.py::test_cache_forms[cpu-quire:cpu-float32-NHD-tensor]",
    "test_cascade.py::test_merge_state[cpu-float32-(1, 1, 64)]",
    "test_cascade.py::test_merge_states[cpu-float32-(7, 4, 128)-17]",
    "test_deep_gemm.py::test_chosen_tokens[cpu]",
    "test_flash_mla_rows.py::test_rows_of_584_bytes_at_any_address[cpu]",
    "test_latent_append.py::test_rows_of_656_bytes[cpu-contiguous]",
    "test_mla.py::test_heads[cpu-quire:cpu-float32-1]",
    "test_page.py::test_append[cpu-float32-1-NHD-tensor]",
    "test_page_selection.py::test_all_pages_are_plain_decode[cpu-float32]",
    "test_nvfp4_append.py::test_positions_in_requests[cpu-float32-1-64-NHD-dense]",
    "test_quantization.py",
    "test_rope_append.py::test_prologue_is_its_steps[cpu-float32-contiguous-20-6]",
    "test_rope_append.py::test_prologue[cpu-float32-norm-interleave-eps-rotary_dim-NHD-tensor-as tokens]",
    "test_rotate_ahead.py::test_few_ctas_rotate_many_tokens[cpu-float32]",
    "test_variants.py::test_library[cpu-quire:cpu-document_mask]",
    "test_widen_ahead.py::test_every_code_is_widened_exactly[cpu-e4m3-bf16]",
)

#: Reads a float behind the last one; reads an int from any address; adds to an int; converts a float to an int.
_FAULTS = """
#define EXPORTED extern "C" __attribute__((visibility("default")))
EXPORTED float last(const float* x, long n) { return x[n]; }
EXPORTED int at(const char* x, long n) { return *reinterpret_cast<const int*>(x + n); }
EXPORTED int sum(int a, int b) { return a + b; }
EXPORTED int whole(float x) { return static_cast<int>(x); }
"""

_CALLS = """
import ctypes, os, sys, torch, sanitize
from quire.jit import module

sanitize.load_from_files()
faults = module.load_library("faults", open(sys.argv[1], "rb").read())
x = torch.zeros(10)
begin = ctypes.c_void_p(x.data_ptr())
faults.last.argtypes, faults.at.argtypes = [ctypes.c_void_p, ctypes.c_long], [ctypes.c_void_p, ctypes.c_long]
faults.whole.argtypes = [ctypes.c_float]
for call in sys.argv[2:]:
    if call == "no report":
        assert not os.listdir(os.path.dirname(os.environ["SANITIZE_REPORTS"]))
    else:
        eval(call)
"""


def _found(directory: Path, *command: str) -> dict[str, tuple[int, str]]:
    """What the sanitizers find in a Python process."""
    env = sanitize.environment(directory)
    done = subprocess.run(
        [sys.executable, *command], cwd=sanitize.ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return sanitize.reports_in(directory)


def test_faults_are_found(tmp_path: Path) -> None:
    """Calls at the limit are no faults, and the same calls beyond it are."""
    source, made = tmp_path / "faults.cpp", tmp_path / "faults.so"
    source.write_text(_FAULTS)
    subprocess.run([sanitize.compiler(), "-shared", "-fPIC", "-o", made, source], check=True)
    right = ("faults.last(begin, 9)", "faults.at(begin, 4)", "faults.sum(2**31 - 2, 1)", "faults.whole(1e9)")
    wrong = ("faults.last(begin, 10)", "faults.at(begin, 1)", "faults.sum(2**31 - 1, 1)", "faults.whole(1e10)")
    found = _found(tmp_path, "-c", _CALLS, str(made), *right, "no report", *wrong)
    assert sorted(title.partition(": ")[2] for title in found) == [
        "N is outside the range of representable values of type 'int'",
        "heap-buffer-overflow",
        "load of misaligned address N for type 'const int', which requires 4 byte alignment",
        "signed integer overflow: N + 1 cannot be represented in type 'int'",
    ]


def test_kernels(tmp_path: Path) -> None:
    tests = [f"tests/{test}" for test in TESTS]
    found = _found(tmp_path, "-m", "pytest", "-p", "sanitize", "-p", "no:cacheprovider", "-q", *tests)
    sanitize.print_reports(found)
    assert not found
    ran = {slug.partition(".")[0] for slug in sanitize.variants_in(tmp_path)}
    assert ran == {"attention_cpu", "attention_mla_cpu", *(name for name, op in OPERATIONS.items() if op.on_host)}
