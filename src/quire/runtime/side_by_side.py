"""Prefill and decode in one launch.

Prefill is limited by the tensor cores, decode by memory bandwidth, which two thirds of a GPU's SMs use up wherever its
CTAs are placed. If they run one after the other, each leaves idle what the other needs. In one launch the decodes get
these SMs, and the prefill the others; SMs that have no more decodes go on with the prefill (kernels/pod.cuh).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from threading import Lock
from typing import NamedTuple, TypeVar

import torch
from torch.autograd import profiler

from quire.jit import is_obtainable
from quire.kernels.params import PodParams, aligned_copy
from quire.kernels.pod import PodKey, pod_reason
from quire.runtime.attention import Attention, AttentionSpec
from quire.runtime.checks import check_tensor
from quire.runtime.launch import bind, profiled
from quire.runtime.plan import base_of
from quire.runtime.planner import load
from quire.runtime.schedule import Indices
from quire.runtime.target import max_ctas, on_cuda, target_of
from quire.runtime.workspace import OwnWorkspace
from quire.types import KVLayout, MaskMode

_First = TypeVar("_First")
_Second = TypeVar("_Second")

#: Products a microsecond of one SM of a Hopper GPU, and bytes a microsecond of its memory.
_FLOPS_OF_SM, _BYTES_OF_MEMORY = 4.8e6, 4.1e6
#: Of shorter work the other hides too little, in microseconds.
_LEAST_US = 20.0


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


def sms_of_decode(prefill: Work, decode: Work, device: torch.device) -> int:
    """SMs for decodes beside a prefill; 0: one after the other is as fast, or the GPU is unknown."""
    if not on_cuda(device) or target_of(device) != "sm90a":
        return 0
    sms = max_ctas(device, 1)
    return 0 if min(_computing(prefill, sms), _reading(decode)) < _LEAST_US else sms * 2 // 3


def _computing(prefill: Work, sms: int) -> float:
    return prefill.flops / _FLOPS_OF_SM / sms


def _reading(decode: Work) -> float:
    return decode.bytes / _BYTES_OF_MEMORY


class SideBySide:
    """One launch of a planned prefill and of planned decodes."""

    @classmethod
    def of(cls, spec: AttentionSpec, layout: KVLayout, decodes: Attention) -> SideBySide | None:
        """One launch of the prefill `spec` and of `decodes`; None if one after the other is as fast."""
        device = decodes.device
        if decodes.spec.options.cascade:
            return None
        work, decode_work = Work.of(spec), Work.of(decodes.spec)
        if not (sms := sms_of_decode(work, decode_work, device)):
            return None
        others = max_ctas(device, 1) - sms
        spec = spec._replace(options=spec.options._replace(sms=others))
        prefill = Attention(spec, layout, OwnWorkspace(device), "auto")
        keys = prefill.decision.key, decodes.decision.key
        if pod_reason(*keys) is not None or not is_obtainable(PodKey(*keys).spec()):
            return None
        alone = _computing(work, sms + others) + _reading(decode_work)
        if base_of(prefill.plan.params).partitions is not None and _computing(work, others) > alone:
            return None  # its partitions belong to a third of the SMs
        return cls(prefill, decodes, sms)

    def __init__(self, prefill: Attention, decodes: Attention, sms: int) -> None:
        """`sms`: of decodes, at most."""
        self.prefill, self._decodes, self._lock = prefill, decodes, Lock()
        self._params, device = aligned_copy(PodParams()), decodes.device
        self._module, _ = load(PodKey(prefill.decision.key, decodes.decision.key).spec(), device)
        theirs, mine = base_of(decodes.plan.params), base_of(prefill.plan.params)
        self._params.num_decode_ctas = ctas = min(sms, -(-theirs.num_ctas // self._module.exports["kDecoding"]))
        self._params.decode_counter = decodes.plan.tile_counter
        grid = max_ctas(device, 1) if mine.partitions is None else ctas + mine.num_ctas
        self._launch = bind(self._module, ctypes.addressof(self._params), device, grid, pdl=False)
        note = f"one launch with the decodes: {ctas} CTAs decode first, {grid - ctas} compute prefills at once"
        prefill.plan.note = "; ".join(filter(None, (prefill.plan.note, note)))

    def takes(self, q: torch.Tensor, q_d: torch.Tensor) -> bool:
        """Whether these queries have the heads that were planned: a layer of fewer heads has plans of its own."""
        given = ((q, self.prefill), (q_d, self._decodes))
        return all(check_tensor(t, "q").shape[1:2] == (plan.spec.options.num_qo_heads,) for t, plan in given)

    def run(self, prefill: Callable[[], _First], decode: Callable[[], _Second]) -> tuple[_First, _Second]:
        """The results of prefill() and decode(), which call run() of the two plans."""
        plans = self.prefill.plan, self._decodes.plan
        with self._lock, plans[0].launched_by(lambda _: None), plans[1].launched_by(self._start):
            return prefill(), decode()

    def _start(self, stream: int) -> None:
        self._params.prefill, self._params.decode = self.prefill.plan.params, self._decodes.plan.params
        if profiler._is_profiler_enabled:
            profiled(self._module, self._launch, stream)
        else:
            self._launch(stream)
