"""Checks of arguments. Errors name the argument, what was expected and what was passed."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from ctypes import c_int32
from numbers import Real
from typing import Any

import torch

from quire.errors import UnsupportedArgumentError, ValidationError
from quire.kernels.features import DType

_INT32_MAX = 2**31 - 1
_LARGEST = torch.finfo(torch.float32).max / 2  # kernels multiply scales by log2(e)
_SMALLEST = torch.finfo(torch.float32).tiny
_NOT_REAL = frozenset(
    {torch.complex32, torch.complex64, torch.complex128, torch.qint8, torch.quint8, torch.qint32, torch.quint4x2}
)


def check_tensor(value: Any, name: str) -> torch.Tensor:
    """`value`, which must be a dense tensor of real numbers that does not require grad."""
    try:
        is_plain = value.layout is torch.strided and not value.is_nested and value.dtype not in _NOT_REAL
        is_right = is_plain and value.data_ptr() and not value.is_neg()
        if is_right and not (value.requires_grad and torch.is_grad_enabled()):
            return value  # type: ignore[no-any-return]
    except (AttributeError, RuntimeError):  # no tensor, or torch: there is no storage
        pass
    _refuse_tensor(value, name)
    return value  # type: ignore[no-any-return]


def _refuse_tensor(value: Any, name: str) -> None:
    """Raises the error for an invalid tensor. A tensor without elements may have no memory."""
    if not isinstance(value, torch.Tensor):
        raise ValidationError(
            f"{name}: expected a torch.Tensor, got {type(value).__name__}.{_cure_of_type(value, name)}"
        )
    if value.layout is not torch.strided or value.is_meta or value.is_nested or value.is_quantized:
        kind = "nested" if value.is_nested else value.layout
        raise ValidationError(f"{name}: expected a dense tensor with data, got {kind} {value.dtype} on {value.device}.")
    check_no_grad((value,), name)
    if value.is_complex():
        raise ValidationError(f"{name}: expected real numbers, got {value.dtype}; pass torch.view_as_real() of it.")
    if value.is_neg():
        raise ValidationError(f"{name}: expected numbers as they lie in memory, got a negated view: .resolve_neg() it.")
    if value.numel():
        raise ValidationError(
            f"{name}: expected a tensor with memory of its own, got {type(value).__name__} {list(value.shape)} without "
            f"any. If its storage was freed (resize_(0), FSDP), restore it before the call. If it is a stand-in that "
            f"torch traces with (fake, functional, vmap), call outside of tracing, with the tensor itself."
        )


def _cure_of_type(value: Any, name: str) -> str:
    """What makes a tensor of a value that is none."""
    if type(value).__name__ == "ndarray":
        return f" torch.from_numpy({name}) makes one."
    if isinstance(value, (list, tuple)):
        dtype = ", dtype=torch.int32" if all(isinstance(item, int) for item in value) else ""
        return f" torch.tensor({name}{dtype}) makes one."
    if isinstance(value, int) and "workspace" in name:
        return " torch.empty(128 * 1024 * 1024, dtype=torch.uint8, device=q.device) is one."
    return ""


def shape_of(value: Any) -> torch.Size | None:
    """The shape of a tensor; None of anything else, and of a nested tensor, which has none."""
    try:
        return value.shape  # type: ignore[no-any-return]
    except (AttributeError, RuntimeError):
        return None


def check_no_grad(tensors: Sequence[torch.Tensor], name: str) -> None:
    """Check that no tensor requires grad: Quire has no backward pass, and training would silently do nothing."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ValidationError(
            f"{name}: expected no tensor that requires grad, as Quire is for inference only; call it under "
            f"torch.no_grad() or torch.inference_mode(), or pass {name}.detach()."
        )


def check_output(tensor: Any, name: str) -> torch.Tensor:
    """`tensor`, which must pass check_tensor() and whose elements must not share memory."""
    check_tensor(tensor, name)
    end = 1  # of the elements that the dimensions so far reach
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < end and tensor.numel():
            raise ValidationError(
                f"{name}: expected a place of its own for each element, as results are written there; got shape "
                f"{list(tensor.shape)} with strides {tensor.stride()}; pass a copy (.contiguous())."
            )
        end += (size - 1) * stride
    return tensor  # type: ignore[no-any-return]


