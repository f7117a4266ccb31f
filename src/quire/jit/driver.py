"""libcuda.so.1 through ctypes: the few driver calls that load and launch a cubin. No libcudart.

Nothing happens on import; the library is opened by the first `driver()`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from typing import Any

from quire.errors import DriverError, UnsupportedError, ValidationError
from quire.jit.toolchain import CUDA_TARGETS

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
