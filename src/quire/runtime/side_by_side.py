"""Prefill and decode at the same time, by launches on two streams.

Prefill is limited by the tensor cores, decode by memory bandwidth, which half of a GPU's SMs can use up. If they run
one after the other, each leaves idle what the other needs. Side by side, prefill gets as many of the SMs and decode the
others, such that both end at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple, TypeVar

import torch

from quire.runtime.attention import AttentionSpec
from quire.runtime.schedule import Indices
from quire.runtime.target import max_ctas, on_cuda, target_of
from quire.types import MaskMode

_First = TypeVar("_First")
_Second = TypeVar("_Second")

#: Of one SM of a Hopper GPU, and of its memory: products a microsecond, bytes a microsecond that an SM takes while
#: enough others do, and that memory gives.
_FLOPS_OF_SM, _BYTES_OF_SM, _BYTES_OF_MEMORY = 4.8e6, 64e3, 4.1e6
#: What starting two streams is worth: each of the launches takes longer alone, in microseconds.
_LEAST_US = 40.0


class Work(NamedTuple):
    """The work of a launch."""

    flops: float  #: of both matrix products
    bytes: float  #: of keys and values, each read once

    @classmethod
    def of(cls, spec: AttentionSpec) -> Work:
        """The work of a batch whose lengths the host knows; masks other than causal are ignored."""
        indices, options = spec.indices, spec.options
        assert isinstance(indices, Indices)
        kv = indices.kv_indptr.diff().double()
        if indices.kv_last_page_len is not None:
            kv = (kv - 1).clamp(0) * indices.page_size + indices.kv_last_page_len
        qo = kv.new_full(kv.shape, indices.qo_len) if indices.qo_indptr is None else indices.qo_indptr.diff().double()
        hidden = (qo - 1) / 2 if spec.mask is MaskMode.CAUSAL else 0.0
        pairs, dims = float((qo * (kv - hidden).clamp(0)).sum()), options.head_dim_qk + options.head_dim_vo
        tokens = float(kv.sum()) * options.num_kv_heads
        return cls(2.0 * pairs * dims * options.num_qo_heads, tokens * dims * options.types.kv.bits / 8)


def sms_of_prefill(prefill: Work, decode: Work, device: torch.device) -> int:
    """SMs for a prefill that runs beside a decode; 0: one after the other is as fast, or the GPU is unknown."""
    if not on_cuda(device) or target_of(device) != "sm90a":
        return 0
    sms, computing, reading = max_ctas(device, 1), prefill.flops / _FLOPS_OF_SM, decode.bytes / _BYTES_OF_MEMORY
    if computing / sms < _LEAST_US or reading < _LEAST_US:
        return 0
    even = sms * computing / (computing + decode.bytes / _BYTES_OF_SM)
    return max(1, min(int(even), int(computing / reading)))


@cache
def _other_stream(index: int) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
    return stream


def run_both(
    first: Callable[[], _First], second: Callable[[], _Second], device: torch.device
) -> tuple[_First, _Second]:
    """Run first() on torch's current stream and second() on another one. second() begins after earlier work on the
    current stream; later work on the current stream begins after both.

    `second` must allocate nothing, because its memory would belong to the other stream.
    """
    here, other = torch.cuda.current_stream(device), _other_stream(device.index or 0)
    other.wait_stream(here)
    one = first()
    with torch.cuda.stream(other):
        two = second()
    here.wait_stream(other)
    return one, two