def check_written(out: Any, name: str, like: torch.Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """Check that `out` is an output of the shape and on the device of `like`, in one of the dtypes."""
    check_shape(check_output(out, name), name, {f"dim {i}": size for i, size in enumerate(like.shape)})
    check_same_device(out, name, like.device)
    check_contiguous_last(out, name)
    if out.dtype not in dtypes:
        raise ValidationError(f"{name}: expected dtype {' or '.join(map(str, dtypes))}, got {out.dtype}.")


def check_shape(tensor: torch.Tensor, name: str, expected: Mapping[str, int | None]) -> None:
    """Check that `tensor` has the named dimensions; None means any length."""
    shape = tensor.shape
    if len(shape) == len(expected):
        for wanted, size in zip(expected.values(), shape, strict=True):  # half the time of all()
            if wanted is not None and wanted != size:
                break
        else:
            return
    dims = ", ".join(dim if size is None else f"{dim}={size}" for dim, size in expected.items())
    raise ValidationError(f"{name}: expected [{dims}], got {list(shape)}.{cure_of(shape, expected)}")


def cure_of(shape: Sequence[int], expected: Mapping[str, int | None]) -> str:
    """What to do about a shape that other libraries' calls have, or that plan() was not told of."""
    first = next(iter(expected), "")
    if len(shape) == 4 and len(expected) == 3 and first in ("qo_len", "kv_len"):
        return " A batch of one length is what quire.compat.flash_attn.flash_attn_func takes, as [batch, ...]."
    if len(shape) == 4 and len(expected) == 3 and first == "nnz_qo":
        return " The rows of all requests are one dimension: flatten(0, 1) of [batch, rows, heads, dim]."
    if len(shape) == 3 and len(expected) == 4 and first == "batch":
        return " unsqueeze(0) makes a batch of one."
    if first == "batch" and len(shape) == 4 and expected.get("num_kv_heads") not in (None, shape[1]):
        return " Fewer heads of keys and values take enable_gqa=True."
    if first == "kv_len" and len(shape) == len(expected) and expected["kv_len"] not in (None, shape[0]):
        return " Keys and values have a row for each of the same tokens."
    rows = expected.get("nnz_qo")
    if rows is not None and len(shape) == len(expected) and shape[0] != rows:
        return (
            f" plan() was told of {rows} rows: qo_indptr[-1] of prefill, one for each request of decode or "
            "q_len_per_req=n of them."
        )
    return ""


def check_dtype(tensor: torch.Tensor, name: str, expected: DType, option: str = "q_data_type") -> None:
    """Check that `tensor` has the planned dtype. option: the argument of plan() that sets it."""
    if tensor.dtype is not expected.torch:
        also = ", which is that of keys, values and the result too unless you name theirs"
        raise ValidationError(
            f"{name}: expected dtype {expected.torch}, as planned (plan()'s default is torch.float16), got "
            f"{tensor.dtype}; call plan(..., {option}={tensor.dtype}){also if option == 'q_data_type' else ''}."
        )


def flag(value: Any, name: str) -> bool:
    """`value`, which must be a bool."""
    if not isinstance(value, bool):
        raise ValidationError(f"{name}: expected a bool, got {value!r}.")
    return value


def check_flags(**flags: Any) -> None:
    """Check that flags are bools, or None where this is a default."""
    for name, value in flags.items():
        if value is not None:
            flag(value, name)


def check_same_device(tensor: torch.Tensor, name: str, device: torch.device) -> None:
    """Check that `tensor` is on the device of the plan."""
    if tensor.device != device:
        raise ValidationError(f"{name}: expected a tensor on {device}, got one on {tensor.device}.")


def check_contiguous_last(tensor: torch.Tensor, name: str) -> None:
    """Check that the last dimension is contiguous."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValidationError(
            f"{name}: expected a contiguous last dimension, got strides {tuple(tensor.stride())}; "
            f"call .contiguous() on it."
        )


def device_of(device: Any, name: str = "device") -> torch.device:
    """The device that an argument names."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise ValidationError(
            f"{name}: expected a torch.device or its name, such as 'cuda:0' or 'cpu', got {device!r}."
        ) from error


def float_sinks(sinks: Any, name: str) -> torch.Tensor | None:
    """Attention sinks as float32 without gaps; None if there are none."""
    if sinks is None:
        return None
    if not isinstance(sinks, torch.Tensor):
        raise ValidationError(f"{name}: expected a tensor [num_heads] or None, got {sinks!r}.")
    return check_tensor(sinks, name).float().contiguous()


