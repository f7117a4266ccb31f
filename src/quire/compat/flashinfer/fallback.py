"""FlashInfer's own functions and wrappers behind Quire's: they serve what Quire refuses.

A call that raises UnsupportedError goes to FlashInfer with the same arguments; wrong input stays an error. A wrapper
whose plan() is refused is FlashInfer's until the next plan(): its class changes, so that a wrapper that Quire serves
pays nothing for it. A wrapper whose run() is refused stays FlashInfer's, since programs run all layers alike.

Also which GPUs Quire serves in another library's place, and the report of the calls that it served and left.
"""

from __future__ import annotations

import ast
import ctypes
import inspect
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch

from quire.cli.catalogue import RAN_ON
from quire.engine.attention import Attention
from quire.engine.options import foreign
from quire.engine.replay import Replay
from quire.engine.run import Result
from quire.errors import UnsupportedError, teach
from quire.jit import events
from quire.kernels.expressions.variant import Variant

_Call = Callable[..., Any]
_PLANNING = ("plan", "begin_forward")
_BUFFERS = "reset_workspace_buffer"
_KEPT = frozenset({"__class__", "__dict__", "_behind", _BUFFERS, *_PLANNING})  #: of a wrapper that is FlashInfer's
#: What programs read of FlashInfer's plans and change there: vLLM's sparse MLA on Hopper shortens planned lengths.
_INTERNALS = {"BatchMLAPagedAttentionWrapper": ("_plan_info", "_planned_backend")}


def over(ours: Any, theirs: Any) -> Any:
    """`ours` with `theirs` behind it; `ours` alone if they are not of one kind, and `theirs` if it holds only data,
    which both can read.
    """
    if inspect.isclass(ours) and inspect.isclass(theirs):
        return _class_over(ours, theirs) if any(hasattr(ours, name) for name in _PLANNING) else theirs
    if inspect.isfunction(ours) and callable(theirs) and not inspect.isclass(theirs):
        return function_over(ours, theirs)
    return ours


def function_over(ours: _Call, theirs: _Call, library: str = "FlashInfer") -> _Call:
    """A function that is `ours`, and `theirs`, of that library, for what ours refuses."""

    @wraps(ours)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return ours(*args, **kwargs)
        except (UnsupportedError, TypeError) as error:
            refusal = error
        _leave(ours.__name__, refusal, (ours, theirs), args, kwargs, library)
        return theirs(*args, **kwargs)

    _show_signature(call, theirs)
    return call


def _show_signature(call: Any, theirs: _Call) -> None:
    """Programs that ask whether a function takes an argument learn what FlashInfer's takes."""
    try:
        call.__signature__ = inspect.signature(theirs)
    except (TypeError, ValueError):  # compiled code has none
        call.__signature__ = inspect.signature(call.__wrapped__)


def _leave(
    name: str, refusal: Exception, pair: tuple[_Call, _Call], args: tuple[Any, ...], kwargs: Mapping[str, Any],
    library: str = "FlashInfer",
) -> None:  # fmt: skip
    """Say and count that the library serves a call; raise the refusal of one that is for Quire alone."""
    values = (*args, *kwargs.values())
    is_ours = any(isinstance(x, Variant) or (isinstance(x, str) and x.startswith("quire:")) for x in values)
    newer = "" if isinstance(refusal, UnsupportedError) else _newer(*pair, kwargs)
    if is_ours or not (newer or isinstance(refusal, UnsupportedError)):
        raise refusal
    cause = str(refusal).splitlines()[0].split("; expected ")[0].split(", got ")[0]
    cause = f"{newer}: an argument that came later" if newer else cause
    left(name, cause)
    events.warn_once(f"{library} serves {name}: {cause}")


def _newer(ours: _Call, theirs: _Call, kwargs: Mapping[str, Any]) -> str:
    """The keyword of a FlashInfer that is newer than Quire, if a TypeError is for one."""
    try:
        known, theirs_known = (inspect.signature(call).parameters for call in (ours, theirs))
    except (TypeError, ValueError):
        return ""
    return next((name for name in kwargs if name in theirs_known and name not in known), "")


