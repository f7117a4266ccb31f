"""NVRTC as a toolchain: the library where it is installed, and stand-ins for its worker where that is enough."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from scale import DEVICE, FakeCompiler

from quire import jit
from quire.cli import aot
from quire.errors import CompileError
from quire.jit import compilation, nvrtc_worker, toolchain
from quire.jit.compilation import Memory
from quire.jit.machine import CUDA_TARGETS
from quire.jit.toolchain import Nvcc, Nvrtc, for_target
from quire.kernels.operation import OPERATIONS, OperationKey

needs_nvrtc = pytest.mark.skipif(Nvrtc.find() is None, reason="no libnvrtc: pip install nvidia-cuda-nvrtc")
needs_nvcc = pytest.mark.skipif(Nvcc.find() is None, reason="no nvcc")

#: Takes the place of nvrtc_worker.py: answers --version, else runs `{body}` with LIBRARY SOURCE ARTIFACT LOG OPTION...
WORKER = """
import os, pathlib, signal, sys, time
if sys.argv[2:] == ["--version"]:
    print("Cuda compilation tools, release 99.0")
    sys.exit()
source, artifact, log = map(pathlib.Path, sys.argv[2:5])
{body}
"""

#: One unit whose only function is `{body}` of the parameters p.
KERNEL = """#pragma once
namespace quire {{
struct ScaleParams {{
  float* x;
  int n;
  float factor;
}};
template <class V>
struct Scale {{
  static constexpr int kThreads = V::kThreads, kMinCtas = 1;
  __device__ static void run(const ScaleParams& p, unsigned char*) {{
{body}
  }}
}};
}}
"""

#: Products of the tensor cores whose results are changed while they are under way: ptxas has to serialise them.
SERIALISED = """
    float d[4] = {};
    asm volatile("wgmma.fence.sync.aligned;");
    for (int i = 0; i < 2; ++i) {
      asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, %4, %4, 1, 1, 1, 0, 0;"
                   : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"((unsigned long long)p.n));
      d[0] *= 2.f;
    }
    asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;");
    for (int i = 0; i < 4; ++i) p.x[i] = d[i];
"""

#: 200 numbers that live at once, where 1024 threads leave 64 registers to each.
SPILLING = """
    float v[200];
#pragma unroll
    for (int i = 0; i < 200; ++i) v[i] = p.x[i * 1024 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 200; ++i) p.x[(i + 1) * 1024 - threadIdx.x] = v[i] * v[(i * 7) % 200];
