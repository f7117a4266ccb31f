"""Packing booleans into bits, and appending to a cache of 4 bits (NVFP4), as FlashInfer's quantization module has it.

Keys and values are quantised, each 16 dims with a scale of their own. engine/upcast.py says how such a cache lies in
memory, kernels/append_nvfp4.h how numbers are rounded. The CPU and GPUs write the same bits. Index arrays on a device
are not checked: see page.py. API: https://docs.flashinfer.ai/api
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from quire.engine.checks import (
    check_contiguous_last,
    check_output,
    check_same_device,
    check_shape,
    check_tensor,
    host_indices,
    scalar,
)
from quire.engine.device import target_of
from quire.engine.launch import launch, row_grid
from quire.engine.operands import byte_offsets, pack_bits
from quire.engine.operators import operator
from quire.engine.schedule import append_tables
from quire.engine.tensors import PagedCache, cache_tensors, cache_views
from quire.engine.upcast import as_bytes
from quire.errors import ValidationError
from quire.jit import get_module
from quire.kernels.features import SCALED_NUMBERS, KVLayout, dtype_of
from quire.kernels.operation import PARALLEL_THREADS, AppendNvfp4Params, OperationKey

__all__ = ["packbits", "segment_packbits"]


def packbits(x: torch.Tensor, bitorder: str = "big") -> torch.Tensor:
    """Pack eight booleans into each byte: x [n], bool or uint8, -> uint8 [ceil(n / 8)]. Unused bits are 0.

    With bitorder "big" the first element is the highest bit, with "little" the lowest. Raises ValidationError naming
    the argument.

    >>> quire.packbits(torch.tensor([True, False, True]), "little")
    tensor([5], dtype=torch.uint8)
    """
    check_tensor(x, "x")
    if x.dim() != 1:
        raise ValidationError(f"x: expected a 1-D tensor, got {list(x.shape)}.")
    return pack_bits(x, [0, x.shape[0]], bitorder)


def segment_packbits(x: torch.Tensor, indptr: torch.Tensor, bitorder: str = "big") -> tuple[torch.Tensor, torch.Tensor]:
    """packbits() of each segment x[indptr[i]:indptr[i + 1]]; every segment begins with a new byte.

    indptr: int32 or int64 [num_segments + 1], offsets into x. If it is on a device, it is copied to the host,
    which waits for the device. Returns the bytes and their offsets [num_segments + 1] (dtype and device of `indptr`).
    Raises ValidationError naming the argument.

    >>> quire.segment_packbits(torch.ones(5, dtype=torch.bool), torch.tensor([0, 2, 5]), "little")
    (tensor([3, 7], dtype=torch.uint8), tensor([0, 1, 2]))
    """
    check_tensor(x, "x")
    if x.dim() != 1:
        raise ValidationError(f"x: expected a 1-D tensor, got {list(x.shape)}.")
    check_tensor(indptr, "indptr")
    segments: list[int] = host_indices(indptr, "indptr").tolist()
    if not segments or segments[0] != 0 or segments != sorted(segments) or segments[-1] > x.shape[0]:
        raise ValidationError(
            f"indptr: expected ascending offsets from 0 to at most {x.shape[0]}, got {segments[:8]}..."
        )
    offsets = torch.tensor(byte_offsets(segments), dtype=indptr.dtype, device=indptr.device)
    return pack_bits(x, segments, bitorder), offsets


_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_STRIDES = tuple(field[0] for field in AppendNvfp4Params._fields_ if field[0].endswith("_stride"))
_MOST = 2**31 - 1


def nvfp4_quantize_append_paged_kv_cache(
    append_key: torch.Tensor, append_value: torch.Tensor, batch_indices: torch.Tensor, positions: torch.Tensor,
    paged_kv_cache: PagedCache, kv_cache_sf: PagedCache, kv_indices: torch.Tensor, kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor, k_scale: float | torch.Tensor, v_scale: float | torch.Tensor,
    kv_layout: str = "NHD",
) -> None:  # fmt: skip
    """Quantise append_key, append_value [nnz, num_kv_heads, head_dim] and write them into the cache.

    append_key, append_value: float16, bfloat16 or float32.
    paged_kv_cache: uint8 [num_pages, 2, page_size, num_kv_heads, head_dim / 2] (HND: heads before tokens) or a pair of
        such tensors without the second dimension. kv_cache_sf: the same in float8_e4m3fn with head_dim / 16.
    k_scale, v_scale: the global scales, positive: a key is read as number x scale x k_scale. Numbers, or float32
        tensors of one element, which are read on their device.
    batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len: as in append_paged_kv_cache().

    The scale of 16 dims is their largest magnitude / (6 * k_scale) in e4m3; a number is x / (scale * k_scale) in E2M1.
    Both are rounded to nearest, ties to even. NaN makes the scale NaN.

    Raises ValidationError naming the argument, before anything is written.

    >>> cache = torch.zeros(4, 2, 16, 2, 32, dtype=torch.uint8)  # heads of 64 dims
    >>> scales = torch.zeros(4, 2, 16, 2, 4, dtype=torch.float8_e4m3fn)
    >>> int32 = {"dtype": torch.int32}
    >>> key = torch.full((1, 2, 64), 3.0, dtype=torch.bfloat16)
    >>> quire.nvfp4_quantize_append_paged_kv_cache(
    ...     key, key, torch.tensor([0], **int32), torch.tensor([17], **int32), cache, scales,
    ...     torch.tensor([2, 3], **int32), torch.tensor([0, 2], **int32), torch.tensor([2], **int32), 1.0, 1.0,
    ... )
    >>> hex(cache[3, 0, 1, 0, 0]), float(scales[3, 0, 1, 0, 0])  # 3 is 6 x 0.5, and 7 the code of 6
    ('0x77', 0.5)
    """
    k_cache, v_cache = _two(paged_kv_cache)
    k_sf, v_sf = _two(kv_cache_sf)
    (k_number, k_at), (v_number, v_at) = _global_scale(k_scale, "k_scale"), _global_scale(v_scale, "v_scale")
    _append(
        append_key, append_value, k_cache, v_cache, k_sf, v_sf, batch_indices, positions, kv_indices, kv_indptr,
        kv_last_page_len, None, k_number, v_number, k_at, v_at, kv_layout,
    )  # fmt: skip


def nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
    append_key: torch.Tensor, append_value: torch.Tensor, slot_mapping: torch.Tensor, paged_kv_cache: PagedCache,
    kv_cache_sf: PagedCache, k_scale: float | torch.Tensor, v_scale: float | torch.Tensor, kv_layout: str = "NHD",
) -> None:  # fmt: skip
    """nvfp4_quantize_append_paged_kv_cache() of tokens whose places are known, as vLLM knows them.

    slot_mapping: int32 or int64 [nnz], page number times page_size plus token in the page. Tokens with a negative one,
    or with one beyond the cache, are skipped. append_key and append_value may have more rows, which are not read.

    Raises ValidationError naming the argument, before anything is written.

    >>> cache = tuple(torch.zeros(4, 16, 2, 32, dtype=torch.uint8) for _ in range(2))
    >>> scales = tuple(torch.zeros(4, 16, 2, 4, dtype=torch.float8_e4m3fn) for _ in range(2))
    >>> key = torch.full((2, 2, 64), -6.0, dtype=torch.bfloat16)
    >>> quire.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
    ...     key, key, torch.tensor([17, -1]), cache, scales, 1.0, 1.0
    ... )
    >>> hex(cache[0][1, 1, 0, 0]), float(scales[1][1, 1, 0, 0])
    ('0xff', 1.0)
    """
    places: torch.Tensor = check_tensor(slot_mapping, "slot_mapping")
    if places.dtype not in (torch.int32, torch.int64) or places.dim() != 1:
        raise ValidationError(f"slot_mapping: expected int32 or int64 [nnz], got {places.dtype} {list(places.shape)}.")
    k_cache, v_cache = _two(paged_kv_cache)
    k_sf, v_sf = _two(kv_cache_sf)
    (k_number, k_at), (v_number, v_at) = _global_scale(k_scale, "k_scale"), _global_scale(v_scale, "v_scale")
    _append(
        append_key, append_value, k_cache, v_cache, k_sf, v_sf, None, None, None, None, None,
        places.to(torch.int64).contiguous(), k_number, v_number, k_at, v_at, kv_layout,
    )  # fmt: skip


def _two(cache: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    first, *second = (as_bytes(tensor) for tensor in cache_tensors(cache))
    return first, second[0] if second else None


def _global_scale(value: Any, name: str) -> tuple[float, torch.Tensor | None]:
    """A number, and where a device has it, its place there."""
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        check_tensor(value, name)
        if value.numel() != 1 or value.dtype is not torch.float32:
            raise ValidationError(f"{name}: expected a number or float32 [1], got {value.dtype} {list(value.shape)}.")
        return 1.0, value
    return scalar(value, name, positive=True), None


@operator("append_nvfp4", writes="k_cache v_cache k_sf v_sf")
def _append(
    append_key: torch.Tensor, append_value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor | None,
    k_sf: torch.Tensor, v_sf: torch.Tensor | None, batch_indices: torch.Tensor | None, positions: torch.Tensor | None,
    kv_indices: torch.Tensor | None, kv_indptr: torch.Tensor | None, kv_last_page_len: torch.Tensor | None,
    places: torch.Tensor | None, k_scale: float, v_scale: float, k_scale_at: torch.Tensor | None,
    v_scale_at: torch.Tensor | None, kv_layout: str,
) -> None:  # fmt: skip
    layout = KVLayout.of(kv_layout)
    k, v = cache_views(k_cache if v_cache is None else (k_cache, v_cache), layout)
    scales = _scales(k_sf if v_sf is None else (k_sf, v_sf), layout, (k, v))
    device = k.device
    for scale, name in ((k_scale_at, "k_scale"), (v_scale_at, "v_scale")):
        if scale is not None:
            check_same_device(scale, name, device)
    if places is None:
        nnz, batch = append_key.shape[0] if check_tensor(append_key, "append_key").dim() else 0, 0
        tables, batch = append_tables(batch_indices, positions, kv_indices, kv_indptr, nnz, k, kv_last_page_len)
    else:
        check_same_device(places, "slot_mapping", device)
        nnz, batch, tables = places.shape[0], 1, {"places": places}
    for tensor, name, view in ((append_key, "append_key", k), (append_value, "append_value", v)):
        _check_tokens(tensor, name, nnz if places is None else None, view, append_key)
        if tensor.shape[0] < nnz:
            raise ValidationError(f"{name}: expected a row for each of {nnz} places, got {list(tensor.shape)}.")
    if nnz and batch and k.shape[0]:
        _launch(
            nnz, append_key, append_value, k, v, scales, tables, batch, (k_scale, v_scale), (k_scale_at, v_scale_at)
        )


def _scales(
    kv_cache_sf: PagedCache, layout: KVLayout, cache: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    scales = cache_views(kv_cache_sf, layout)
    for view, numbers in zip(scales, cache, strict=True):
        if numbers.dtype is not torch.uint8:
            raise ValidationError(
                f"paged_kv_cache: expected dtype torch.uint8, two numbers a byte, got {numbers.dtype}."
            )
        if view.dtype not in (torch.float8_e4m3fn, torch.uint8):
            raise ValidationError(f"kv_cache_sf: expected dtype torch.float8_e4m3fn, got {view.dtype}.")
        num_scales, rest = divmod(2 * numbers.shape[3], SCALED_NUMBERS)
        wanted = (*numbers.shape[:3], num_scales)
        if rest or tuple(view.shape) != wanted:
            raise ValidationError(
                f"kv_cache_sf: expected {list(wanted)}, a scale for each {SCALED_NUMBERS} dims of a cache of "
                f"{list(numbers.shape)} bytes, got {list(view.shape)}."
            )
        check_same_device(check_output(view, "kv_cache_sf"), "kv_cache_sf", numbers.device)
    return scales


def _check_tokens(
    tensor: torch.Tensor, name: str, nnz: int | None, view: torch.Tensor, append_key: torch.Tensor
) -> None:
    check_tensor(tensor, name)
    check_shape(tensor, name, {"nnz": nnz, "num_kv_heads": view.shape[2], "head_dim": 2 * view.shape[3]})
    check_same_device(tensor, name, view.device)
    check_contiguous_last(tensor, name)
    if tensor.dtype not in _DTYPES or tensor.dtype is not append_key.dtype:
        wanted = ", ".join(map(str, _DTYPES)) if tensor is append_key else append_key.dtype
        raise ValidationError(f"{name}: expected dtype {wanted}, got {tensor.dtype}.")


def _launch(
    nnz: int, key: torch.Tensor, value: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor], tables: dict[str, torch.Tensor], batch: int,
    numbers: tuple[float, float], scales_at: tuple[torch.Tensor | None, torch.Tensor | None],
) -> None:  # fmt: skip
    num_pages, page_size, num_kv_heads, _ = k.shape
    tokens, caches = (key, value), (k, v, *scales)
    strides = [
        *(stride for tensor in tokens for stride in tensor.stride()[:2]),
        *(stride for tensor in caches for stride in tensor.stride()[:3]),
    ]
    pointers = dict(zip(("key", "value", "k_cache", "v_cache", "k_sf", "v_sf"), (*tokens, *caches), strict=True))
    pointers |= {name: at for name, at in zip(("k_scale_at", "v_scale_at"), scales_at, strict=True) if at is not None}
    params = AppendNvfp4Params(
        **{name: tensor.data_ptr() for name, tensor in (pointers | tables).items()},
        **dict(zip(_STRIDES, strides, strict=True)), nnz=nnz,
        num_indices=tables["kv_indices"].shape[0] if "kv_indices" in tables else 0, batch_size=min(batch, _MOST),
        num_pages=min(num_pages, _MOST), num_kv_heads=num_kv_heads, head_dim_k=key.shape[2], head_dim_v=value.shape[2],
        page_size=page_size, k_scale=numbers[0], v_scale=numbers[1],
    )  # fmt: skip
    vector = 16 // key.element_size()
    is_aligned = all(t.data_ptr() % 16 == 0 and not any(s % vector for s in t.stride()[:2]) for t in tokens)
    is_aligned &= all(t.data_ptr() % 8 == 0 and not any(s % 8 for s in t.stride()[:3]) for t in (k, v))
    slug = dtype_of(key.dtype, "append_key").slug
    module = get_module(OperationKey("append_nvfp4", target_of(key.device), slug, vector if is_aligned else 1).spec())
    grid = row_grid(nnz, num_kv_heads * (max(key.shape[2], value.shape[2]) // SCALED_NUMBERS))
    launch(module, ctypes.addressof(params), key.device, grid=grid, block=PARALLEL_THREADS)
