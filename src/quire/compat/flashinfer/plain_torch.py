"""What a dense model calls of FlashInfer beside attention, in plain torch: sampling, norms, gated activations;
and what it asks of devices.

They are for programs without FlashInfer: right and slow. Samples are drawn by inverting the cumulative distribution at
one uniform number a row, so that they need no rejection rounds. A threshold keeps all that are equal to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from quire.engine.checks import check_shape, check_tensor, is_choice
from quire.errors import UnsupportedError, ValidationError

_Sampled = Tensor | tuple[Tensor, Tensor]

# --- sampling --------------------------------------------------------------------------------------------------------


def softmax(logits: Tensor, temperature: Tensor | float | None = None, enable_pdl: bool | None = None) -> Tensor:
    """Probabilities, float32, of logits [rows, vocab_size] that are divided by a number or by one for each row."""
    del enable_pdl
    scaled = check_tensor(logits, "logits").float()
    if temperature is not None:
        scaled = scaled / _by_row(temperature, "temperature", scaled)
    return scaled.softmax(-1)


def sampling_from_probs(
    probs: Tensor, indices: Tensor | None = None, deterministic: bool = True,
    generator: torch.Generator | None = None, check_nan: bool = False, seed: Any = None, offset: Any = None,
    return_valid: bool = False,
) -> _Sampled:  # fmt: skip
    """A token of each row of probs [rows, vocab_size], or of the row that each of `indices` names.

    Int32, or of the type of indices. Rows are multiplied as they are: they need not sum to 1. generator, or seed and
    offset (numbers or int64 tensors, of one element or one for each result): the source of randomness. return_valid:
    also whether the row had a token to choose; of others the result is 0.
    """
    del deterministic  # it always is
    return _sampled(_rows(probs, indices, check_nan), indices, generator, seed, offset, return_valid)


def sampling_from_logits(logits: Tensor, *args: Any, **kwargs: Any) -> _Sampled:
    """sampling_from_probs() of their softmax."""
    return sampling_from_probs(softmax(logits), *args, **kwargs)


def top_p_sampling_from_probs(
    probs: Tensor, top_p: Tensor | float, indices: Tensor | None = None, deterministic: bool = True,
    generator: torch.Generator | None = None, check_nan: bool = False, seed: Any = None, offset: Any = None,
    return_valid: bool = False,
) -> _Sampled:  # fmt: skip
    """A token of the fewest whose probabilities sum to top_p, a number or one for each result."""
    del deterministic
    rows = _rows(probs, indices, check_nan)
    return _sampled(_top_p(rows, top_p), indices, generator, seed, offset, return_valid)


def top_k_sampling_from_probs(
    probs: Tensor, top_k: Tensor | int, indices: Tensor | None = None, deterministic: bool = True,
    generator: torch.Generator | None = None, check_nan: bool = False, seed: Any = None, offset: Any = None,
    return_valid: bool = False,
) -> _Sampled:  # fmt: skip
    """A token of the top_k most probable, a number or one for each result."""
    del deterministic
    rows = _rows(probs, indices, check_nan)
    return _sampled(_top_k(rows, top_k, 0.0), indices, generator, seed, offset, return_valid)


def min_p_sampling_from_probs(
    probs: Tensor, min_p: Tensor | float, indices: Tensor | None = None, deterministic: bool = True,
    generator: torch.Generator | None = None, check_nan: bool = False, seed: Any = None, offset: Any = None,
    return_valid: bool = False,
) -> _Sampled:  # fmt: skip
    """A token that is at least min_p times as probable as the most probable one."""
    del deterministic
    rows = _rows(probs, indices, check_nan)
    least = rows.amax(-1, keepdim=True) * _by_row(min_p, "min_p", rows)
    return _sampled(rows.where(rows >= least, 0.0), indices, generator, seed, offset, return_valid)


def top_k_top_p_sampling_from_probs(
    probs: Tensor, top_k: Tensor | int, top_p: Tensor | float, indices: Tensor | None = None,
    filter_apply_order: str = "top_k_first", deterministic: bool = True, generator: torch.Generator | None = None,
    check_nan: bool = False, seed: Any = None, offset: Any = None, return_valid: bool = False,
) -> _Sampled:  # fmt: skip
    """A token that both leave. "top_k_first": top_p of what top_k left, which belongs to rows of probs; "joint": top_p
    of all, and both belong to results.
    """
    del deterministic
    if not is_choice(filter_apply_order, ("top_k_first", "joint")):
        raise ValidationError(f"filter_apply_order: expected 'top_k_first' or 'joint', got {filter_apply_order!r}.")
    if filter_apply_order == "top_k_first":
        left = _top_p(_rows(top_k_renorm_probs(probs, top_k), indices, check_nan), top_p)
    else:
        rows = _rows(probs, indices, check_nan)
        left = _top_k(rows, top_k, 0.0).minimum(_top_p(rows, top_p))
    return _sampled(left, indices, generator, seed, offset, return_valid)


def top_k_top_p_sampling_from_logits(
    logits: Tensor, top_k: Tensor | int, top_p: Tensor | float, *args: Any, **kwargs: Any
) -> _Sampled:
    """top_k_top_p_sampling_from_probs() of their softmax."""
    return top_k_top_p_sampling_from_probs(softmax(logits), top_k, top_p, *args, **kwargs)


def top_p_renorm_probs(probs: Tensor, top_p: Tensor | float, is_deterministic: bool = False) -> Tensor:
    """The fewest probabilities that sum to top_p, multiplied so that they sum to 1; the others are 0."""
    del is_deterministic
    return _normalised(_top_p(check_tensor(probs, "probs").float(), top_p), probs)


def top_k_renorm_probs(probs: Tensor, top_k: Tensor | int, is_deterministic: bool = False) -> Tensor:
    """The top_k largest probabilities, multiplied so that they sum to 1; the others are 0."""
    del is_deterministic
    return _normalised(_top_k(check_tensor(probs, "probs").float(), top_k, 0.0), probs)


def top_k_mask_logits(logits: Tensor, top_k: Tensor | int) -> Tensor:
    """The top_k largest logits; the others are minus infinity."""
    return _top_k(check_tensor(logits, "logits"), top_k, -math.inf)


def _rows(probs: Tensor, indices: Tensor | None, check_nan: bool) -> Tensor:
    """The distribution of each result, float32."""
    if check_nan and bool(check_tensor(probs, "probs").isnan().any()):
        raise ValidationError("probs: expected no NaN, as check_nan=True asks.")
    rows = check_tensor(probs, "probs").float()
    return rows if indices is None else rows[check_tensor(indices, "indices").long()]


def _by_row(value: Any, name: str, rows: Tensor) -> Any:
    """A number, or one for each row as a column."""
    if not isinstance(value, Tensor):
        return value
    if value.dim() > 1 or (value.dim() == 1 and len(value) not in (1, len(rows))):
        raise ValidationError(f"{name}: expected a number or a tensor [{len(rows)}], got shape {list(value.shape)}.")
    return value.reshape(-1, 1)


def _top_k(rows: Tensor, top_k: Any, other: float) -> Tensor:
    largest = rows.sort(-1, descending=True).values
    count = _by_row(top_k, "top_k", rows)
    if isinstance(count, Tensor):
        last = count.long().clamp(1, rows.shape[-1]).sub(1).expand(len(rows), 1)
    else:
        last = rows.new_full((len(rows), 1), min(max(int(count), 1), rows.shape[-1]) - 1, dtype=torch.long)
    return rows.where(rows >= largest.gather(-1, last), other)


def _top_p(rows: Tensor, top_p: Any) -> Tensor:
    largest = rows.sort(-1, descending=True).values
    before = largest.double().cumsum(-1) - largest
    counts = (before < _by_row(top_p, "top_p", rows)).sum(-1, keepdim=True).clamp(min=1)
    return rows.where(rows >= largest.gather(-1, counts - 1), 0.0)


def _normalised(rows: Tensor, like: Tensor) -> Tensor:
    return (rows / rows.sum(-1, keepdim=True)).to(like.dtype)


def _sampled(
    rows: Tensor, indices: Tensor | None, generator: torch.Generator | None, seed: Any, offset: Any, return_valid: bool
) -> _Sampled:
    sums = rows.double().cumsum(-1)
    total = sums[:, -1:]
    if seed is None or offset is None:
        uniform = torch.rand(len(rows), 1, dtype=torch.float64, device=rows.device, generator=generator)
    else:
        uniform = _uniform(seed, offset, rows)
    last = (sums < total).sum(-1, keepdim=True)  # that has a probability: rounding must not go beyond it
    chosen = torch.searchsorted(sums, uniform * total, right=True).minimum(last)
    is_valid = (total > 0) & total.isfinite()
    samples = chosen.where(is_valid, 0).squeeze(-1).to(torch.int32 if indices is None else indices.dtype)
    return (samples, is_valid.squeeze(-1)) if return_valid else samples


def _uniform(seed: Any, offset: Any, rows: Tensor) -> Tensor:
    """A number in [0, 1) for each row: a hash (SplitMix64's) of its seed, its offset and its place."""
    keys = [
        value.to(torch.int64) if isinstance(value, Tensor) else (value + 2**63) % 2**64 - 2**63  # as int64
        for value in (seed, offset)
    ]
    bits = torch.arange(len(rows), device=rows.device)
    for key in keys:
        bits = _mixed(bits + _mixed(torch.zeros_like(bits) + key))
    return (_shifted(bits, 11).double() * 2.0**-53)[:, None]


def _mixed(bits: Tensor) -> Tensor:
    bits = bits - 7046029254386353131  # 0x9e3779b97f4a7c15 in two's complement
    bits = (bits ^ _shifted(bits, 30)) * -4658895280553007687
    bits = (bits ^ _shifted(bits, 27)) * -7723592293110705685
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """To the right, with zeros."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


# --- norms, activations, concatenation -------------------------------------------------------------------------------


def rmsnorm(
    input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, enable_pdl: bool | None = None
) -> Tensor:
    """input / sqrt(mean(input^2) + eps) * weight over the last dimension, in float32 inside."""
    del enable_pdl
    return _written(_normed(input.float(), weight.float(), eps), input, out)


def gemma_rmsnorm(
    input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, enable_pdl: bool | None = None
) -> Tensor:
    """rmsnorm() with weight + 1."""
    del enable_pdl
    return _written(_normed(input.float(), weight.float() + 1, eps), input, out)


def fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    """residual += input, then input = rmsnorm(residual), both in place."""
    del enable_pdl
    _add_and_norm(input, residual, weight.float(), eps)


def gemma_fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    """fused_add_rmsnorm() with weight + 1."""
    del enable_pdl
    _add_and_norm(input, residual, weight.float() + 1, eps)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def _add_and_norm(input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    total = input.float() + residual.float()
    residual.copy_(total)
    input.copy_(_normed(total, weight, eps))


def _written(result: Tensor, like: Tensor, out: Tensor | None) -> Tensor:
    return result.to(like.dtype) if out is None else out.copy_(result)


def _gated(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def and_mul(input: Tensor, out: Tensor | None = None, enable_pdl: bool | None = None) -> Tensor:
        """The activation of the first half of the last dimension, times the second half."""
        del enable_pdl
        gate, up = input.float().chunk(2, -1)
        return _written(activation(gate) * up, input, out)

    return and_mul


silu_and_mul = _gated(silu)
gelu_and_mul = _gated(gelu)
gelu_tanh_and_mul = _gated(partial(gelu, approximate="tanh"))


def concat_mla_k(k: Tensor, k_nope: Tensor, k_rope: Tensor, *, backend: str = "default") -> None:
    """Write k_nope [tokens, heads, dims], and behind it k_rope [tokens, 1, dims] for each head, into k."""
    if not is_choice(backend, ("default", "cake")):
        raise ValidationError(f"backend: expected 'default' or 'cake', which mean the same here, got {backend!r}.")
    nope_dims = check_tensor(k_nope, "k_nope").shape[-1]
    heads = {"tokens": k_nope.shape[0], "heads": k_nope.shape[1]}
    check_shape(check_tensor(k, "k"), "k", {**heads, "dims": nope_dims + check_tensor(k_rope, "k_rope").shape[-1]})
    check_shape(k_rope, "k_rope", {"tokens": k.shape[0], "heads": 1, "dims": None})
    k[..., :nope_dims] = k_nope
    k[..., nope_dims:] = k_rope


SAMPLING: Mapping[str, Any] = {
    function.__name__: function
    for function in (
        softmax, sampling_from_probs, sampling_from_logits, top_p_sampling_from_probs, top_k_sampling_from_probs,
        min_p_sampling_from_probs, top_k_top_p_sampling_from_probs, top_k_top_p_sampling_from_logits,
        top_p_renorm_probs, top_k_renorm_probs, top_k_mask_logits,
    )
} | {"top_p_renorm_prob": top_p_renorm_probs, "top_k_renorm_prob": top_k_renorm_probs}  # fmt: skip
NORMS: Mapping[str, Any] = {
    function.__name__: function for function in (rmsnorm, gemma_rmsnorm, fused_add_rmsnorm, gemma_fused_add_rmsnorm)
}
ACTIVATIONS: Mapping[str, Any] = {
    "silu_and_mul": silu_and_mul, "gelu_and_mul": gelu_and_mul, "gelu_tanh_and_mul": gelu_tanh_and_mul,
}  # fmt: skip


# --- devices and numbers ---------------------------------------------------------------------------------------------


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


def device_support_pdl(device: torch.device) -> bool:
    """Whether a kernel can start before the one ahead ends (`enable_pdl`): from Hopper on."""
    return device.type == "cuda" and get_compute_capability(device)[0] >= 9


def determine_attention_backend(
    device: torch.device, pos_encoding_mode: int, use_fp16_qk_reductions: bool, use_custom_mask: bool,
    dtype_q: torch.dtype, dtype_kv: torch.dtype, *, head_dim_qk: int | None = None, head_dim_vo: int | None = None,
) -> str:  # fmt: skip
    """FlashInfer's own choice between "fa2" and "fa3", for programs that branch on it; Quire's `auto` does not."""
    one_byte = dtype_kv.itemsize == 1 and dtype_q.itemsize > 1
    heads = (head_dim_qk, head_dim_vo)
    has_tiles = None in heads or heads in ((64, 64), (128, 128), (256, 256), (192, 128))
    plain = not (use_custom_mask or use_fp16_qk_reductions or pos_encoding_mode or one_byte)
    return "fa3" if is_sm90a_supported(device) and plain and has_tiles else "fa2"


def has_flashinfer_jit_cache() -> bool:
    """Programs compile FlashInfer's own modules ahead where this is False; Quire has none: see quire.warmup()."""
    return True


def ceil_div(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)


def round_up(x: int, y: int) -> int:
    """The next multiple of y from x on."""
    return ceil_div(x, y) * y


UTILS: Mapping[str, Any] = {
    **{f"is_sm{arch}_supported": is_sm100a_supported for arch in ("100a", "110a", "120a", "121a", "12x")},
    **{
        value.__name__: value
        for value in (
            MaskMode, PosEncodingMode, TensorLayout, ceil_div, determine_attention_backend, device_support_pdl,
            get_compute_capability, get_device_sm_count, has_flashinfer_jit_cache, is_sm90a_supported, round_up,
        )
    },
    "GPUArchitectureError": UnsupportedError,  # FlashInfer's, for a GPU that a kernel was not written for
}  # fmt: skip