"""


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVRTC by name, although nvcc may be there."""
    monkeypatch.setenv("QUIRE_TOOLCHAIN", "nvrtc")


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A machine without nvcc, with a libnvrtc that is an empty file and a worker that does what the test says."""
    library = tmp_path / "toolkit/lib64/libnvrtc.so.99"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"")
    monkeypatch.setattr(Nvcc, "places", classmethod(lambda _: iter(())))
    monkeypatch.setattr(toolchain, "_directories", lambda: iter([("test", library.parent)]))
    worker = tmp_path / "worker.py"
    monkeypatch.setattr(nvrtc_worker, "__file__", str(worker))

    def write(body: str) -> None:
        worker.write_text(WORKER.format(body=body))

    write(f"artifact.write_bytes(pathlib.Path({str(FakeCompiler.library)!r}).read_bytes())")
    return write


def put_kernel(templates: Path, body: str) -> None:
    (templates / "include/quire/kernels/scale.h").write_text(KERNEL.format(body=body))


# --- the library -----------------------------------------------------------------------------------------------------


@needs_nvrtc
def test_a_cubin_and_its_figures(templates: Path, real: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "find_ninja", lambda: pytest.fail("NVRTC needs no ninja"))
    status, entry = jit.build(DEVICE, templates=templates)
    assert status == "built"
    assert entry.artifact.read_bytes()[:4] == b"\x7fELF"
    manifest = entry.manifest
    assert (manifest.spills, manifest.stack, manifest.warnings, manifest.target) == (0, 0, [], "sm90a")
    assert manifest.registers is not None and manifest.seconds > 0
    assert manifest.toolchain["toolchain"] == "nvrtc"
    assert "release" in manifest.toolchain["version"]
    assert {path.name for path in entry.path.iterdir()} == {"build.log", "manifest.json", "variant.cu", "variant.cubin"}


@needs_nvrtc
def test_artifacts_hold_no_path_of_the_build(templates: Path, real: None, tmp_path: Path) -> None:
    one = jit.build(DEVICE, store=jit.Store(tmp_path / "one"), templates=templates)[1]
    two = jit.build(DEVICE, store=jit.Store(tmp_path / "two"), templates=templates)[1]
    assert one.artifact.read_bytes() == two.artifact.read_bytes()


@needs_nvrtc
@needs_nvcc
def test_exports_are_those_of_nvcc(templates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(DEVICE, exports=("kThreads", "kMinCtas"))
    found = {}
    for name in ("nvcc", "nvrtc"):
        monkeypatch.setenv("QUIRE_TOOLCHAIN", name)
        status, entry = jit.build(spec, templates=templates)
        assert status == "built", f"{name} was named, so another toolchain's entry does not do"
        found[name] = entry.manifest.exports
    assert found["nvrtc"] == found["nvcc"] == {"kThreads": 128, "kMinCtas": 1}


@needs_nvrtc
def test_an_error_names_its_file_and_line(templates: Path, real: None) -> None:
    header = templates / "include/quire/core/factor.h"
    header.write_text("#pragma once\nnamespace quire {\nconstexpr int kFactor = nonsense;\n}\n")
    with pytest.raises(CompileError) as raised:
        jit.build(DEVICE, templates=templates)
    lines = str(raised.value).splitlines()
    assert lines[0].startswith("include/quire/core/factor.h(3): error:") and "nonsense" in lines[0]
    assert "error in the source" in lines[1]
    assert "nonsense" in Path(lines[-1].partition("log:")[2].strip()).read_text()


@needs_nvrtc
def test_a_drifted_struct_stops_the_build(templates: Path, real: None) -> None:
    drifted = replace(DEVICE, params=jit.Struct("ScaleParams", 16, (("x", 0), ("n", 12), ("factor", 8))))
    with pytest.raises(CompileError, match=r"ScaleParams\.n is not at offset 12(.|\n)*drifted parameters"):
        jit.build(drifted, templates=templates)


@needs_nvrtc
def test_an_architecture_that_it_does_not_know(templates: Path, real: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CUDA_TARGETS, "sm999", "999")
    with pytest.raises(CompileError, match="bad architecture"):
        jit.build(replace(DEVICE, target="sm999"), templates=templates)


@needs_nvrtc
def test_lost_performance_is_reported(templates: Path, real: None) -> None:
    put_kernel(templates, SERIALISED)
    warnings = jit.build(DEVICE, templates=templates)[1].manifest.warnings
    assert any(re.search(r"C75(0[89]|1[0-8])", line) for line in warnings), warnings


@needs_nvrtc
def test_spills_are_counted(templates: Path, real: None) -> None:
    put_kernel(templates, SPILLING)
    wide = replace(DEVICE, constants=(("kThreads", 1024),), asserts=())
    manifest = jit.build(wide, templates=templates)[1].manifest
    assert manifest.spills is not None and manifest.spills > 0
    assert manifest.registers is not None and manifest.registers <= 64


@needs_nvrtc
def test_an_old_library_is_refused_by_its_version() -> None:
    library = Nvrtc.require().path
    script = (
        "import runpy\n"
        f"worker = runpy.run_path({nvrtc_worker.__file__!r})\n"
        "worker['version'].__globals__['OLDEST'] = (99, 0)\n"
        f"worker['version'](worker['Nvrtc']({library!r}))"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: expected NVRTC 99.0 or newer, found 1")


@needs_nvrtc
def test_a_library_that_cannot_be_loaded_is_named(
    templates: Path, real: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "libnvrtc.so.13"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(toolchain, "_directories", lambda: iter([("test", tmp_path)]))
    with pytest.raises(CompileError, match="libnvrtc cannot be loaded"):
        jit.build(DEVICE, templates=templates)


def operations() -> list[str]:
    """A variant of each operation: its first type, its widest vectors."""
    slugs = ["append.sm80.u8.v1", "merge.sm80.bf16.v8"]
    for operation in OPERATIONS.values():
        if operation.on_cuda and operation.widths:  # without: its variants are those of an expression
            element, widths = next(iter(operation.widths.items()))
            slugs.append(OperationKey(operation.name, "sm90a", element, max(widths)).slug)
    return slugs


ATTENTION = [
    "attention_decode.sm80.bf16-e4m3-bf16.d128-128.paged.causal.m16",
    "attention_fa2.sm90a.bf16-bf16-bf16.d128-128.ragged.custom.m128",
    "attention_fa2.sm90a.fp16-e4m3-fp16.d256-256.paged.causal.m64",
    "attention_decode.sm90a.bf16-nvfp4-bf16.d128-128.paged16.none.m16",
    "attention_fa2.sm80.fp16-nvfp4-fp16.d64-64.ragged.causal.m16",
    "attention_fa3.sm90a.bf16-bf16-bf16.d128-128.paged16.causal.m128",
    "attention_fa3_fp8.sm90a.e4m3-e4m3-bf16.d128-128.paged16.causal.m192",
    "pod.sm90a.attention_fa3.sm90a.bf16-bf16-bf16.d128-128.paged16.causal.m192.beside."
    "attention_decode.sm90a.bf16-bf16-bf16.d128-128.paged.none.m16",
]

#: Of architectures that no variant has run on, as `quire matrix` says: those that leave the fewest registers.
UNTRIED = [
    "attention_decode.sm89.bf16-e4m3-bf16.d128-128.paged.causal.m32",
    "attention_decode.sm100a.bf16-bf16-bf16.d128-128.paged.none.m32",
    "attention_fa2.sm100a.bf16-bf16-bf16.d256-256.paged.causal.m16",
    "attention_decode.sm120a.bf16-bf16-bf16.d128-128.paged.causal.m16",
    "attention_fa2.sm120a.bf16-bf16-bf16.d256-256.paged.causal.m64",
]


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize("slug", UNTRIED)
def test_other_architectures_compile_without_a_spill(slug: str, real: None) -> None:
    manifest = jit.build(aot.spec_of(slug))[1].manifest
    assert (manifest.spills, manifest.warnings) == (0, [])


@needs_nvrtc
@pytest.mark.parametrize(
    "slug",
    [*operations()[:3], *(pytest.param(slug, marks=pytest.mark.slow) for slug in (*operations()[3:], *ATTENTION))],
)
def test_every_kernel_compiles_without_a_spill(slug: str, real: None) -> None:
    manifest = jit.build(aot.spec_of(slug))[1].manifest
    assert (manifest.spills, manifest.warnings) == (0, [])


# --- which toolchain -------------------------------------------------------------------------------------------------


def test_it_is_chosen_where_there_is_no_nvcc(stand_in: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    assert for_target("sm90a") is Nvrtc
    monkeypatch.setenv("QUIRE_NVCC", "/no/nvcc")  # whoever names an nvcc wants that one or an error
    assert for_target("sm90a") is Nvcc
    monkeypatch.setenv("QUIRE_TOOLCHAIN", "nvrtc")
    assert for_target("sm90a") is Nvrtc
    monkeypatch.setenv("QUIRE_TOOLCHAIN", "nvcc")
    assert for_target("sm90a") is Nvcc


@needs_nvcc
def test_nvcc_is_preferred() -> None:
    assert for_target("sm90a") is Nvcc


def test_a_machine_with_neither_is_told_of_both(
    templates: Path, stand_in: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "_directories", lambda: iter(()))
    with pytest.raises(CompileError, match=r"no nvcc was found(.|\n)*pip install nvidia-cuda-nvrtc"):
        jit.build(DEVICE, templates=templates)
    monkeypatch.setenv("QUIRE_TOOLCHAIN", "nvrtc")
    with pytest.raises(CompileError, match=r"no nvrtc was found(.|\n)*pip install nvidia-cuda-nvrtc"):
        jit.build(DEVICE, templates=templates)


def fake_nvcc(path: Path) -> Path:
    """A compiler that answers --version and copies its unit."""
    path.write_text(
        "#!/bin/sh\n"
        'case " $* " in *" --version "*) echo Cuda; echo "Build 7"; exit 0;; esac\n'
        f'while [ $# -gt 0 ]; do [ "$1" = -o ] && cp "{FakeCompiler.library}" "$2"; shift; done\n'
    )
    path.chmod(0o755)
    return path


def test_nvcc_and_nvrtc_serve_each_other(
    templates: Path,
    stand_in: Callable[[str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    restart: Callable[[], None],
) -> None:
    """Each has been used with the cache, so that its version is known, and builds only what neither has built."""
    nvcc = str(fake_nvcc(tmp_path / "nvcc"))
    have_nvcc = classmethod(lambda _: iter([("test", nvcc, False)]))
    have_none = classmethod(lambda _: iter(()))
    other = replace(DEVICE, slug="other.sm90a", entry="quire_other")
    assert jit.build(DEVICE, templates=templates)[1].manifest.toolchain["toolchain"] == "nvrtc"
    monkeypatch.setattr(Nvcc, "places", have_nvcc)
    assert jit.build(other, templates=templates)[1].manifest.toolchain["toolchain"] == "nvcc"
    for places, spec in itertools.product((have_nvcc, have_none), (DEVICE, other)):
        monkeypatch.setattr(Nvcc, "places", places)
        restart()
        assert jit.build(spec, templates=templates)[0] == "hit"
    monkeypatch.setenv("QUIRE_TOOLCHAIN", "nvrtc")  # whoever names a toolchain wants its code
    assert jit.build(other, templates=templates)[0] == "built"


def test_the_version_is_asked_once_and_again_when_the_library_changes(
    stand_in: Callable[[str], None], tmp_path: Path
) -> None:
    toolchain, memory = Nvrtc.require(), Memory(tmp_path / "compilers.json")
    builtins = Path(toolchain.path).with_name("libnvrtc-builtins.so.99")
    builtins.write_bytes(b"1")
    assert toolchain.version(memory) == "Cuda compilation tools, release 99.0"
    assert toolchain.known_version(Memory(tmp_path / "compilers.json")) == "Cuda compilation tools, release 99.0"
    builtins.write_bytes(b"22")
    assert toolchain.known_version(memory) is None


def test_its_half_of_the_name_tells_version_and_flags() -> None:
    parts = Nvrtc("/some/where", named=True).parts("sm90a", "13.0")
    assert sorted(parts) == ["flags", "toolchain", "version"]
    assert "sm_90a" in parts["flags"] and "/" not in parts["flags"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc-builtins.so.13.0", "libnvrtc.alt.so.14"], "libnvrtc.so.13"),
        (["libnvrtc-672ee683.so.11.2", "libnvrtc-builtins-2dc4bf68.so.11.2"], "libnvrtc-672ee683.so.11.2"),
        (["libnvrtc-builtins.so.13.0"], None),
    ],
)
def test_the_library_of_a_directory(names: list[str], expected: str | None, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).touch()
    found = toolchain._library(tmp_path)
    assert (None if found is None else Path(found).name) == expected


def test_it_is_sought_where_the_loader_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libnvrtc.so.99").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}:")
    assert str(tmp_path / "libnvrtc.so.99") in [path for _, path, _ in Nvrtc.places()]


# --- the child process -----------------------------------------------------------------------------------------------


def test_a_worker_that_hangs_is_stopped(
    templates: Path, stand_in: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in("time.sleep(60)")
    monkeypatch.setattr(compilation, "TIME_LIMIT_SECONDS", 1.0)
    with pytest.raises(CompileError, match=r"stopped at the time limit of 1 s\n  cause:   time limit"):
        jit.build(DEVICE, templates=templates)


def test_a_killed_worker_gets_one_more_try(templates: Path, stand_in: Callable[[str], None], tmp_path: Path) -> None:
    once = tmp_path / "once"
    stand_in(
        f"if not os.path.exists({str(once)!r}):\n"
        f"    open({str(once)!r}, 'w').close()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        f"artifact.write_bytes(pathlib.Path({str(FakeCompiler.library)!r}).read_bytes())"
    )
    assert jit.build(DEVICE, templates=templates)[0] == "built"


def test_a_worker_that_crashes_is_a_crashed_compiler(templates: Path, stand_in: Callable[[str], None]) -> None:
    stand_in("os.kill(os.getpid(), signal.SIGSEGV)")
    with pytest.raises(CompileError, match="crashed compiler"):
        jit.build(DEVICE, templates=templates)


def test_a_python_that_does_not_know_itself_is_named(
    templates: Path, stand_in: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(CompileError, match=r"sys\.executable"):
        jit.build(DEVICE, templates=templates)


def test_the_worker_imports_the_standard_library_only() -> None:
    tree = ast.parse(Path(nvrtc_worker.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names
