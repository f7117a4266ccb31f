"""Reading compilers: the figures of a success, the cause of a failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.jit import compilation
from quire.jit.compilation import parse_gxx, parse_nvcc

PTXAS = """ptxas info    : 0 bytes gmem
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to x in function 'k'
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
    16 bytes stack frame, 24 bytes spill stores, 40 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 16 bytes stack, 1024 bytes smem, 128 bytes cmem[0]
variant.cu(3): warning #177-D: variable "x" was declared but never referenced
"""


def test_ptxas_report() -> None:
    report = parse_nvcc(PTXAS)
    assert (report.registers, report.stack, report.spill_stores, report.spill_loads) == (168, 16, 24, 40)
    assert (report.spills, report.smem) == (64, 1024)
    assert [warning.split()[0] for warning in report.warnings] == ["ptxas", "variant.cu(3):"]
    assert "C7510" in report.warnings[0]


def test_host_report_has_only_warnings() -> None:
    report = parse_gxx("variant.cpp:3:1: warning: unused variable\nvariant.cpp:4: note: here\n")
    assert (report.registers, report.spills) == (None, None)
    assert report.warnings == ("variant.cpp:3:1: warning: unused variable",)


@pytest.mark.parametrize(
    ("log", "status", "kind", "line"),
    [
        ("a.cpp:1:10: fatal error: q.h: No such file or directory\n", 1, "missing header", "a.cpp:1:10: fatal error"),
        ('a.cu(1): error: cannot open source file "q.h"\n', 1, "missing header", "a.cu(1): error"),
        ("nvcc fatal   : Unsupported gpu architecture 'compute_77'\n", 1, "bad architecture", "nvcc fatal"),
        ("nvrtc: error: invalid value for --gpu-architecture (-arch)\n", 1, "bad architecture", "nvrtc: error"),
        ("nvrtc: error: failed to open libnvrtc-builtins.so.13.0.\n", 1, "incomplete toolkit", "nvrtc: error"),
        ("cc1plus: error: bad value 'x' for '-march=' switch\n", 1, "bad architecture", "cc1plus: error"),
        ("g++: fatal error: Killed signal terminated program cc1plus\n", 1, "killed", "g++: fatal error"),
        ("nvcc error   : 'cicc' died due to signal 9 (Kill signal)\n", 1, "killed", "nvcc error"),
        ("nvcc error   : 'cicc' died due to signal 11\n", 1, "crashed compiler", "nvcc error"),
        ("", 137, "killed", "the compiler ended with status 137"),
        ("x.h:1: note: a\n#error -- unsupported GNU version! gcc 99\n", 1, "unsupported host compiler", "#error"),
        ("nvcc fatal   : Failed to preprocess host compiler properties.\n", 1, "missing host compiler", "nvcc fatal"),
        ("a.cpp:9:15: error: static assertion failed: n is odd\n", 1, "failed static assertion", "a.cpp:9:15"),
        ("a: error: static assertion failed: P: its ctypes mirror has drifted\n", 1, "drifted parameters", "a: error"),
        ("ptxas a.ptx, line 9; error   : Unknown modifier\nptxas fatal   : aborted\n", 1, "assembler error", "ptxas"),
        ("ld: cannot find -lgomp\ncollect2: error: ld returned 1\n", 1, "linker error", "collect2: error"),
        ("a.cpp: error: cannot write: No space left on device\n", 1, "full disk", "a.cpp: error"),
        ("a.cpp:2:1: error: 'x' was not declared\n", 1, "error in the source", "a.cpp:2:1: error"),
        ("", 1, "silent failure", "said nothing"),
    ],
)
def test_the_cause_is_named_at_the_top(log: str, status: int, kind: str, line: str) -> None:
    found = compilation.diagnose("some: note\n" + log if log else log, status)
    error = compilation.compile_error("slug", found, "g++ x", Path("/logs/x"))
    top = str(error).splitlines()
    assert line in top[0]
    assert kind in top[1]
    assert len(top) <= 8
    assert "g++ x" in str(error)
    assert "/logs/x" in str(error)


def test_only_a_kill_is_worth_a_second_try() -> None:
    assert compilation.diagnose("", 137).was_killed
    assert compilation.diagnose("", -9).was_killed
    assert compilation.diagnose("g++: fatal error: Killed signal terminated program cc1plus", 1).was_killed
    assert not compilation.diagnose("a.cpp:2:1: error: 'x' was not declared", 1).was_killed
