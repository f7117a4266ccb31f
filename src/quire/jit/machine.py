"""This machine's processor, memory and GPUs: the targets that run here, how many compilers fit, and libcuda.so.1.

The processor and the memory are read from /proc. The driver's few calls that load and launch a cubin go through ctypes,
without libcudart. Nothing happens on import; the library is opened by the first `driver()`.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from quire.errors import DriverError, UnsupportedError, ValidationError
from quire.jit import config

#: Device targets and the architecture nvcc calls them by. a: that architecture only; f: its family.
_CUDA_ARCHITECTURES = (
    *("75", "80", "86", "87", "88", "89", "90", "90a"),
    *("100", "100a", "100f", "101", "101a", "103", "103a", "103f"),
    *("110", "110a", "110f", "120", "120a", "120f", "121", "121a", "121f"),
)
CUDA_TARGETS: dict[str, str] = {f"sm{arch}": arch for arch in _CUDA_ARCHITECTURES}

#: What an x86-64 microarchitecture level adds, in the names of /proc/cpuinfo (psABI; lzcnt is abm there).
_LEVELS: dict[str, frozenset[str]] = {
    "x86-64-v3": frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}),
    "x86-64-v4": frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    "x86-64-v4-bf16": frozenset({"avx512_bf16"}),
    "x86-64-v4-amx": frozenset({"amx_tile", "amx_bf16"}),
}

#: Targets with instructions that multiply bf16, and the targets of code that does not use these instructions.
_WITHOUT_MATRIX_UNIT = {"x86-64-v4-amx": "x86-64-v4", "x86-64-v4-bf16": "x86-64-v4"}

#: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA): its number on x86-64, and its arguments.
_REQUEST_TILES = (158, 0x1023, 18)

#: Bytes that a compile is assumed to need if none was measured, and at least.
_BYTES_PER_JOB, _LEAST_PER_JOB = 1 << 30, 1 << 27


def _cpuinfo() -> Iterator[tuple[str, str]]:
    """The lines of /proc/cpuinfo, of all processors."""
    path = Path("/proc/cpuinfo")
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        name, _, value = line.partition(":")
        yield name.strip(), value.strip()


@cache
def features() -> frozenset[str]:
    """The instruction set extensions of processor 0, in /proc/cpuinfo's names; empty if that file has none."""
    lists = (value for name, value in _cpuinfo() if name in ("flags", "Features"))
    return frozenset(next(lists, "").split())


@cache
def fingerprint() -> str:
    """A digest of the processor's model and extensions, on which `-march=native` depends: part of native requests."""
    identifying = ("vendor_id", "cpu family", "model", "stepping", "CPU implementer", "CPU part", "CPU variant")
    model = (f"{name}={value}" for name, value in _cpuinfo() if name in identifying)
    parts = {platform.machine(), *features(), *model}
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()[:16]


def supports(target: str) -> bool:
    """Whether this processor runs artifacts of the host target `target`. Entries of "native" name their processor."""
    machine = platform.machine()
    if target == "native":
        return "amx_tile" not in features() or may_use_tiles()
    if target == "aarch64":
        return machine in ("aarch64", "arm64")
    if machine not in ("x86_64", "AMD64") or target not in _LEVELS:
        return False
    needed = frozenset[str]().union(*(need for level, need in _LEVELS.items() if _includes(target, level)))
    return needed <= features() and ("amx_tile" not in needed or may_use_tiles())


def _includes(target: str, level: str) -> bool:
    """Whether a processor that runs `target` has all of `level`."""
    return level == target or level <= without_matrix_unit(target)


@cache
def may_use_tiles() -> bool:
    """Whether Linux lets this process use AMX: requested once, for all of its threads. A sandbox may refuse."""
    return platform.system() == "Linux" and ctypes.CDLL(None).syscall(*map(ctypes.c_long, _REQUEST_TILES)) == 0


def host_target(*, matrix_unit: bool = False) -> str:
    """The target of host code: QUIRE_CPU_TARGET, or the best portable one of this machine.

    `matrix_unit`: the code uses the matrix unit. Other code is the same with and without one.
    """
    asked = config.cpu_target()
    if asked is not None and not supports(asked):
        raise ValidationError(
            f"QUIRE_CPU_TARGET: this processor does not run {asked!r}; expected {_best_target()} or native."
        )
    target = asked or _best_target()
    return target if matrix_unit else without_matrix_unit(target)


