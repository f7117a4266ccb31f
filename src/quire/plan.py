"""A plan: everything of a call but its tensors."""

from __future__ import annotations

import ctypes
import math
from typing import NamedTuple

import torch

from quire.jit import Module
from quire.kernels import Decision
from quire.kernels.attention import Geometry
from quire.kernels.params import AttentionParams
from quire.launch import Launcher
from quire.layout import KVView
from quire.schedule import Indices, kept_indices
from quire.target import has_dependent_launch
from quire.tensor_maps import TensorMaps
from quire.terms import Scoring

__all__ = ["LOG2E", "AttentionPlan", "Planned", "base_of"]

LOG2E = math.log2(math.e)


class Planned(NamedTuple):
    """What the host knows of a batch that it planned; AttentionPlan.planned is None where only the device does."""

    nnz_qo: int  #: rows of q
    nnz_kv: int  #: rows of k, or page numbers
    largest_page: int  #: -1 where page numbers lie on the device
    kept: bytearray  #: the index arrays, see schedule.py
    pages: torch.Tensor | None  #: page numbers that do not lie in `sent`
    sent: torch.Tensor  #: the schedule on the device, and the page numbers
    pages_offset: int  #: where they begin

    def indices(self, given: Indices) -> Indices:
        """The index arrays that plan() was given, whoever has written them since."""
        pages = self.pages
        if pages is None and given.kv_indices is not None:
            pages = self.sent[self.pages_offset :].view(torch.int32)
        return kept_indices(self.kept, given, pages)


class AttentionPlan:
    """Everything of a call but its tensors: owns its index arrays, runs any number of times.

    Two runs of one plan must not overlap on different streams or threads: they share the workspace.
    """

    def __init__(
        self, decision: Decision, module: Module, params: ctypes.Structure, scoring: Scoring, device: torch.device,
        owned: tuple[torch.Tensor | None, ...], grid: int, *, starts_early: bool, planned: Planned | None = None,
    ) -> None:  # fmt: skip
        kernel = decision.kernel
        self.planned = planned
        self._starts_early = starts_early  # where run() is not told
        self._params = base_of(params)
        self._scoring = scoring
        self._owned = (params, *owned)  # what the parameter struct points into
        self._maps = TensorMaps(kernel, decision.key, kernel.tile(decision.key), params) if kernel.copies else None
        self._launch = Launcher(
            module, params, device, grid, pdl=kernel.pdl and has_dependent_launch(decision.key.target)
        )

    def set_form(self, q: torch.Tensor, k: KVView, v: KVView, o: torch.Tensor) -> None:
        """The form of the tensors that the next runs bring."""
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
            self._maps.encode(geometry, {"q": q.data_ptr(), "k": k.pointer, "v": v.pointer})

    def run(
        self, q: int, k: int, v: int, o: int, lse: int | None = None, sinks: int | None = None, *,
        logits_scale: float = 1.0, o_scale: float = 1.0, logits_scale_by: int | None = None,
        o_scale_by: int | None = None, enable_pdl: bool | None = None,
    ) -> None:  # fmt: skip
        """Launch on the current stream, on tensors at these addresses, of the form that set_form() was told.

        `*_by`: where on the GPU a float32 lies that the scale is multiplied by; for paged keys only.
        """
        p = self._params
        p.q, p.k, p.v, p.o, p.lse, p.sinks = q, k, v, o, lse, sinks
        scale, cap = self._scoring.sm_scale * logits_scale, self._scoring.logits_soft_cap
        p.logits_scale = scale / cap if cap else scale * LOG2E
        p.o_scale = o_scale
        p.logits_scale_by, p.o_scale_by = logits_scale_by, o_scale_by
        if self._maps is not None:
            self._maps.move({"q": q, "k": k, "v": v})
        if p.num_ctas:
            self._launch(self._starts_early if enable_pdl is None else enable_pdl)


def base_of(params: ctypes.Structure) -> AttentionParams:
    """What every attention kernel is given, inside what this one is."""
    return params if isinstance(params, AttentionParams) else params.base
