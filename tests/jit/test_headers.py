"""The include closure: complete, strict, and blind to what a unit of the other kind would see."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from quire.errors import CompileError
from quire.jit import unit
from quire.jit.toolchain import Nvcc
from quire.jit.unit import closure


def write(root: Path, **texts: str) -> Path:
    for name, text in texts.items():
        path = root / "quire" / f"{name}.h"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def names(root: Path, *, device: bool = True) -> list[str]:
    return [header.name for header in closure(root, "quire/a.h", device=device)]


def test_follows_every_own_include(tmp_path: Path) -> None:
    write(tmp_path, a='#include "quire/b.h"\n', b='  #  include   "quire/c.h"  // why\n', c='#include "quire/a.h"\n')
    assert names(tmp_path) == ["quire/a.h", "quire/b.h", "quire/c.h"]


@pytest.mark.parametrize(
    "text",
    [
        '// #include "quire/b.h"\n',
        '/* \n#include "quire/b.h"\n*/\n',
        'const char* s = "\\\n#include <evil>";\n',
        'auto s = R"x(\n#include <evil>\n)x";\n',
        "#ifndef __CUDACC__\n#include <math.h>\n#endif\n",
        "#if !defined(__CUDACC__)\n#if FOO\n#include <math.h>\n#endif\n#endif\n",
        '#ifdef __CUDACC__\n#else\n#include "quire/missing.h"\n#endif\n',
    ],
)
def test_ignores_what_a_device_unit_does_not_include(tmp_path: Path, text: str) -> None:
    write(tmp_path, a=text)
    assert names(tmp_path) == ["quire/a.h"]


def test_an_unknown_condition_hides_nothing(tmp_path: Path) -> None:
    write(
        tmp_path, a='#if __CUDA_ARCH__ >= 900\n#include "quire/b.h"\n#else\n#include "quire/c.h"\n#endif\n', b="", c=""
    )
    assert names(tmp_path) == ["quire/a.h", "quire/b.h", "quire/c.h"]


def test_device_units_may_use_two_system_headers(tmp_path: Path) -> None:
    write(tmp_path, a="#include <stdint.h>\n#include <stddef.h>\n")
    assert names(tmp_path) == ["quire/a.h"]


@pytest.mark.parametrize("include", ["<math.h>", "<immintrin.h>", "<stdlib.h>"])
def test_host_units_may_use_a_few_system_headers(tmp_path: Path, include: str) -> None:
    write(tmp_path, a=f"#include {include}\n")
    assert names(tmp_path, device=False) == ["quire/a.h"]
    with pytest.raises(CompileError, match="device unit"):
        names(tmp_path)


@pytest.mark.parametrize(
    "directive",
    [
        "#include <vector>",
        '#include "local.h"',
        '#include "quire/../x.h"',
        "#include MACRO",
        '#include_next "quire/b.h"',
    ],
)
def test_refuses_what_a_key_cannot_account_for(tmp_path: Path, directive: str) -> None:
    write(tmp_path, a=directive + "\n", b="")
    with pytest.raises(CompileError, match=r"quire/a\.h: include"):
        names(tmp_path, device=False)


def test_a_missing_header_names_its_includer(tmp_path: Path) -> None:
    write(tmp_path, a='#include "quire/gone.h"\n')
    with pytest.raises(CompileError, match=r'quire/a\.h: missing header: "quire/gone\.h"'):
        names(tmp_path)


# What nvcc includes of its own accord

BEFORE = unit.root() / "include" / "cuda_runtime.h"


def test_device_units_reach_what_nvcc_includes(tmp_path: Path) -> None:
    write(tmp_path, a="")
    (tmp_path / "cuda_runtime.h").write_text('#include "crt/host_defines.h"\n')
    assert names(tmp_path) == ["cuda_runtime.h", "quire/a.h"]
    assert names(tmp_path, device=False) == ["quire/a.h"]


@pytest.mark.parametrize("target", ["sm80", "sm90a"])
@pytest.mark.skipif(Nvcc.find() is None, reason="no nvcc")
def test_it_is_to_a_cubin_as_the_toolkits_own(tmp_path: Path, target: str) -> None:
    """Each function that it declares, and some intrinsics of the headers that it includes."""
    calls = [
        f"{name}({', '.join('xyz'[: parameters.count('float')])})"
        for name, parameters in re.findall(r"^QUIRE_BUILTIN (\w+)\((.*)\);", BEFORE.read_text(), re.M)
    ]
    assert len(calls) > 30
    calls += ["__shfl_xor_sync(~0u, x, 1)", "__ldg(p)", "__expf(x)", "__uint_as_float(__byte_perm(1, threadIdx.x, 2))"]
    lines = "\n".join(f"  *p++ = {call};" for call in calls)
    (tmp_path / "unit.cu").write_text(
        f'extern "C" __global__ void k(float* p, float x, float y, float z) {{\n{lines}\n__syncthreads();\n}}\n'
    )
    nvcc, cubins = Nvcc.require(), []
    for name, path in (("ours", ["-I", str(BEFORE.parent)]), ("toolkit", [])):
        words = [nvcc.path, *nvcc.flags(target), *path, "-o", f"{name}.cubin", "unit.cu"]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stderr}"
        cubins.append((tmp_path / f"{name}.cubin").read_bytes())
    assert cubins[0] == cubins[1]