def without_matrix_unit(target: str) -> str:
    """The target, on the same processor, of code that does not use the matrix unit."""
    return _WITHOUT_MATRIX_UNIT.get(target, target)


@cache
def _best_target() -> str:
    """x86-64-v4-amx, x86-64-v4-bf16, x86-64-v4, x86-64-v3 or aarch64; "native" if the processor runs none of them."""
    portable = ("x86-64-v4-amx", "x86-64-v4-bf16", "x86-64-v4", "x86-64-v3", "aarch64")
    return next((target for target in portable if supports(target)), "native")


def available_bytes() -> int:
    """Bytes of memory that this process may still use, by the machine and by its control group."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    meminfo = Path("/proc/meminfo")
    for line in meminfo.read_text().splitlines() if meminfo.exists() else ():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        if not (Path(limit).exists() and Path(used).exists()):
            continue
        allowed = Path(limit).read_text().strip()
        if allowed.isdigit():
            reclaimable = _inactive_files(Path(limit).with_name("memory.stat"))
            available = min(available, int(allowed) - int(Path(used).read_text()) + reclaimable)
    return available


def _inactive_files(path: Path) -> int:
    """Bytes of file cache in a control group's usage, which the kernel frees when memory is short."""
    for line in path.read_text().splitlines() if path.exists() else ():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _processors() -> int:
    """Processors that this process may use: its affinity, or fewer if its control group has a quota."""
    count = len(os.sched_getaffinity(0))
    for file in (Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")):
        if not file.exists():
            continue
        words = file.read_text().split()
        if len(words) == 1 and (period := file.with_name("cpu.cfs_period_us")).exists():
            words.append(period.read_text().strip())
        if len(words) == 2 and all(word.isdigit() and int(word) for word in words):
            count = min(count, -(-int(words[0]) // int(words[1])))
    return count


def default_jobs(peak_bytes: int | None = None) -> int:
    """How many compilers may run at once: one for each processor, or fewer if memory is short.

    `peak_bytes`: peak memory of the largest compile so far, or None. Half as much again is added as a margin.
    """
    each = _BYTES_PER_JOB if peak_bytes is None else max(peak_bytes * 3 // 2, _LEAST_PER_JOB)
    return max(1, min(_processors(), available_bytes() // each))


# --- libcuda.so.1 ----------------------------------------------------------------------------------------------------


_MAX_SMEM_OPTIN = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: an id and a value of 64 bytes, of which Quire uses one integer."""

    PDL = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    _fields_ = (("id", c_int), ("pad", ctypes.c_char * 4), ("value", c_uint * 16))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "smem")),
        ("stream", c_void_p),
        ("attributes", POINTER(LaunchAttribute)),
        ("num_attributes", c_uint),
    )


_SIGNATURES: dict[str, tuple[Any, ...] | None] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxGetCurrent": (c_void_p,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuStreamIsCapturing": (c_void_p, POINTER(c_int)),
    "cuMemcpyHtoDAsync_v2": (c_void_p, c_void_p, c_size_t, c_void_p),
    "cuMemHostAlloc": (POINTER(c_void_p), c_size_t, c_uint),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventQuery": (c_void_p,),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuLibraryLoadData": (POINTER(c_void_p), c_char_p, c_void_p, c_void_p, c_uint, c_void_p, c_void_p, c_uint),
    "cuLibraryGetKernel": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuKernelGetFunction": (POINTER(c_void_p), c_void_p),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    "cuLaunchKernelEx": None,  # arguments are converted once in a plan, not at each launch
    "cuTensorMapEncodeTiled": (
        *(c_void_p, c_int, c_uint, c_void_p, POINTER(c_uint64), POINTER(c_uint64)),
        *(POINTER(c_uint), POINTER(c_uint), c_int, c_int, c_int, c_int),
    ),
    "cuTensorMapReplaceAddress": (c_void_p, c_void_p),
}


class Driver:
    """The opened driver. C functions are attributes of the same name and return the CUresult; `call` checks it."""

    def __init__(self, path: str = "libcuda.so.1") -> None:
        try:
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise DriverError(
                f"the CUDA driver cannot be opened ({error}); install the NVIDIA driver, or use device='cpu'"
            ) from error
        self._functions: dict[str, Any] = {}
        self._contexts: dict[int, int] = {}
        self.call("cuInit", 0)

    def function(self, name: str) -> Any:
        """The C function `name`, with its argument types set; DriverError if this driver is too old to have it."""
        found = self._functions.get(name)
        if found is None:
            try:
                found = getattr(self._library, name)
            except AttributeError as error:
                raise DriverError(
                    f"the CUDA driver has no {name}: it needs a driver for CUDA 12.0 or newer, this one is for CUDA "
                    f"{self.version_text()}; update the NVIDIA driver"
                ) from error
            found.argtypes, found.restype = _SIGNATURES[name], c_int
            self._functions[name] = found
        return found

    def version_text(self) -> str:
        """The CUDA version of the driver, "13.0"."""
        version = c_int()
        self._library.cuDriverGetVersion(byref(version))
        return f"{version.value // 1000}.{version.value % 1000 // 10}"

    def describe(self, code: int) -> str:
        """The driver's name and description of an error code."""
        words = []
        for name in ("cuGetErrorName", "cuGetErrorString"):
            text = c_char_p()
            if self.function(name)(code, byref(text)) == 0 and text.value is not None:
                words.append(text.value.decode(errors="replace"))
        return ": ".join(words) or f"error {code}"

    def check(self, code: int, call: str, context: str = "") -> None:
        """DriverError unless `code` is success; `context` says what was being done."""
        if code != 0:
            raise DriverError(f"{call} failed with {self.describe(code)}" + (f" ({context})" if context else ""))

    def call(self, name: str, *arguments: Any, context: str = "") -> None:
        """Call the C function `name` and check its result."""
        self.check(self.function(name)(*arguments), name, context)

    def device_count(self) -> int:
        """Devices that the driver shows to this process."""
        count = c_int()
        self.call("cuDeviceGetCount", byref(count))
        return count.value

    def attribute(self, device: int, attribute: int) -> int:
        """One CUdevice_attribute of `device`."""
        value, handle = c_int(), c_int()
        self.call("cuDeviceGet", byref(handle), device, context=f"device {device}")
        self.call("cuDeviceGetAttribute", byref(value), attribute, handle)
        return value.value

    def max_dynamic_smem(self, device: int) -> int:
        """Bytes of shared memory a block may ask for on `device`."""
        return self.attribute(device, _MAX_SMEM_OPTIN)

    def context(self, device: int) -> int:
        """The primary context of `device`, the one torch uses. Retained for the life of the process."""
        known = self._contexts.get(device)
        if known is None:
            handle, retained = c_int(), c_void_p()
            self.call("cuDeviceGet", byref(handle), device, context=f"device {device}")
            self.call("cuDevicePrimaryCtxRetain", byref(retained), handle, context=f"device {device}")
            known = self._contexts[device] = retained.value or 0
        return known

    @contextmanager
    def current(self, device: int) -> Iterator[None]:
        """Make `device`'s primary context current for the body, then restore what was current."""
        wanted, now = self.context(device), c_void_p()
        self.call("cuCtxGetCurrent", byref(now))
        if now.value == wanted:
            yield
            return
        self.call("cuCtxPushCurrent_v2", wanted)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", byref(now))

    def capturing(self, stream: int) -> bool:
        """Whether `stream` is being captured into a graph."""
        status = c_int()
        self.call("cuStreamIsCapturing", stream, byref(status))
        return status.value != 0


@cache
def driver() -> Driver:
    """The process's driver, opened on first use; DriverError if there is none."""
    return Driver()


def available() -> bool:
    """Whether there is a driver with at least one device. Opens the driver but creates no context."""
    try:
        return driver().device_count() > 0
    except DriverError:  # no driver
        return False


#: CUtensorMapDataType: every element type of TMA. e4m3 and e5m2 are copied as u8.
_ELEMENT_TYPES = {
    "u8": 0, "u16": 1, "u32": 2, "i32": 3, "u64": 4, "i64": 5, "f16": 6, "f32": 7, "f64": 8, "bf16": 9,
    "f32_ftz": 10, "tf32": 11, "tf32_ftz": 12,
}  # fmt: skip
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_PROMOTIONS = {64: 1, 128: 2, 256: 3}
_FILL_WITH_ZEROS = 0


def _choice(name: str, value: Any, table: dict[Any, int]) -> int:
    if value not in table:
        raise ValidationError(f"tensor map: {name}: expected one of {', '.join(map(repr, table))}, got {value!r}")
    return table[value]


def encode_tensor_map(
    out: int,
    element: str,
    address: int,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    *,
    device: int,
    swizzle: int = 128,
    promotion: int = 256,
) -> None:
    """Write the tiled TMA descriptor of a tensor on `device` into the 128 bytes at `out` (64-byte aligned host memory).

    `element`: the driver's element type, such as "bf16" or "u8". `dims`: elements, innermost first. `strides`: bytes,
    of every dimension but the innermost (which is contiguous). `box`: elements of the tile. `swizzle`: 0, 32, 64 or 128
    bytes. `promotion`: the bytes that an L2 miss reads, 64, 128 or 256. Reads beyond the tensor give zeros.
    DriverError, with the arguments in its text, if the driver refuses.
    """
    rank = len(dims)
    if not 1 <= rank <= 5 or len(strides) != rank - 1 or len(box) != rank:
        raise ValidationError(
            f"tensor map: expected 1-5 dims, one stride less and as many box sizes, got dims={list(dims)}, "
            f"strides={list(strides)}, box={list(box)}"
        )
    if out % 64:
        raise ValidationError(f"tensor map: expected a 64-byte aligned buffer, got address {out:#x}")
    api = driver()
    with api.current(device):  # a thread that has made no call to the GPU yet has no context
        code = api.function("cuTensorMapEncodeTiled")(
            out,
            _choice("element", element, _ELEMENT_TYPES),
            rank,
            address,
            (c_uint64 * rank)(*dims),
            (c_uint64 * rank)(*strides),  # the driver reads rank - 1; ctypes has no pointer to an empty array
            (c_uint * rank)(*box),
            (c_uint * rank)(*(1,) * rank),
            0,
            _choice("swizzle", swizzle, _SWIZZLES),
            _choice("promotion", promotion, _PROMOTIONS),
            _FILL_WITH_ZEROS,
        )
    if code:
        context = (
            f"element={element}, address={address:#x}, dims={list(dims)}, strides={list(strides)}, box={list(box)}"
        )
        api.check(code, "cuTensorMapEncodeTiled", f"{context}, swizzle={swizzle}")


def move_tensor_map(out: int, address: int, device: int) -> None:
    """Change the tensor address in the descriptor at `out`; shape and strides remain."""
    api = driver()
    replace = api.function("cuTensorMapReplaceAddress")
    if replace(out, address):  # perhaps for want of a context, as in a new thread
        with api.current(device):
            code = replace(out, address)
        api.check(code, "cuTensorMapReplaceAddress", f"address={address:#x}")


_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


def present_targets() -> tuple[str, ...]:
    """The targets of this machine's GPUs, each once."""
    if not available():
        return ()
    return tuple(dict.fromkeys(cuda_target(index) for index in range(driver().device_count())))


def capability(index: int) -> tuple[int, int]:
    """(major, minor) of GPU `index`."""
    api = driver()
    return api.attribute(index, _COMPUTE_CAPABILITY_MAJOR), api.attribute(index, _COMPUTE_CAPABILITY_MINOR)


@cache
def cuda_target(index: int) -> str:
    """The most specific target that runs on GPU `index`: its own, else the nearest older one of its generation."""
    major, minor = capability(index)
    for name in (f"sm{major}{minor}a", *(f"sm{major}{m}" for m in range(minor, -1, -1))):
        if name in CUDA_TARGETS:
            return name
    known = ", ".join(CUDA_TARGETS)
    raise UnsupportedError(f"device: cuda:{index} has compute capability {major}.{minor}; known are {known}.")
