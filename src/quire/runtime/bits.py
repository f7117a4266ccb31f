"""Packs booleans into bits, the format in which kernels read custom masks."""

from __future__ import annotations

import ctypes
from itertools import pairwise

import torch

from quire.errors import ValidationError
from quire.jit import get_module
from quire.kernels.operation import PARALLEL_THREADS, OperationKey
from quire.kernels.params import PackbitsParams
from quire.runtime.checks import check_same_device, check_tensor
from quire.runtime.launch import launch
from quire.runtime.schedule import Indices
from quire.runtime.target import target_of

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
