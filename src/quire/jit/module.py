"""Loaded artifacts: a host library's function, or a cubin's kernel on any number of devices."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from ctypes import byref, c_int, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

from quire.errors import CacheError, PlanError, UnsupportedError, ValidationError
from quire.jit import cpu
from quire.jit.driver import Driver, LaunchAttribute, LaunchConfig, driver
from quire.jit.store import Entry

__all__ = ["CudaModule", "Grid", "HostModule", "Launch", "Module", "load"]

Grid: TypeAlias = int | tuple[int, ...]

_MAX_DYNAMIC_SMEM = 8
_MOST_PLANNED = 1024  #: launch shapes that a thread keeps for a module
_STATIC_SMEM_LIMIT = 48 * 1024  #: beyond it a kernel must be told what it may ask for


class HostModule:
    """A host library. `function(address of the parameter struct) -> int`; the GIL is released while it runs."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        if not cpu.supports(entry.manifest.target):
            raise UnsupportedError(
                f"{entry.slug} is built for {entry.manifest.target}, which this processor is not; "
                f"the best target here is {cpu.host_target()}"
            )
        try:
            self._library = ctypes.CDLL(str(entry.artifact))
            function = getattr(self._library, entry.manifest.entry)
        except (OSError, AttributeError) as error:
            hint = "; install libgomp (`apt-get install libgomp1`)" if "libgomp" in str(error) else ""
            raise CacheError(f"{entry.artifact} cannot be loaded: {error}{hint}") from error
        function.argtypes, function.restype = [c_void_p], c_int
        self.function: Any = function

    @property
    def slug(self) -> str:
        """The variant's readable name."""
        return self.entry.slug

    @property
    def facts(self) -> Mapping[str, int]:
        """What the kernel says of itself: the spec's `facts` and their values."""
        return self.entry.manifest.facts

    def __repr__(self) -> str:
        return f"HostModule({self.entry.slug!r})"


@dataclass(slots=True)
class _Loaded:
    """A kernel on one device."""

    function: int  #: CUfunction
    max_smem: int  #: bytes of dynamic shared memory allowed so far


def _three(grid: Grid) -> tuple[int, int, int]:
    if isinstance(grid, int):
        return grid, 1, 1
    if not 1 <= len(grid) <= 3:
        raise ValidationError(f"grid: expected 1 to 3 sizes, got {grid!r}")
    padded = (*grid, 1, 1)
    return padded[0], padded[1], padded[2]


class _Call(LaunchConfig):
    """A launch as the driver takes it: its configuration, and where its parameters are."""

    _fields_ = (("params", c_void_p),)  # type: ignore[assignment]  # after those of its base


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
        if self._launch(*self._arguments):  # perhaps because of the current context
            self._start_in_context()

    def _start_in_context(self) -> None:
        """Only on the default stream does it matter which context is current, and there the driver says so."""
        with self._module.driver.current(self._device):
            code = self._launch(*self._arguments)
        if code:
            self._module.fail(code, self._call, self._device)

    def point_to(self, params_address: int) -> None:
        """Read the parameters from another address from now on."""
        self._call.params = params_address

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks in x, y and z."""
        return self._call.grid_x, self._call.grid_y, self._call.grid_z


class _PerThread(threading.local):
    """A thread's own planned launches: an instance must not be called by two threads at once."""

    def __init__(self) -> None:
        self.launches: dict[tuple[Any, ...], Launch] = {}


