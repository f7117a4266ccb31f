"""Loaded artifacts: a host library's function, or a cubin's kernel on any number of devices.

The cache may therefore be on a file system that does not permit execution.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import tempfile
import threading
from collections.abc import Mapping
from ctypes import byref, c_int, c_void_p
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

from quire.errors import CacheError, PlanError, UnsupportedError
from quire.jit import machine
from quire.jit.machine import Driver, LaunchAttribute, LaunchConfig, driver
from quire.jit.store import Entry

_MAX_DYNAMIC_SMEM = 8
_MOST_PLANNED = 1024  #: launch shapes that a thread keeps for a module
_STATIC_SMEM_LIMIT = 48 * 1024  #: beyond it a kernel needs permission (cuFuncSetAttribute)


class _Base:
    """The common part of host and CUDA modules."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry.without_image()

    @property
    def slug(self) -> str:
        """The variant's readable name."""
        return self.entry.slug

    @property
    def exports(self) -> Mapping[str, int]:
        """Constants of the kernel: the spec's `exports` and their values."""
        return self.entry.manifest.exports

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.entry.slug!r})"


class HostModule(_Base):
    """A host library. `function(address of the parameter struct) -> int`; the GIL is released while it runs."""

    def __init__(self, entry: Entry) -> None:
        super().__init__(entry)
        if not machine.supports(entry.manifest.target):
            raise UnsupportedError(
                f"{entry.slug} is built for {entry.manifest.target}, which this processor is not; "
                f"the best target here is {machine.host_target()}"
            )
        try:
            function = load_library(entry.slug, entry.image)[entry.manifest.entry]
        except (OSError, AttributeError) as error:
            raise CacheError(f"{entry.artifact} cannot be loaded: {error}{hint_of(error)}") from error
        function.argtypes, function.restype = [c_void_p], c_int
        self.function: Any = function


@dataclass(slots=True)
class _Loaded:
    """A kernel on one device."""

    function: int  #: CUfunction
    max_smem: int  #: bytes of dynamic shared memory that it may use so far


class _Call(LaunchConfig):
    """A launch as the driver takes it: its configuration, and the address of its parameters."""

    _fields_ = (("params", c_void_p),)  # after the base's fields


#: Launches to copy, without and with programmatic dependent launch. They keep the attribute alive.
_PLAIN = _Call(grid_y=1, grid_z=1, block_y=1, block_z=1)
_PDL_ATTRIBUTE = (LaunchAttribute * 1)(LaunchAttribute(id=LaunchAttribute.PDL, value=(1,)))
_WITH_PDL = _Call(grid_y=1, grid_z=1, block_y=1, block_z=1, attributes=_PDL_ATTRIBUTE, num_attributes=1)


class Launch:
    """One planned launch: everything but the stream is fixed, so a call is one driver call.

    The kernel reads its parameters from `params_address`, whose memory must stay valid until the call returns (the
    driver copies it). An instance belongs to one plan: two threads must not call the same instance at once.
    """

    __slots__ = ("_arguments", "_call", "_device", "_launch", "_module")

    def __init__(self, module: CudaModule, device: int, call: _Call) -> None:
        self._module = module
        self._device = device
        self._call = call
        self._launch = module.driver.function("cuLaunchKernelEx")
        self._arguments = byref(call), c_void_p(module.on(device).function), byref(call, _Call.params.offset), None

    def start(self, stream: int) -> None:
        """Launch on `stream` (a raw CUstream of this launch's device; 0 is the legacy default stream)."""
        self._call.stream = stream
        if self._launch(*self._arguments):  # a failure, perhaps because of the current context
            self._start_in_context()

    def _start_in_context(self) -> None:
        """Launch again in the device's context: on the default stream the driver refuses any other."""
        driver, call = self._module.driver, self._call
        with driver.current(self._device):
            code = self._launch(*self._arguments)
        shape = f"grid {call.grid_x}, block {call.block_x}, smem {call.smem}"
        driver.check(code, "the launch", f"{self._module.slug} on device {self._device}, {shape}")

    def point_to(self, params_address: int) -> None:
        """Change the address from which the kernel reads its parameters."""
        self._call.params = params_address


class _PerThread(threading.local):
    """The launches that one thread has planned: two threads must not call the same Launch at once."""

    def __init__(self) -> None:
        self.launches: dict[tuple[Any, ...], Launch] = {}


