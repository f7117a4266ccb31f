"""Loading and launching cubins, against a driver that only remembers: no GPU needed."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from scale import DEVICE, HOST

from quire import jit
from quire.errors import DriverError, PlanError, UnsupportedError, ValidationError
from quire.jit import machine, module
from quire.jit.machine import Driver, LaunchAttribute, LaunchConfig


@pytest.fixture(scope="module")
def stub_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stub") / "libcuda-stub.so"
    source = Path(__file__).with_name("stub_driver.cpp")
    subprocess.run(["g++", "-shared", "-fPIC", "-O1", "-o", str(path), str(source)], check=True)
    return path


class Stub:
    """What the stub remembers."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.library.get_current.restype = ctypes.c_size_t

    def number(self, name: str) -> int:
        kind = ctypes.c_size_t if name.startswith(("last_", "context_")) else ctypes.c_int
        return kind.in_dll(self.library, name).value

    def set(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self.library, name).value = value

    @property
    def config(self) -> LaunchConfig:
        return LaunchConfig.in_dll(self.library, "last_config")

    @property
    def attributes(self) -> ctypes.Array[LaunchAttribute]:
        return (LaunchAttribute * 2).in_dll(self.library, "last_attributes")


@pytest.fixture
def stub(stub_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    copy = tmp_path / "libcuda.so.1"  # a copy, so that each test has its own counters
    shutil.copy(stub_path, copy)
    api = Driver(str(copy))
    monkeypatch.setattr(module, "driver", lambda: api)
    monkeypatch.setattr(machine, "driver", lambda: api)
    yield Stub(copy)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What nvcc made for the first test is copied into the caches of the others."""
    return tmp_path_factory.mktemp("made") / "cache"


@pytest.fixture
def kernel(templates: Path, stub: Stub, cache: Path, made: Path) -> jit.CudaModule:
    if jit.toolchain.Nvcc.find() is None:
        pytest.skip("no nvcc")
    if made.exists():
        shutil.copytree(made, cache)
    loaded = jit.get_module(DEVICE, templates=templates)
    if not made.exists():
        shutil.copytree(cache, made)
    assert isinstance(loaded, jit.CudaModule)
    return loaded


def test_nothing_is_opened_before_a_device_is_prepared(kernel: jit.CudaModule, stub: Stub) -> None:
    assert stub.number("loads") == 0
    kernel.prepare(0)
    kernel.prepare(0)
    kernel.prepare(1)
    assert stub.number("loads") == 1


def test_a_launch_carries_everything(kernel: jit.CudaModule, stub: Stub) -> None:
    stub.library.set_current(100)
    kernel.launch(0xABC0, 7, 128, 1024, 0x55, 0)
    config = stub.config
    assert (config.grid_x, config.grid_y, config.grid_z) == (7, 1, 1)
    assert (config.block_x, config.block_y, config.block_z) == (128, 1, 1)
    assert (config.smem, config.stream, config.num_attributes) == (1024, 0x55, 0)
    assert stub.number("last_params") == 0xABC0
    assert stub.number("last_function") == 300
    pushes = stub.number("pushes")
    kernel.launch(0xDEF0, 7, 128, 1024, 0x66, 0)
    assert (stub.number("last_params"), stub.config.stream) == (0xDEF0, 0x66)
    assert stub.number("pushes") == pushes == 0  # already current: no switch


@pytest.mark.parametrize("current", [0, 100, 999])
def test_a_launch_respects_its_device_and_restores_the_current_one(
    current: int, kernel: jit.CudaModule, stub: Stub
) -> None:
    stub.library.set_current(current)
    kernel.launch(64, 1, 128, 0, 0, 1)
    assert stub.number("context_at_launch") == 101
    assert stub.number("last_function") == 301
    assert stub.library.get_current() == current
    assert stub.number("pushes") == stub.number("pops")


@pytest.mark.parametrize("current", [0, 100, 999])
def test_a_launch_on_a_stream_asks_for_no_context(current: int, kernel: jit.CudaModule, stub: Stub) -> None:
    kernel.prepare(1)
    stub.library.set_current(current)
    pushes = stub.number("pushes")
    kernel.launch(64, 1, 128, 0, 7, 1)
    assert (stub.number("last_function"), stub.number("pushes")) == (301, pushes)


def test_pdl_becomes_an_attribute(kernel: jit.CudaModule, stub: Stub) -> None:
    kernel.launch(64, 4, 128, 0, 0, 0, pdl=True)
    assert stub.config.num_attributes == 1
    assert (stub.attributes[0].id, list(stub.attributes[0].value)) == (6, [1] + [0] * 15)
    kernel.launch(64, 4, 128, 0, 0, 0)
    assert stub.config.num_attributes == 0


def test_a_planned_launch(kernel: jit.CudaModule, stub: Stub) -> None:
    planned = kernel.bind(0x1000, 132, 128, 200_000, 0)
    assert stub.number("max_smem_set") == 200_000
    planned.start(7)
    planned.start(8)
    assert (stub.number("launches"), stub.config.stream, stub.config.grid_x) == (2, 8, 132)
    planned.point_to(0x2000)
    planned.start(7)
    assert stub.number("last_params") == 0x2000


def test_shared_memory_is_allowed_once_and_bounded(kernel: jit.CudaModule, stub: Stub) -> None:
    kernel.prepare(0, 48 * 1024)
    assert stub.number("max_smem_set") == 0
    kernel.prepare(0, 100_000)
    assert stub.number("max_smem_set") == 100_000
    stub.set("max_smem_set", 0)
    kernel.prepare(0, 90_000)
    assert stub.number("max_smem_set") == 0
    with pytest.raises(UnsupportedError, match="232449 bytes of shared memory; device 0 has 232448"):
        kernel.prepare(0, 232_449)


def test_a_capture_never_loads(kernel: jit.CudaModule, stub: Stub) -> None:
    stub.set("capturing", 1)
    with pytest.raises(PlanError, match=r"scale.sm90a is not loaded on device 0 and the stream is being captured"):
        kernel.launch(64, 1, 128, 0, 5, 0)
    assert stub.number("loads") == 0
    kernel.prepare(0)
    kernel.launch(64, 1, 128, 0, 5, 0)
    assert stub.number("launches") == 1


def test_driver_errors_name_the_kernel_and_the_error(kernel: jit.CudaModule, stub: Stub) -> None:
    kernel.prepare(0)
    stub.set("refuse_launch", 1)
    with pytest.raises(DriverError, match=r"CUDA_ERROR_STUB: the stub refuses .*scale\.sm90a.*grid 9, block 128"):
        kernel.launch(64, 9, 128, 0, 0, 0)
    with pytest.raises(DriverError, match="device 2"):
        kernel.prepare(2)


def python_calls(call: Callable[[], None]) -> int:
    """How many Python functions `call` runs, besides itself."""
    count = 0

    def tell(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(tell)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count - 1


def test_a_launch_costs_the_host_little(kernel: jit.CudaModule, stub: Stub) -> None:
    """A planned launch is one Python call and one driver call; a free one adds finding the planned one."""
    planned = kernel.bind(0x1000, 132, 128, 0, 0)
    kernel.launch(0x1000, 132, 128, 0, 7, 0)
    functions = kernel.driver._functions
    called: list[str] = []
    for name, function in list(functions.items()):
        functions[name] = lambda *arguments, name=name, function=function: called.append(name) or function(*arguments)
    before = stub.number("launches")
    assert python_calls(lambda: planned.start(7)) == 1
    assert python_calls(lambda: kernel.launch(0x1000, 132, 128, 0, 7, 0)) == 3
    assert (stub.number("launches") - before, called) == (2, [])


def test_a_loaded_cubin_is_not_kept_in_memory(kernel: jit.CudaModule, stub: Stub) -> None:
    def bytes_held() -> int:
        return max(sys.getsizeof(value) for value in vars(kernel).values() if isinstance(value, bytes))

    assert bytes_held() > kernel.entry.manifest.size
    kernel.prepare(0)
    assert bytes_held() < 100
    kernel.prepare(1)
    assert stub.number("loads") == 1


def test_tensor_maps(stub: Stub) -> None:
    raw = ctypes.create_string_buffer(192)
    out = -(-ctypes.addressof(raw) // 64) * 64
    machine.encode_tensor_map(out, "bf16", 4096, [64, 8], [128], [64, 4], device=0, swizzle=128)
    assert list((ctypes.c_uint64 * 11).from_address(out)) == [9, 2, 64, 8, 128, 64, 4, 1, 3, 3, 0]
    machine.encode_tensor_map(out, "u8", 4096, [64, 8], [64], [64, 4], device=0, swizzle=64, promotion=128)
    assert list((ctypes.c_uint64 * 11).from_address(out)) == [0, 2, 64, 8, 64, 64, 4, 1, 2, 2, 0]
    with pytest.raises(DriverError, match=r"box=\[512, 4\]"):
        machine.encode_tensor_map(out, "bf16", 4096, [512, 8], [1024], [512, 4], device=0)
    for wrong in ({"element": "f7"}, {"swizzle": 96}, {"promotion": 32}, {"strides": [1, 2]}, {"out": out + 8}):
        arguments = {"out": out, "element": "f16", "address": 0, "dims": [8, 8], "strides": [16], "box": [8, 8]}
        with pytest.raises(ValidationError, match="tensor map"):
            machine.encode_tensor_map(**{**arguments, **wrong}, device=0)


def test_a_machine_without_a_driver_says_so() -> None:
    with pytest.raises(DriverError, match="the CUDA driver cannot be opened"):
        Driver("libcuda-that-is-not-there.so.1")


def test_an_old_driver_says_so(tmp_path: Path) -> None:
    source = tmp_path / "old.cpp"
    source.write_text(
        'extern "C" { int cuInit(unsigned) { return 0; } int cuDriverGetVersion(int* v) { *v = 11080; return 0; } }'
    )
    library = tmp_path / "libold.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    with pytest.raises(DriverError, match=r"no cuLibraryLoadData: .* this one is for CUDA 11\.8"):
        Driver(str(library)).function("cuLibraryLoadData")


CHECKS = """
#include <cuda.h>
#include <stddef.h>
static_assert(sizeof(CUlaunchConfig) == {config} && sizeof(CUlaunchAttribute) == {attribute}, "size");
static_assert(offsetof(CUlaunchConfig, sharedMemBytes) == {smem} && offsetof(CUlaunchConfig, hStream) == {stream}, "a");
static_assert(offsetof(CUlaunchConfig, attrs) == {attrs} && offsetof(CUlaunchConfig, numAttrs) == {count}, "b");
static_assert(offsetof(CUlaunchAttribute, value) == {value}, "c");
static_assert(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION == 6, "e");
static_assert(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES == 8, "f");
static_assert(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN == 97, "g");
static_assert(CU_TENSOR_MAP_DATA_TYPE_UINT8 == {u8} && CU_TENSOR_MAP_DATA_TYPE_UINT16 == {u16}, "h");
static_assert(CU_TENSOR_MAP_DATA_TYPE_UINT32 == {u32} && CU_TENSOR_MAP_DATA_TYPE_INT32 == {i32}, "h");
static_assert(CU_TENSOR_MAP_DATA_TYPE_UINT64 == {u64} && CU_TENSOR_MAP_DATA_TYPE_INT64 == {i64}, "h");
static_assert(CU_TENSOR_MAP_DATA_TYPE_FLOAT16 == {f16} && CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 == {bf16}, "i");
static_assert(CU_TENSOR_MAP_DATA_TYPE_FLOAT32 == {f32} && CU_TENSOR_MAP_DATA_TYPE_FLOAT64 == {f64}, "i");
static_assert(CU_TENSOR_MAP_DATA_TYPE_FLOAT32_FTZ == {f32_ftz}, "i");
static_assert(CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 == {tf32} && CU_TENSOR_MAP_DATA_TYPE_TFLOAT32_FTZ == {tf32_ftz}, "i");
static_assert(CU_TENSOR_MAP_SWIZZLE_128B == 3 && CU_TENSOR_MAP_L2_PROMOTION_L2_256B == 3, "j");
"""


def test_structs_are_the_drivers(tmp_path: Path) -> None:
    include = Path("/usr/local/cuda/include")
    if not (include / "cuda.h").exists():
        pytest.skip("no cuda.h")
    text = CHECKS.format(
        **machine._ELEMENT_TYPES,
        config=ctypes.sizeof(LaunchConfig),
        attribute=ctypes.sizeof(LaunchAttribute),
        smem=LaunchConfig.smem.offset,
        stream=LaunchConfig.stream.offset,
        attrs=LaunchConfig.attributes.offset,
        count=LaunchConfig.num_attributes.offset,
        value=LaunchAttribute.value.offset,
    )
    (tmp_path / "checks.cpp").write_text(text)
    subprocess.run(["g++", "-fsyntax-only", f"-I{include}", str(tmp_path / "checks.cpp")], check=True)


# --- the host --------------------------------------------------------------------------------------------------------


def test_host_targets_follow_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    v3 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"])
    v4 = v3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
    monkeypatch.setattr(machine.platform, "machine", lambda: "x86_64")
    for found, target in ((v4, "x86-64-v4"), (v4 - {"avx512vl"}, "x86-64-v3"), (v3 - {"fma"}, "native")):
        monkeypatch.setattr(machine, "features", lambda found=found: found)
        machine._best_target.cache_clear()
        assert machine.host_target() == target
    monkeypatch.setattr(machine.platform, "machine", lambda: "aarch64")
    machine._best_target.cache_clear()
    assert machine.host_target() == "aarch64"
    machine._best_target.cache_clear()


def test_a_library_for_another_processor_is_refused(templates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = jit.build(HOST, templates=templates)[1]
    other = replace(
        entry, manifest=replace(entry.manifest, target="aarch64" if HOST.target != "aarch64" else "x86-64-v3")
    )
    with pytest.raises(UnsupportedError, match="the best target here is"):
        jit.load(other)