class CudaModule:
    """A cubin. Opened when a device is first prepared: constructing one needs no driver.

    `prepare` in plan(), then `bind` (once a plan) or `launch` (free form) in run(). Loading inside a stream capture is
    refused, because it would end up in the graph or break it.
    """

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self._image = entry.artifact.read_bytes()
        self._guard = threading.RLock()
        self._driver: Driver | None = None
        self._kernel: int | None = None
        self._loaded: dict[int, _Loaded] = {}
        self._planned = _PerThread()  # what launch() was called with before

    @property
    def slug(self) -> str:
        """The variant's readable name."""
        return self.entry.slug

    @property
    def facts(self) -> Mapping[str, int]:
        """What the kernel says of itself: the spec's `facts` and their values."""
        return self.entry.manifest.facts

    def __repr__(self) -> str:
        return f"CudaModule({self.entry.slug!r})"

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
        """Whether a launch on `device` needs no preparation, which a stream that is being captured may refuse."""
        return device in self._loaded

    def prepare(self, device: int, smem: int = 0) -> None:
        """Load the kernel on `device` and allow it `smem` bytes of dynamic shared memory. Cheap when already done."""
        loaded = self._loaded.get(device)
        if loaded is not None and smem <= loaded.max_smem:
            return
        with self._guard, self.driver.current(device):
            loaded = self._loaded.get(device) or self._load(device)
            if smem > loaded.max_smem:
                self._allow_smem(loaded, device, smem)
            self._loaded[device] = loaded

    def _load(self, device: int) -> _Loaded:
        api = self.driver
        if self._kernel is None:
            library, kernel = c_void_p(), c_void_p()
            context = f"{self.entry.slug}, a cubin for {self.entry.manifest.target}, on device {device}"
            api.call("cuLibraryLoadData", byref(library), self._image, None, None, 0, None, None, 0, context=context)
            name = self.entry.manifest.entry.encode()
            api.call("cuLibraryGetKernel", byref(kernel), library, name, context=context)
            self._kernel = kernel.value
        function = c_void_p()
        context = f"{self.entry.slug}, a cubin for {self.entry.manifest.target}, on device {device}"
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

    def occupancy(self, device: int, block: int, smem: int) -> int:
        """Blocks of `block` threads and `smem` bytes that one multiprocessor of `device` holds at once."""
        self.prepare(device, smem)
        count = c_int()
        name = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        with self.driver.current(device):
            self.driver.call(name, byref(count), self.on(device).function, block, smem, context=self.entry.slug)
        return count.value

    def bind(
        self,
        params_address: int,
        grid: Grid,
        block: int,
        smem: int,
        device: int,
        *,
        pdl: bool = False,
        cluster: tuple[int, int, int] | None = None,
    ) -> Launch:
        """A planned launch. `pdl`: may start before the previous kernel of the stream has ended (it must wait itself).

        `cluster`: blocks of a cluster in x, y and z.
        """
        self.prepare(device, smem)
        call = _Call.from_buffer_copy(_call(block, smem, pdl, cluster))
        call.grid_x, call.grid_y, call.grid_z = _three(grid)
        call.params = params_address
        return Launch(self, device, call)

    def launch(
        self,
        params_address: int,
        grid: Grid,
        block: int,
        smem: int,
        stream: int,
        device: int,
        *,
        pdl: bool = False,
        cluster: tuple[int, int, int] | None = None,
    ) -> None:
        """Launch once, from any thread. Loads the kernel if `prepare` has not, unless `stream` is being captured."""
        planned = self._planned.launches
        key = (grid, block, smem, device, pdl, cluster)
        launch = planned.get(key)
        if launch is None:
            self._prepare_outside_capture(device, smem, stream)
            if len(planned) >= _MOST_PLANNED:
                planned.clear()
            launch = planned[key] = self.bind(0, grid, block, smem, device, pdl=pdl, cluster=cluster)
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

    def fail(self, code: int, config: LaunchConfig, device: int) -> None:
        """Raise the DriverError of a failed launch."""
        shape = f"grid ({config.grid_x}, {config.grid_y}, {config.grid_z}), block {config.block_x}, smem {config.smem}"
        self.driver.check(code, "the launch", f"{self.entry.slug} on device {device}, {shape}")


@cache  # the attributes must live as long as any copy
def _call(block: int, smem: int, pdl: bool, cluster: tuple[int, int, int] | None) -> _Call:
    """A launch of such blocks, to be copied."""
    attributes = []
    if cluster is not None:
        attribute = LaunchAttribute(id=LaunchAttribute.CLUSTER)
        attribute.value[0:3] = list(cluster)
        attributes.append(attribute)
    if pdl:
        attribute = LaunchAttribute(id=LaunchAttribute.PDL)
        attribute.value[0] = 1
        attributes.append(attribute)
    array = (LaunchAttribute * max(1, len(attributes)))(*attributes)
    return _Call(block_x=block, block_y=1, block_z=1, smem=smem, attributes=array, num_attributes=len(attributes))


Module: TypeAlias = HostModule | CudaModule


def load(entry: Entry) -> Module:
    """The module of a verified entry."""
    return CudaModule(entry) if entry.manifest.target.startswith("sm") else HostModule(entry)
