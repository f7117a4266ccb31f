"""Boolean masks as packed bits, and those of multi-item scoring.

A token of an item sees the prefix and its own item up to itself, a delimiter sees only the prefix, and a token of the
prefix sees earlier tokens. One pass therefore scores items independently. Kernels read this as a custom mask.
"""

from __future__ import annotations

import ctypes
from itertools import pairwise
from typing import Any

import torch

from quire.engine.checks import check_positive, check_same_device, check_shape, check_tensor
from quire.engine.device import target_of
from quire.engine.launch import launch
from quire.engine.schedule import Indices
from quire.errors import ValidationError
from quire.jit import get_module
from quire.kernels.operation import PARALLEL_THREADS, OperationKey
from quire.kernels.params import PackbitsParams

_BYTES_A_CTA = 1024  #: of the result: two for each of the kChunk items in kernels/packbits.h


def pack_mask(mask: torch.Tensor, indices: Indices, device: torch.device) -> torch.Tensor:
    """The bits of a flat bool mask, sum(qo_len * kv_len) values, as the kernels read them."""
    check_tensor(mask, "custom_mask")
    check_same_device(mask, "custom_mask", device)
    segments = [0]
    for qo_len, kv_len in zip(qo_lens(indices), kv_lens(indices), strict=True):
        segments.append(segments[-1] + qo_len * kv_len)
    if mask.numel() != segments[-1]:
        raise ValidationError(
            f"custom_mask: expected sum(qo_len * kv_len)={segments[-1]} elements, got {mask.numel()}."
        )
    return pack_bits(mask.reshape(-1), segments, "little", "custom_mask")


def qo_lens(indices: Indices) -> list[int]:
    """Rows of each request."""
    if indices.qo_indptr is None:
        return [indices.qo_len] * indices.batch_size
    return indices.qo_indptr.diff().tolist()


def kv_lens(indices: Indices) -> list[int]:
    """Tokens of each request."""
    counts = indices.kv_indptr.diff()
    if indices.kv_last_page_len is None:
        return counts.tolist()
    lens = (counts - 1) * indices.page_size + indices.kv_last_page_len
    return torch.where(counts == 0, 0, lens).tolist()