# --- wrappers --------------------------------------------------------------------------------------------------------


class _Behind:
    """FlashInfer's wrapper behind one of Quire's, and what it takes to make it and to plan it."""

    def __init__(self, theirs: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._make = theirs, args, kwargs
        self._made: Any = None
        self.calls: dict[str, tuple[tuple[Any, ...], Mapping[str, Any]]] = {}  #: the last plan and the last buffers
        self.stays = False  #: with FlashInfer, whatever is planned
        self.is_inside = False  #: a method of Quire's, which calls others

    def wrapper(self) -> Any:
        """It."""
        if self._made is None:
            theirs, args, kwargs = self._make
            self._made = theirs(*args, **kwargs)
            self._repeat(_BUFFERS)
        return self._made

    def planned(self) -> Any:
        """It, planned as Quire's was last."""
        wrapper = self.wrapper()
        for name in _PLANNING:
            self._repeat(name)
        return wrapper

    def note(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Keep what another wrapper must be told."""
        if name in _PLANNING:
            for other in _PLANNING:
                self.calls.pop(other, None)
        self.calls[name] = args, kwargs
        if name == _BUFFERS and self._made is not None:
            self._repeat(name)

    def _repeat(self, name: str) -> None:
        if name in self.calls:
            args, kwargs = self.calls[name]
            getattr(self._made, name)(*args, **kwargs)


class _Over(type):
    """The class of wrappers of Quire with FlashInfer's behind them. Instances of both are its instances."""

    pair: tuple[type, type]
    left: type  #: the class of those that are FlashInfer's

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.pair) if "pair" in vars(cls) else super().__instancecheck__(instance)

    @property
    def is_left(cls) -> bool:
        """Whether its instances are FlashInfer's."""
        return vars(cls).get("left") is cls


def _class_over(ours: type, theirs: type) -> type:
    body: dict[str, Any] = {"__doc__": ours.__doc__, "__module__": ours.__module__, "pair": (ours, theirs)}
    body |= {name: _method(name, ours, theirs) for name in dir(ours) if _is_method(name, ours)}
    body["__init__"] = _constructor(ours, theirs)
    body |= {name: _internal(name, ours) for name in _INTERNALS.get(ours.__name__, ())}
    return _Over(ours.__name__, (ours,), body)


def _is_method(name: str, ours: type) -> bool:
    return not name.startswith("_") and inspect.isfunction(getattr(ours, name))


def _constructor(ours: type, theirs: type) -> _Call:
    @wraps(ours.__init__)  # type: ignore[misc]
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        behind = self._behind = _Behind(theirs, args, kwargs)
        behind.is_inside = True
        try:
            ours.__init__(self, *args, **kwargs)  # type: ignore[misc]
            return
        except (UnsupportedError, TypeError) as error:
            refusal = error
        finally:
            behind.is_inside = False
        _leave(ours.__name__, refusal, (ours, theirs), args, kwargs)
        behind.stays = True
        behind.wrapper()
        _give(self)

    _show_signature(make, theirs.__init__)  # type: ignore[misc]
    return make


def _method(name: str, ours: type, theirs: type) -> _Call:
    method, known = getattr(ours, name), getattr(theirs, name, None)

    def lost(self: Any, refusal: Exception, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A call that Quire refused, in FlashInfer's hands."""
        behind: _Behind = self._behind
        if known is None or behind.is_inside:
            raise refusal
        _leave(f"{ours.__name__}.{name}", refusal, (method, known), args, kwargs)
        behind.stays = name not in _PLANNING
        wrapper = behind.planned() if behind.stays else behind.wrapper()
        result = getattr(wrapper, name)(*args, **kwargs)
        _give(self)
        return result

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except (UnsupportedError, TypeError) as error:
            refusal = error
        return lost(self, refusal, args, kwargs)

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        behind: _Behind = self._behind
        if behind.is_inside:
            return method(self, *args, **kwargs)
        if name == _BUFFERS or name in _PLANNING:
            behind.note(name, args, kwargs)
        if behind.stays:
            return None if name == _BUFFERS else getattr(behind.wrapper(), name)(*args, **kwargs)
        was_left = _take(self)
        behind.is_inside = True
        try:
            return method(self, *args, **kwargs)
        except (UnsupportedError, TypeError) as error:
            refusal = error
        finally:
            behind.is_inside = False
            if was_left and name == _BUFFERS:
                _give(self)
        return lost(self, refusal, args, kwargs)

    made = run if name == "run" else call
    if known is not None:
        _show_signature(made, known)
    return made


def _internal(name: str, ours: type) -> property:
    """An attribute of FlashInfer's wrapper that means nothing without the rest of it."""

    def read(self: Any) -> Any:
        behind: _Behind = self._behind
        cause = f"the program reads {name}, which is FlashInfer's own"
        left(ours.__name__, cause)
        events.warn_once(f"FlashInfer serves {ours.__name__}: {cause}")
        behind.stays = True
        value = getattr(behind.planned(), name)
        _give(self)
        return value

    mine = getattr(ours, name, None)
    return property(read, mine.fset if isinstance(mine, property) else None)


def _give(wrapper: Any) -> None:
    """Make a wrapper FlashInfer's."""
    cls: Any = type(wrapper)
    if cls.is_left:
        return
    if "left" not in vars(cls):  # also of a class that a program has derived
        cls.left = _Over(cls.__name__, (cls,), {**_LEFT, "__doc__": cls.__doc__, "__module__": cls.__module__})
        cls.left.left = cls.left
    wrapper.__class__ = cls.left


def _take(wrapper: Any) -> bool:
    """Make a wrapper Quire's again; whether it was FlashInfer's."""
    cls: Any = type(wrapper)
    if cls.is_left:
        object.__setattr__(wrapper, "__class__", cls.__base__)
    return bool(cls.is_left)


def _read(self: Any, name: str) -> Any:
    """An attribute of FlashInfer's wrapper; a method that the program put in the place of one is the program's."""
    own = object.__getattribute__(self, "__dict__")
    if name in _KEPT or (name in own and not name.startswith("_")):
        return object.__getattribute__(self, name)
    return getattr(own["_behind"].wrapper(), name)


def _write(self: Any, name: str, value: Any) -> None:
    if name in _KEPT or not name.startswith("_"):
        object.__setattr__(self, name, value)
    else:
        setattr(self._behind.wrapper(), name, value)


_LEFT: Mapping[str, Any] = {
    "__getattribute__": _read, "__setattr__": _write, "__repr__": lambda self: repr(self._behind.wrapper()),
}  # fmt: skip


# --- the calls of a program ------------------------------------------------------------------------------------------


def untried_gpus() -> tuple[str, ...]:
    """The GPUs of this machine on which no variant of Quire has run, such as "sm100"; creates no context.

    A driver that has been started would break the processes that a server forks. So NVML is asked, or, where it is
    missing, another process.
    """
    found = dict.fromkeys(_capabilities())
    return tuple(f"sm{major}{minor}" for major, minor in found if f"sm{major}{minor}a" not in RAN_ON)


def _capabilities() -> list[tuple[int, int]]:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
    try:
        return _nvml_capabilities(ctypes.CDLL("libnvidia-ml.so.1"))
    except OSError:  # not there, or of no use
        pass
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:  # no GPU
        return []
    script = "from quire.jit.machine import *; print([capability(i) for i in range(driver().device_count())])"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    return ast.literal_eval(said.stdout) if said.returncode == 0 else []  # else the driver has no GPU


def _nvml_capabilities(nvml: ctypes.CDLL) -> list[tuple[int, int]]:
    count, device, numbers, found = ctypes.c_uint(), ctypes.c_void_p(), (ctypes.c_int(), ctypes.c_int()), []
    _asked(nvml.nvmlInit_v2())
    try:
        _asked(nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)))
        for index in range(count.value):
            _asked(nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)))
            _asked(nvml.nvmlDeviceGetCudaComputeCapability(device, *map(ctypes.byref, numbers)))
            found.append((numbers[0].value, numbers[1].value))
    finally:
        nvml.nvmlShutdown()
    return found