class CudaModule(_Base):
    """A cubin. Loaded when a device is first prepared: constructing one needs no driver.

    plan() calls `prepare`; then run() starts what `bind` made for the plan, or calls `launch`. Loading inside a stream
    capture is refused, because it would become part of the graph or break the capture.
    """

    def __init__(self, entry: Entry) -> None:
        super().__init__(entry)
        self._image = entry.image  # kept until it is loaded, because the cache may be cleared before
        self._guard = threading.RLock()
        self._driver: Driver | None = None
        self._kernel: int | None = None
        self._loaded: dict[int, _Loaded] = {}
        self._planned = _PerThread()  # the launches that launch() planned

    @property
    def driver(self) -> Driver:
        """The CUDA driver; DriverError on a machine without one."""
        if self._driver is None:
            self._driver = driver()
        return self._driver

    def on(self, device: int) -> _Loaded:
        """The kernel on `device`; PlanError if `prepare` has not loaded it."""
        loaded = self._loaded.get(device)
        if loaded is None:
            raise PlanError(
                f"{self.entry.slug} is not loaded on device {device}; call prepare({device}, smem_bytes) in plan()"
            )
        return loaded

    def is_loaded(self, device: int) -> bool:
        """Whether the kernel is loaded on `device`; loading may fail while a stream is captured."""
        return device in self._loaded

    def prepare(self, device: int, smem: int = 0) -> None:
        """Load the kernel on `device` and allow it `smem` bytes of dynamic shared memory. Repeated calls are cheap."""
        loaded = self._loaded.get(device)
        if loaded is not None and smem <= loaded.max_smem:
            return
        with self._guard, self.driver.current(device):
            loaded = self._loaded.get(device) or self._load(device)
            if smem > loaded.max_smem:
                self._allow_smem(loaded, device, smem)
            self._loaded[device] = loaded

    def _load(self, device: int) -> _Loaded:
        api, function = self.driver, c_void_p()
        context = f"{self.entry.slug}, a cubin for {self.entry.manifest.target}, on device {device}"
        if self._kernel is None:
            library, kernel = c_void_p(), c_void_p()
            api.call("cuLibraryLoadData", byref(library), self._image, None, None, 0, None, None, 0, context=context)
            name = self.entry.manifest.entry.encode()
            api.call("cuLibraryGetKernel", byref(kernel), library, name, context=context)
            self._kernel, self._image = kernel.value, b""  # the driver has its own copy
        api.call("cuKernelGetFunction", byref(function), self._kernel, context=context)
        return _Loaded(function.value or 0, _STATIC_SMEM_LIMIT - (self.entry.manifest.smem or 0))

    def _allow_smem(self, loaded: _Loaded, device: int, smem: int) -> None:
        limit = self.driver.max_dynamic_smem(device)
        if smem > limit:
            raise UnsupportedError(
                f"{self.entry.slug} needs {smem} bytes of shared memory; device {device} has {limit}"
            )
        self.driver.call("cuFuncSetAttribute", loaded.function, _MAX_DYNAMIC_SMEM, smem, context=self.entry.slug)
        loaded.max_smem = smem

    def bind(self, params_address: int, grid: int, block: int, smem: int, device: int, *, pdl: bool = False) -> Launch:
        """A planned launch of `grid` blocks of `block` threads with `smem` bytes of dynamic shared memory each.

        `pdl`: programmatic dependent launch; the kernel may start before the previous one of the stream has ended, and
        must wait for it itself.
        """
        self.prepare(device, smem)
        call = _Call.from_buffer_copy(_WITH_PDL if pdl else _PLAIN)
        call.grid_x, call.block_x, call.smem, call.params = grid, block, smem, params_address
        return Launch(self, device, call)

    def launch(
        self, params_address: int, grid: int, block: int, smem: int, stream: int, device: int, *, pdl: bool = False
    ) -> None:
        """Launch once, from any thread. Loads the kernel if `prepare` has not, unless `stream` is being captured."""
        planned = self._planned.launches
        key = (grid, block, smem, device, pdl)
        launch = planned.get(key)
        if launch is None:
            self._prepare_outside_capture(device, smem, stream)
            if len(planned) >= _MOST_PLANNED:
                planned.clear()
            launch = planned[key] = self.bind(0, grid, block, smem, device, pdl=pdl)
        launch.point_to(params_address)
        launch.start(stream)

    def _prepare_outside_capture(self, device: int, smem: int, stream: int) -> None:
        loaded = self._loaded.get(device)
        if loaded is not None and smem <= loaded.max_smem:
            return
        if self.driver.capturing(stream):
            raise PlanError(
                f"{self.entry.slug} is not loaded on device {device} and the stream is being captured; "
                "call plan() (or launch once) before the capture begins"
            )
        self.prepare(device, smem)


Module: TypeAlias = HostModule | CudaModule


def load(entry: Entry) -> Module:
    """The module of a verified entry."""
    return CudaModule(entry) if entry.manifest.target.startswith("sm") else HostModule(entry)


_guard = threading.Lock()
_libraries: dict[str, ctypes.CDLL] = {}  #: sha256 -> a library, which is never unloaded
_loads = count()


def load_library(name: str, image: bytes) -> ctypes.CDLL:
    """The library whose file holds `image`; the same bytes are loaded once a process. OSError if loading fails."""
    digest = hashlib.sha256(image).hexdigest()
    with _guard:
        if digest not in _libraries:
            _libraries[digest] = _load(name, image)
        return _libraries[digest]


def _load(name: str, image: bytes) -> ctypes.CDLL:
    try:
        descriptor = _memory_file(name, image)
    except OSError:  # files in memory may be forbidden (vm.memfd_noexec, a sandbox)
        return _load_copy(image)
    try:
        # Each library gets a different path, because the loader takes an equal path for an earlier library.
        path = f"/proc/self/{'./' * next(_loads)}fd/{descriptor}"
        return ctypes.CDLL(path) if os.path.exists(path) else _load_copy(image)  # noqa: PTH110 - pathlib drops the dots
    finally:
        os.close(descriptor)


def _memory_file(name: str, image: bytes) -> int:
    """A descriptor of a file in memory that is sealed against writes."""
    descriptor = os.memfd_create(f"quire {name}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(image)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _load_copy(image: bytes) -> ctypes.CDLL:
    """Load a copy in a directory of mode 0700, which is then deleted."""
    with tempfile.TemporaryDirectory(prefix="quire-") as directory:
        path = Path(directory) / "variant.so"
        path.write_bytes(image)
        return ctypes.CDLL(str(path))


def hint_of(error: Exception) -> str:
    """What to do about a library that cannot be loaded."""
    if "libgomp" in str(error):
        return "; install libgomp (`apt-get install libgomp1`)"
    if "failed to map segment" in str(error):
        return (
            f"; no file in memory may be executed here, and {tempfile.gettempdir()} is mounted noexec: "
            "set TMPDIR to a directory on a file system that permits execution"
        )
    return ""