def byte_offsets(segments: list[int]) -> list[int]:
    """The byte at which the bits of each segment begin, and the number of bytes in all."""
    offsets = [0]
    for begin, end in pairwise(segments):
        offsets.append(offsets[-1] + (end - begin + 7) // 8)
    return offsets


def pack_bits(x: torch.Tensor, segments: list[int], bitorder: str, name: str = "x") -> torch.Tensor:
    """Packs eight booleans into a byte: uint8 [byte_offsets(segments)[-1]]. Each segment begins with a new byte."""
    if bitorder not in ("big", "little"):
        raise ValidationError(f"bitorder: expected 'big' or 'little', got {bitorder!r}.")
    if x.dtype not in (torch.bool, torch.uint8):
        raise ValidationError(f"{name}: expected dtype torch.bool or torch.uint8, got {x.dtype}.")
    offsets = byte_offsets(segments)
    if offsets[-1] == 0:
        return torch.empty(0, dtype=torch.uint8, device=x.device)
    num_bytes = -(-offsets[-1] // 4) * 4  # attention reads masks by the word, and no byte that nothing has written
    y = torch.empty(num_bytes, dtype=torch.uint8, device=x.device)
    x = x.contiguous()
    params = PackbitsParams(
        x=x.data_ptr(), y=y.data_ptr(), n=x.shape[0], num_bytes=num_bytes, num_segments=len(segments) - 1,
        little=int(bitorder == "little"),
    )  # fmt: skip
    if segments != [0, x.shape[0]]:
        index = torch.tensor([segments, offsets], dtype=torch.int64, device="cpu", pin_memory=x.is_cuda)
        sent = index.to(x.device, non_blocking=True)
        params.segment_begin, params.byte_begin = sent.data_ptr(), sent.data_ptr() + 8 * len(segments)
    module = get_module(OperationKey("packbits", target_of(x.device)).spec())
    grid = -(-num_bytes // _BYTES_A_CTA)
    launch(module, ctypes.addressof(params), x.device, grid=grid, block=PARALLEL_THREADS)
    return y[: offsets[-1]]


def with_items(
    custom_mask: torch.Tensor | None, packed_custom_mask: torch.Tensor | None, indices: Indices, device: torch.device,
    prefix_len_ptr: Any, token_pos_in_items_ptr: Any, token_pos_in_items_len: Any, max_item_len_ptr: Any,
) -> torch.Tensor | None:  # fmt: skip
    """The mask of multi-item scoring if plan() was asked for it, else `custom_mask`."""
    if prefix_len_ptr is None:
        if token_pos_in_items_ptr is not None or token_pos_in_items_len or max_item_len_ptr is not None:
            raise ValidationError(
                "prefix_len_ptr: expected a tensor beside token_pos_in_items_ptr, token_pos_in_items_len and "
                "max_item_len_ptr, got None."
            )
        return custom_mask
    if custom_mask is not None or packed_custom_mask is not None:
        name = "packed_custom_mask" if custom_mask is None else "custom_mask"
        raise ValidationError(f"{name}: expected None beside prefix_len_ptr, which says all that is seen.")
    length = check_positive(token_pos_in_items_len, "token_pos_in_items_len")
    batch = {"batch_size": indices.batch_size}
    prefixes = _prefix_lens(prefix_len_ptr, indices, length)
    positions = _of_type(token_pos_in_items_ptr, "token_pos_in_items_ptr", torch.uint16, device)
    missing = len(prefixes) * length - positions.numel()  # zeros behind the last request's tokens
    spare = length - (kv_lens(indices)[-1] - prefixes[-1]) if prefixes else 0
    if positions.dim() != 1 or not 0 <= missing <= spare:
        check_shape(
            positions, "token_pos_in_items_ptr", {"batch_size * token_pos_in_items_len": len(prefixes) * length}
        )
    positions = torch.nn.functional.pad(positions.to(torch.int32), (0, missing)).view(-1, length)
    if max_item_len_ptr is not None:
        most = _of_requests(_of_type(max_item_len_ptr, "max_item_len_ptr", torch.uint16, device))
        check_shape(most, "max_item_len_ptr", batch)
        _check_longest(positions, most)
    positions = positions.to(device, non_blocking=True)
    lens = zip(qo_lens(indices), kv_lens(indices), prefixes, positions, strict=True)
    return torch.cat([torch.empty(0, dtype=torch.bool, device=device), *(_seen(*one).flatten() for one in lens)])


def _of_type(value: Any, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of FlashInfer's number type, on the host or the device."""
    tensor = check_tensor(value, name)
    if tensor.dtype is not dtype:
        raise ValidationError(f"{name}: expected dtype {dtype}, got {tensor.dtype}.")
    if not tensor.is_cpu:
        check_same_device(tensor, name, device)
    return tensor.contiguous()


def _of_requests(tensor: torch.Tensor) -> torch.Tensor:
    """[batch_size]; that of one request may be a number."""
    return tensor.view(1) if tensor.dim() == 0 else tensor


def _prefix_lens(value: Any, indices: Indices, length: int) -> list[int]:
    """On the host, to which a device's are copied, as index arrays are."""
    tensor = check_tensor(value, "prefix_len_ptr")
    prefixes = _of_requests(_of_type(tensor, "prefix_len_ptr", torch.uint32, tensor.device))
    check_shape(prefixes, "prefix_len_ptr", {"batch_size": indices.batch_size})
    numbers: list[int] = prefixes.cpu().tolist()
    for request, (prefix, kv_len) in enumerate(zip(numbers, kv_lens(indices), strict=True)):
        if not kv_len - length <= prefix <= kv_len:
            raise ValidationError(
                f"prefix_len_ptr: expected {max(0, kv_len - length)}..{kv_len} of request {request}, with {kv_len} "
                f"tokens (token_pos_in_items_len={length}), got {prefix}."
            )
    return numbers


def _check_longest(positions: torch.Tensor, most: torch.Tensor) -> None:
    """Compare max_item_len_ptr, which is redundant, with the positions, if both are on the host."""
    if positions.is_cpu and most.is_cpu and positions.numel():
        longest = positions.amax(dim=1)
        if bool((longest > most.to(torch.int32)).any()):
            raise ValidationError(
                f"max_item_len_ptr: expected at least {longest.tolist()}, the largest positions in "
                f"token_pos_in_items_ptr, got {most.tolist()}."
            )


def _seen(qo_len: int, kv_len: int, prefix_len: int, positions: torch.Tensor) -> torch.Tensor:
    """Which keys each query of one request sees: bool [qo_len, kv_len]. `positions` begin after the prefix."""
    key = torch.arange(kv_len, dtype=torch.int32, device=positions.device)
    at = torch.arange(kv_len - qo_len, kv_len, dtype=torch.int32, device=positions.device)
    position = positions[(at - prefix_len).clamp_(0, positions.shape[0] - 1)]
    begin = torch.where(at < prefix_len, 0, at + 1 - position)
    return (key <= at[:, None]) & ((key < prefix_len) | (key >= begin[:, None]))