def _asked(code: int) -> None:
    if code:
        raise OSError(f"NVML: error {code}")


#: Modules whose functions stand around those that the program has called.
_DECORATORS = (foreign.__module__, teach.__module__, __name__, "quire.compat.engines")
_run: Any = Attention.run
_replay = Replay.__call__
_served: Counter[tuple[str, str]] = Counter()
_refused: Counter[str] = Counter()
_left: Counter[tuple[str, str]] = Counter()
_unwatch: Callable[[], None] = lambda: None  # noqa: E731
_owners: set[str] = set()  #: who wants calls to be counted


def start(owner: str) -> None:
    """Count from now on, from nothing if nobody has counted, and report compiles to vLLM's monitor."""
    global _unwatch
    is_on = bool(_owners)
    _owners.add(owner)
    if is_on:
        return
    _served.clear()
    _refused.clear()
    _left.clear()
    _unwatch()
    _unwatch = events.guard_compiles(_report_compile)
    Attention.run = _counted  # type: ignore[method-assign, assignment]
    Replay.__call__ = _counted_again  # type: ignore[method-assign]


def stop(owner: str) -> None:
    """Count and report no more, unless another owner wants it."""
    _owners.discard(owner)
    if _owners:
        return
    _unwatch()
    Attention.run = _run  # type: ignore[method-assign]
    Replay.__call__ = _replay  # type: ignore[method-assign]


