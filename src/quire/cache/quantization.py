"""Packing booleans into bits, as FlashInfer's quantization module does (https://docs.flashinfer.ai/api)."""

from __future__ import annotations

import torch

from quire.engine.checks import check_tensor, host_indices
from quire.engine.operands import byte_offsets, pack_bits
from quire.errors import ValidationError

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
