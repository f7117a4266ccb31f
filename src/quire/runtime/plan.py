"""A plan: everything of a call but its tensors."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import torch

from quire.jit import Module
from quire.kernels import Decision
from quire.kernels.attention import Geometry
from quire.kernels.params import AttentionParams
from quire.runtime.launch import bind
from quire.runtime.layout import KVView
from quire.runtime.options import LogitsOptions
from quire.runtime.schedule import Indices, Schedule
from quire.runtime.target import has_dependent_launch
from quire.runtime.tensor_maps import Described, TensorMaps
from quire.runtime.upload import DeviceBuffer

__all__ = ["LOG2E", "AttentionPlan", "base_of"]

LOG2E = math.log2(math.e)
_STRIDES = range(AttentionParams.q_token_stride.offset, AttentionParams.group.offset)  # bytes of a parameter struct


class AttentionPlan:
    """Everything of a call but its tensors: owns its index arrays, runs any number of times.

    Two runs of one plan must not overlap on different streams or threads: they share the workspace.
    """

    def __init__(
        self, decision: Decision, module: Module, params: ctypes.Structure, logits: LogitsOptions, device: torch.device,
        grid: int, owned: tuple[Any, ...], *, uses_pdl: bool, schedule: Schedule | None = None,
        sent: DeviceBuffer | None = None, pages: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self.schedule = schedule  #: None where only the device knows the batch
        self._sent = sent  # where the schedule lies on a GPU, if not in a graph's buffer
        self._pages = pages  # page numbers that do not lie behind it
        self._module, self._device, self._grid = module, device, grid
        self._may_use_pdl = decision.kernel.pdl and has_dependent_launch(decision.key.target)
        self._uses_pdl = uses_pdl  # where run() is not told
        self._params = base_of(params)
        self._logits = logits
        self._owned = (params, owned)  # what the parameter struct points into
        self._maps = TensorMaps(decision, params) if decision.kernel.copies else None
        self._launches: dict[bool, Callable[[int], None]] = {}  # by whether they start early
        self._extras: tuple[Any, ...] = ()  # of the last run

    @property
    def nnz_kv(self) -> int:
        """Rows of k, or page numbers; 0 where only the device knows."""
        return self.schedule.params.nnz_kv if self.schedule else 0

    @property
    def largest_page(self) -> int:
        """The largest page number; -1 where only the device knows."""
        return self.schedule.params.largest_page if self.schedule else -1

    def indices(self, given: Indices) -> Indices:
        """The index arrays that plan() was given, whoever has written them since."""
        assert self.schedule is not None
        pages = self._pages
        if pages is None and given.kv_indices is not None:
            begin, end = self.schedule.params.filled_bytes, self.schedule.params.staged_bytes
            pages = self.schedule.pages if self._sent is None else self._sent.copy(begin, end).view(torch.int32)
        return self.schedule.indices(given, pages)

    def set_signature(self, q: torch.Tensor, k: KVView, v: KVView, o: torch.Tensor) -> None:
        """The signature of the tensors that the next runs bring."""
        p = self._params
        p.q_token_stride, p.q_head_stride, _ = q.stride()
        p.o_token_stride, p.o_head_stride, _ = o.stride()
        p.k_page_stride, p.k_token_stride, p.k_head_stride = k.page_stride, k.token_stride, k.head_stride
        p.v_page_stride, p.v_token_stride, p.v_head_stride = v.page_stride, v.token_stride, v.head_stride
        if self._maps is not None:
            geometry = Geometry(
                q.shape[0], min(k.num_tokens, v.num_tokens), min(k.num_pages, v.num_pages), p.page.divisor,
                p.num_kv_heads, p.group.divisor,
                (p.q_token_stride, p.q_head_stride), (p.k_page_stride, p.k_token_stride, p.k_head_stride),
                (p.v_page_stride, p.v_token_stride, p.v_head_stride),
            )  # fmt: skip
            self._maps.encode(geometry, (q.data_ptr(), k.pointer, v.pointer))

    def signature(self) -> tuple[bytes, Described | None]:
        """What set_signature() has set, for take_signature() of another plan of the same kernel and options."""
        strides = ctypes.string_at(ctypes.addressof(self._params) + _STRIDES.start, len(_STRIDES))
        return strides, self._maps.described() if self._maps is not None else None

    def take_signature(self, strides: bytes, described: Described | None) -> None:
        """What set_signature() would set."""
        ctypes.memmove(ctypes.addressof(self._params) + _STRIDES.start, strides, len(_STRIDES))
        if self._maps is not None and described is not None:
            self._maps.take(described)

    def run(
        self, stream: int, q: int, k: int, v: int, o: int, lse: int | None, sinks: int | None, logits_scale: float,
        o_scale: float, logits_scale_by: int | None, o_scale_by: int | None, enable_pdl: bool | None,
    ) -> None:  # fmt: skip
        """Launch on `stream`, torch's current one, on tensors at these addresses, with set_signature()'s signature.

        `*_by`: where on the GPU a float32 lies that the scale is multiplied by; for paged keys only.
        """
        p = self._params
        p.q, p.k, p.v, p.o = q, k, v, o
        extras = lse, sinks, logits_scale, o_scale, logits_scale_by, o_scale_by
        if extras != self._extras:
            self._set(*extras)
            self._extras = extras
        if self._maps is not None:
            self._maps.move((q, k, v))
        if self._sent is not None and stream != self._sent.stream:
            self._sent.used_on(torch.cuda.current_stream(self._device))
        if p.num_ctas:
            early = self._may_use_pdl and (self._uses_pdl if enable_pdl is None else enable_pdl)
            launch = self._launches.get(early) or self._bind(early)
            launch(stream)

    def _set(
        self, lse: int | None, sinks: int | None, logits_scale: float, o_scale: float, logits_scale_by: int | None,
        o_scale_by: int | None,
    ) -> None:  # fmt: skip
        p = self._params
        p.lse, p.sinks, p.logits_scale_by, p.o_scale_by = lse, sinks, logits_scale_by, o_scale_by
        scale, cap = self._logits.sm_scale * logits_scale, self._logits.logits_soft_cap
        p.logits_scale, p.o_scale = scale / cap if cap else scale * LOG2E, o_scale

    def _bind(self, early: bool) -> Callable[[int], None]:
        params = ctypes.addressof(self._params)
        launch = self._launches[early] = bind(self._module, params, self._device, self._grid, pdl=early)
        return launch


def base_of(params: ctypes.Structure) -> AttentionParams:
    """What every attention kernel is given, inside what this one is."""
    return params if isinstance(params, AttentionParams) else params.base