def _report_compile(event: events.Event) -> None:
    """Report a compile to vLLM's monitor of compiles, if the engine has turned it on after its warm-up.

    --jit-monitor-mode=warn logs a line; with =error it raises RuntimeError, before anything is compiled.
    """
    monitor = sys.modules.get("vllm.utils.jit_monitor")
    if monitor is None or not monitor.is_active():
        return
    handle = getattr(monitor, "_handle_jit_event", None)
    if handle is None:  # another version of vLLM
        events.warn_once(f"{event.slug} is compiled after the engine's warm-up, which takes a second: quire warmup")
    else:
        handle(backend="Quire", event="kernel JIT compilation", fn_name=event.slug, detail=event.cause)


def refused(path: str) -> None:
    """A name outside attention was called."""
    _refused[path] += 1


def left(name: str, cause: str) -> None:
    """A call went to the FlashInfer that is installed."""
    _left[name, cause] += 1


def is_counting() -> bool:
    """Whether calls are counted."""
    return bool(_owners)


def has_calls() -> bool:
    """Whether any call was served, or left to another library."""
    return bool(_served or _left)


def report() -> str:
    """A line for each call and kernel, for each cause of a call's going to FlashInfer, and for each refused name."""
    lines = [f"served   {name}  {count} x  {kernel}" for (name, kernel), count in _served.most_common()]
    lines += [f"left     {name}  {count} x  {cause}" for (name, cause), count in _left.most_common()]
    return "\n".join(lines + [f"refused  {path}  {count} x" for path, count in _refused.most_common()])


@wraps(_run)
def _counted(self: Attention, *args: Any, **kwargs: Any) -> Result:
    result = _run(self, *args, **kwargs)
    _served[_public_name(), self.decision.key.slug] += 1
    return result


@wraps(_replay)
def _counted_again(self: Replay, *args: Any, **kwargs: Any) -> Any:
    result = _replay(self, *args, **kwargs)
    if result is not NotImplemented:  # else the call runs as its first did
        _served[_public_name(), self.kernel] += 1
    return result


def _public_name() -> str:
    """The function or method of Quire that the program has called."""
    frame, called = sys._getframe(2), None
    while frame is not None and (module := str(frame.f_globals.get("__name__", ""))).startswith("quire."):
        called = called if module in _DECORATORS else frame  # theirs have no `self` of the program's call
        frame = frame.f_back  # type: ignore[assignment]  # None is the end
    if called is None:
        return ""
    owner = called.f_locals.get("self")  # a copy of all locals: of this frame alone, since each run() comes here
    return f"{type(owner).__name__}.{called.f_code.co_name}" if owner is not None else called.f_code.co_name