def is_choice(value: Any, choices: tuple[Any, ...]) -> bool:
    """Whether `value` is one of the numbers or words `choices`. A tensor is none, whatever it holds."""
    return isinstance(value, (str, int, float)) and value in choices


def check_positive(value: Any, name: str) -> int:
    """`value`, which must be a positive integer."""
    if type(value) is int and 1 <= value <= _INT32_MAX:
        return value
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)
    except (TypeError, RuntimeError):
        number = 0
    if not 1 <= number <= _INT32_MAX:
        raise ValidationError(f"{name}: expected a positive integer below 2^31, got {value!r}.")
    return number


def host_indices(
    value: torch.Tensor | Sequence[int], name: str, length: int | None = None, shape: str = ""
) -> torch.Tensor:
    """`value` as a contiguous 1-D int32 tensor on the host with `length` entries; returns `value` itself if it is one.

    A tensor on a device is copied, which waits for the device. `shape`: what an error says that it expects.
    """
    try:
        if (
            isinstance(value, torch.Tensor) and value.dtype is torch.int32 and value.is_cpu and value.data_ptr()
            and value.dim() == 1 and (length is None or value.numel() == length) and value.is_contiguous()
        ):  # fmt: skip
            return value  # numel(): a fifth of what shape[0] takes
        tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValidationError(f"{name}: expected a 1-D integer tensor, got {type(value).__name__}.") from error
    check_tensor(tensor, name)
    if tensor.dim() != 1 or (length is not None and tensor.shape[0] != length):
        wanted = shape.format(length=length) if shape else f"a tensor of shape {'1-D' if length is None else [length]}"
        raise ValidationError(f"{name}: expected {wanted}, got {list(tensor.shape)}.")
    return to_int32(tensor, name).cpu().contiguous()


def device_indices(value: Any, name: str, shape: str = "1-D") -> torch.Tensor:
    """`value` as a contiguous 1-D int32 tensor where it lies: itself where it is one. `shape`: as in host_indices()."""
    try:
        is_plain = value.dtype is torch.int32 and value.dim() == 1 and value.is_contiguous() and not value.is_neg()
        if is_plain and value.data_ptr():
            return value  # type: ignore[no-any-return]  # a third of the time of what follows
    except (AttributeError, RuntimeError):  # no tensor, or one without memory
        pass
    tensor = check_tensor(value, name)
    if tensor.dim() != 1:
        raise ValidationError(f"{name}: expected a tensor of shape {shape}, got {list(tensor.shape)}.")
    return to_int32(tensor, name).contiguous()


_PAGES = (
    "1-D, the pages of all requests one after another (a table with a row for each request is for "
    "trtllm_batch_decode_with_kv_cache)"
)
_LAST_PAGES = (
    "[batch_size={length}], as indptr has batch_size + 1 offsets (0 first, then the sums of the requests' page counts)"
)


def page_indices(indices: Any) -> torch.Tensor:
    """Page numbers as a 1-D int32 tensor: plan() copies them if they are on the host, each run() reads them on a
    device.
    """
    taken = host_indices if isinstance(indices, torch.Tensor) and indices.is_cpu else device_indices
    return taken(indices, "paged_kv_indices", shape=_PAGES)


def last_page_lens(value: Any, name: str, kv_indptr: torch.Tensor, page_size: int) -> torch.Tensor:
    """Tokens of each request's last page, on the host.

    With pages of one token they are redundant, and not copied from a device: SGLang plans in this way between replays.
    """
    if page_size == 1 and isinstance(value, torch.Tensor) and value.device.type != "cpu":
        check_shape(value, name, {"batch_size": kv_indptr.shape[0] - 1})
        return kv_indptr.diff().clamp_(0, 1)
    return host_indices(value, name, kv_indptr.numel() - 1, shape=_LAST_PAGES)


def last_of_lens(kv_lens: torch.Tensor, kv_indptr: torch.Tensor, page_size: int) -> torch.Tensor:
    """Tokens of each request's last page, int32, from the tokens of the request and the offsets of its pages."""
    return (kv_lens - (kv_indptr.diff() - 1).clamp_(min=0) * page_size).to(torch.int32)


def batch_size_of(offsets: torch.Tensor, name: str) -> int:
    """batch_size of offsets [batch_size + 1]."""
    batch_size = offsets.numel() - 1
    if batch_size < 0 or offsets.dim() != 1:
        raise ValidationError(f"{name}: expected [batch_size + 1] offsets, got {list(offsets.shape)}.")
    return batch_size


