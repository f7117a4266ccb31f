"""Caches of 4 bits (NVFP4): numbers of E2M1, two a byte of uint8, with a scale in e4m3 for each 16 of a row.

The numbers are tensors [..., head_dim / 2] of bytes, the first number of two in the low bits. The scales, kv_cache_sf,
are [..., head_dim / 16] with the other dimensions of the numbers, in the same order, and with strides of their own:
both may lie in one allocation. A key is number x scale x k_scale, a value number x scale x v_scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from quire.engine.tensors import PagedCache, cache_tensors
from quire.errors import UnsupportedArgumentError, ValidationError
from quire.kernels.features import NVFP4, SCALED_NUMBERS, SCALED_OPERANDS, DType, Operand, View, blocks_of

_BYTES = (torch.uint8, getattr(torch, "float4_e2m1fn_x2", torch.uint8))
_SCALES = (torch.float8_e4m3fn, torch.uint8)
#: FlashInfer's backend that reads the scales of values in another order than all others.
_SWIZZLES = "trtllm-gen"


def numbers_in_byte(tensor: torch.Tensor) -> int:
    """2 for a tensor of such numbers, 1 for any other."""
    return 2 if tensor.dtype in _BYTES else 1


def scaled(kv: Any, kv_cache_sf: Any, page_size: int) -> tuple[PagedCache, tuple[torch.Tensor, ...]]:
    """A cache of such numbers as uint8, and its scales as `others` of RunOptions; none where there are none.

    page_size: 0 for ragged keys and values.
    """
    if kv_cache_sf is None:
        return kv, ()
    tensors = tuple(as_bytes(tensor) for tensor in cache_tensors(kv))
    for tensor in tensors:
        if (dtype := getattr(tensor, "dtype", None)) is not torch.uint8:
            raise ValidationError(f"kv_cache_sf: expected None with keys and values of {dtype}, got scales.")
    scales = scales_of(kv_cache_sf, page_size)
    return tensors[0] if len(tensors) == 1 else (tensors[0], tensors[1]), scales


def check_order(backend: Any) -> None:
    """Refuse the one of FlashInfer's backends for which the scales of values would be in another order."""
    if str(backend) == _SWIZZLES:
        raise UnsupportedArgumentError(
            f"backend: expected another than {_SWIZZLES!r} with kv_cache_sf, which interleaves scales of four "
            f"tokens of values; they are read in the order of the cache, as fa2 and xqa have them."
        )


def as_bytes(tensor: Any) -> torch.Tensor:
    """A tensor of such numbers as uint8, which is what torch's float4_e2m1fn_x2 is."""
    is_other = isinstance(tensor, torch.Tensor) and tensor.dtype in _BYTES and tensor.dtype is not torch.uint8
    return tensor.view(torch.uint8) if is_other else tensor  # type: ignore[no-any-return]


def scales_of(kv_cache_sf: Any, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales of keys and of values, [pages, ...] in the order of the cache; ragged ones are one page."""
    if isinstance(kv_cache_sf, torch.Tensor):
        stacked = kv_cache_sf
        if stacked.dim() not in ((4, 5) if page_size == 1 else (5,)) or stacked.shape[1] != 2 or not page_size:
            raise ValidationError(
                f"kv_cache_sf: expected a pair (k_sf, v_sf), or for pages one tensor [num_pages, 2, ..., head_dim / "
                f"{SCALED_NUMBERS}], got {list(stacked.shape)}."
            )
        pair: tuple[Any, ...] = (stacked.select(1, 0), stacked.select(1, 1))
    elif isinstance(kv_cache_sf, (tuple, list)) and len(kv_cache_sf) == 2:
        pair = tuple(kv_cache_sf)
    else:
        raise ValidationError(
            f"kv_cache_sf: expected the scales of keys and values, a pair (k_sf, v_sf) or one tensor, got "
            f"{type(kv_cache_sf).__name__}."
        )
    k_sf, v_sf = (_as_pages(scales, f"kv_cache_sf[{i}]", page_size) for i, scales in enumerate(pair))
    return k_sf, v_sf


def _as_pages(scales: Any, name: str, page_size: int) -> torch.Tensor:
    if not isinstance(scales, torch.Tensor) or scales.dtype not in _SCALES:
        got = scales.dtype if isinstance(scales, torch.Tensor) else type(scales).__name__
        raise ValidationError(f"{name}: expected scales of {_SCALES[0]}, or their bytes, got {got}.")
    tensor = scales.view(torch.float8_e4m3fn)
    if tensor.dim() == 3 and page_size in (0, 1):
        tensor = tensor.unsqueeze(1 if page_size else 0)
    if tensor.dim() != 4:
        wanted = "[num_pages, page_size, num_kv_heads" if page_size else "[nnz_kv, num_kv_heads"
        raise ValidationError(
            f"{name}: expected {wanted}, head_dim / {SCALED_NUMBERS}] in the order of kv_layout, got "
            f"{list(scales.shape)}."
        )
    return tensor


#: The operands of run() with such keys and values, in the order of AttentionScaledParams.
OPERANDS = tuple(operand for block in blocks_of(SCALED_OPERANDS) for operand in block)


def check_others(kv: DType, operands: Sequence[Operand], count: int) -> None:
    """Check the number of tensors beside q, k, v and the result of run(), for keys and values of type `kv`: scales of
    latents may be left out.
    """
    if kv is NVFP4 and count != len(operands) - 4:
        raise ValidationError("kv_cache_sf: expected the scales of keys and values of 4 bits (NVFP4), got None.")
    if count > len(operands) - 4:
        raise ValidationError(f"kv_cache_sf: expected None, as plan() was told keys and values of {kv.torch_name}.")


def check_scales_fit(views: Mapping[str, View], operands: Sequence[Operand]) -> None:
    """Check that scales are of as many pages, tokens and heads as the operand that they are of."""
    for operand in operands:
        if operand.scales is None or operand.scales.name not in views:
            continue
        wanted, got = (list(views[name].sizes[:3]) for name in (operand.name, operand.scales.name))
        if wanted != got:
            raise ValidationError(
                f"kv_cache_sf: expected scales of {wanted} pages, tokens and heads, as the cache has, got {got}."
            )
