"""Which devices and calls Quire serves in FlashInfer's place, and the report of them."""

from __future__ import annotations

import ast
import ctypes
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from enum import Enum
from functools import cache, wraps
from typing import Any

import torch

from quire.cli.catalogue import RAN_ON
from quire.engine.attention import Attention
from quire.engine.options import foreign
from quire.engine.replay import Replay
from quire.engine.run import Result
from quire.errors import UnsupportedError
from quire.jit import events


class PosEncodingMode(Enum):
    """FlashInfer's numbers of position encodings."""

    NONE = 0
    ROPE_LLAMA = 1
    ALIBI = 2


class MaskMode(Enum):
    """FlashInfer's numbers of masks."""

    NON_CAUSAL = 0
    CAUSAL = 1
    CUSTOM = 2
    MULTIITEMSCORING = 3


class TensorLayout(Enum):
    """FlashInfer's numbers of layouts of keys and values."""

    NHD = 0
    HND = 1


#: What FlashInfer raises for a GPU that a kernel was not written for; Quire raises UnsupportedError.
GPUArchitectureError = UnsupportedError


@cache
def get_compute_capability(device: torch.device) -> tuple[int, int]:
    """(major, minor) of a GPU."""
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.minor


def get_device_sm_count(device: torch.device) -> int:
    """The SMs of a GPU."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def is_sm90a_supported(device: torch.device) -> bool:
    """Whether a GPU is a Hopper, which fa3 is written for."""
    return get_compute_capability(device)[0] == 9


def is_sm100a_supported(device: torch.device) -> bool:
    """Whether FlashInfer's kernels for Blackwell can be had: Quire has none."""
    del device
    return False


is_sm110a_supported = is_sm120a_supported = is_sm121a_supported = is_sm12x_supported = is_sm100a_supported


def device_support_pdl(device: torch.device) -> bool:
    """Whether a kernel can start before the one ahead ends (`enable_pdl`): from Hopper on."""
    return device.type == "cuda" and get_compute_capability(device)[0] >= 9


def determine_attention_backend(
    device: torch.device,
    pos_encoding_mode: int,
    use_fp16_qk_reductions: bool,
    use_custom_mask: bool,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    *,
    head_dim_qk: int | None = None,
    head_dim_vo: int | None = None,
) -> str:
    """FlashInfer's own choice between "fa2" and "fa3", for programs that branch on it; Quire's `auto` does not."""
    one_byte = dtype_kv.itemsize == 1 and dtype_q.itemsize > 1
    heads = (head_dim_qk, head_dim_vo)
    has_tiles = None in heads or heads in ((64, 64), (128, 128), (256, 256), (192, 128))
    plain = not (use_custom_mask or use_fp16_qk_reductions or pos_encoding_mode or one_byte)
    return "fa3" if is_sm90a_supported(device) and plain and has_tiles else "fa2"


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


def has_flashinfer_jit_cache() -> bool:
    """Programs compile FlashInfer's own modules ahead where this is False; Quire has none: see quire.warmup()."""
    return True


def ceil_div(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)


def round_up(x: int, y: int) -> int:
    """The next multiple of y from x on."""
    return ceil_div(x, y) * y


#: Modules whose functions stand around those that the program has called.
_DECORATORS = (foreign.__module__, "quire.compat.flashinfer.fallback", "quire.compat.engines.in_place")
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