def last_entry(indices: torch.Tensor) -> int:
    """indices[-1] of what host_indices() gave; a third of what torch takes to index."""
    return c_int32.from_address(indices.data_ptr() + 4 * (indices.numel() - 1)).value


def to_int32(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """`tensor` as int32. int64 is accepted if the values fit, which is checked only on the host."""
    if tensor.dtype is torch.int32:
        return tensor
    if tensor.dtype is not torch.int64:
        raise ValidationError(f"{name}: expected dtype torch.int32, got {tensor.dtype}: .to(torch.int32) converts it.")
    if tensor.is_cpu and tensor.numel():
        low, high = (int(bound) for bound in tensor.aminmax())
        if low < -_INT32_MAX - 1 or high > _INT32_MAX:
            raise ValidationError(f"{name}: expected values that fit 32 bits, got {low}..{high}.")
    return tensor.to(torch.int32)


def scalar(value: Any, name: str, *, positive: bool = False) -> float:
    """A scale as a number in the range of float32; None is 1. For a tensor on a device, waits for it."""
    return 1.0 if value is None else number(value, name, positive=positive)


def number(value: Any, name: str, *, positive: bool = False) -> float:
    """scalar() of a value that must be given, because 1 is not what None would mean."""
    given = value if type(value) is float else _number(value, name)
    if not (_SMALLEST if positive else -_LARGEST) <= given <= _LARGEST:
        raise ValidationError(
            f"{name}: expected a {'positive' if positive else 'finite'} number, got {given}; kernels take "
            f"{_SMALLEST if positive else -_LARGEST:.3g} to {_LARGEST:.3g}, in float32."
        )
    return given


def check_permissions(skip_softmax_threshold_scale_factor: Any, use_fp16_softmax: Any = None) -> None:
    """Check what permits approximations that no kernel makes."""
    if skip_softmax_threshold_scale_factor is not None:
        not_negative(skip_softmax_threshold_scale_factor, "skip_softmax_threshold_scale_factor")
    check_flags(use_fp16_softmax=use_fp16_softmax)


def not_negative(value: Any, name: str) -> float:
    """number(), which must be 0 or positive."""
    if (given := number(value, name)) < 0:
        raise ValidationError(f"{name}: expected a number that is not negative, got {given}.")
    return given


def _number(value: Any, name: str) -> float:
    if isinstance(value, torch.Tensor):
        if check_tensor(value, name).numel() != 1:
            raise ValidationError(
                f"{name}: expected a number or a tensor of one element, got shape {list(value.shape)}."
            )
    elif isinstance(value, bool) or not isinstance(value, Real):
        raise ValidationError(f"{name}: expected a number, got {value!r}.")
    try:
        return float(value)
    except OverflowError:
        return math.inf


#: Why arguments of the surface have no use here.
_REASONS = {
    "results are in 16 or 32 bits": ("o_scale", "o_sf_scale", "o_sf_vec_size"),
    "kernels keep no profile; torch.profiler shows each launch": ("use_profiler", "profiler_buffer"),
    "each key that a query sees counts": ("uses_spcompress",),
    "keys and values have no separate_page_tables": ("uses_shared_paged_kv_idx",),
    "values lie where keys do, and results where queries do": ("v_indptr", "o_indptr"),
    "block_tables says where keys and values are": ("batch_offsets_k", "batch_offsets_v"),
    "a cache over several ranks is for quire.distributed": (
        "enable_dcp", "cp_world", "cp_rank", "causal_seqlens_kv_global",
    ),
    "a level does not know where its keys stand (rotate q and k before the call)": ("rope_scale", "rope_theta"),
}  # fmt: skip
_REASON_OF = {name: reason for reason, names in _REASONS.items() for name in names}


def reason_of(name: str) -> str:
    """Why an argument of the surface has no use here; "" if its name says it."""
    return _REASON_OF.get(name, "")


def refuse(expected: Any = None, /, **arguments: Any) -> None:
    """Refuse arguments of FlashInfer's API that Quire does not support, unless they are None or False.

    expected: what an error says that it expects.
    """
    for name, value in arguments.items():
        if expected is True or (value is not None and value is not False):
            got = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            why = f", as {reason}" if (reason := reason_of(name)) else ""
            raise UnsupportedArgumentError(f"{name}: not supported by this call{why}; expected {expected}, got {got}.")
