"""FlashInfer's private attributes of wrappers that serving engines read and write.

vLLM compares the options of plan() with those of each layer. SGLang reads the buffers of wrappers for CUDA graphs, and
plans prefill between replays by a call into FlashInfer's module. mini-SGLang shares one int workspace. The values
are true ones; for example, the int workspace is empty unless the caller gave one, because a plan owns its index arrays.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quire.errors import UnsupportedError
from quire.runtime.attention import Attention, AttentionSpec, planned
from quire.runtime.graph import GraphState
from quire.runtime.options import split_size
from quire.runtime.schedule import Indices
from quire.runtime.workspace import UserWorkspace
from quire.types import KVLayout, MaskMode


class EngineAttributes:
    """Properties of a planned wrapper, which has the attributes below."""

    _attention: Attention | None
    _backend: str
    _buffers: Mapping[str, torch.Tensor | None]  #: of the constructor, by FlashInfer's names
    _graph: GraphState | None
    _int_workspace_buffer: torch.Tensor
    _layout: KVLayout
    _workspace: UserWorkspace

    @property
    def device(self) -> torch.device:
        """The device of the workspace and of all calls."""
        return self._workspace.device

    @property
    def _float_workspace_buffer(self) -> torch.Tensor:
        return self._workspace.buffer

    @property
    def _pin_memory_int_workspace_buffer(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device="cpu")

    @property
    def _kv_layout(self) -> str:
        return self._layout.value

    @property
    def _use_cuda_graph(self) -> bool:
        return self._graph is not None

    @property
    def _sm_scale(self) -> float:
        return planned(self._attention).spec.options.logits.sm_scale

    @property
    def _window_left(self) -> int:
        return planned(self._attention).spec.options.logits.window_left

    @property
    def _logits_soft_cap(self) -> float:
        return planned(self._attention).spec.options.logits.logits_soft_cap

    @property
    def _causal(self) -> bool:
        return planned(self._attention).spec.options.causal

    @property
    def _max_total_num_rows(self) -> int | None:
        return self._graph.max_rows if self._graph is not None and self._graph.is_planned else None

    @property
    def _qo_indptr_buf(self) -> torch.Tensor | None:
        return self._array("qo_indptr_buf", "qo_indptr")

    @property
    def _kv_indptr_buf(self) -> torch.Tensor | None:
        return self._array("kv_indptr_buf", "kv_indptr")

    @property
    def _paged_kv_indptr_buf(self) -> torch.Tensor | None:
        return self._array("paged_kv_indptr_buf", "kv_indptr")

    @property
    def _paged_kv_last_page_len_buf(self) -> torch.Tensor | None:
        return self._array("paged_kv_last_page_len_buf", "kv_last_page_len")

    @property
    def _paged_kv_indices_buf(self) -> torch.Tensor | None:
        return self._array("paged_kv_indices_buf", "kv_indices")

    @property
    def _custom_mask_buf(self) -> torch.Tensor | None:
        if self._graph is not None:
            return self._graph.mask
        return None if self._attention is None else self._attention.spec.packed_custom_mask

    @property
    def _mask_indptr_buf(self) -> torch.Tensor | None:
        return self._buffers.get("mask_indptr_buf", self._buffers.get("qk_indptr_buf"))

    def _array(self, buffer: str, name: str) -> torch.Tensor | None:
        """With CUDA graphs the constructor's buffer, else the array that was planned on; on the device."""
        if self._graph is not None:
            return next((self._buffers[key] for key in (buffer, buffer + "fer", name) if key in self._buffers), None)
        array = getattr(planned(self._attention).spec.indices, name, None)
        return None if array is None else array.to(self.device)

    @property
    def _plan_info(self) -> Attention | None:
        """The plan, which an engine may create with _cached_module.plan() and assign."""
        return self._attention

    @_plan_info.setter
    def _plan_info(self, plan: Attention) -> None:
        self._attention = plan

    @property
    def _cached_module(self) -> PrefillModule | None:
        """The object that plans between replays; None before the first plan(), as in FlashInfer."""
        return None if self._attention is None else PrefillModule(self)


class PrefillModule:
    """The part of FlashInfer's prefill module that SGLang calls: plan() from index arrays on the host."""

    def __init__(self, wrapper: EngineAttributes) -> None:
        self._wrapper = wrapper

    def plan(
        self, _float_workspace: torch.Tensor, _int_workspace: torch.Tensor, _pinned_int_workspace: torch.Tensor,
        qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_lens: torch.Tensor, _total_num_rows: int,
        batch_size: int, num_qo_heads: int, num_kv_heads: int, page_size: int, enable_cuda_graph: bool,
        head_dim_qk: int, head_dim_vo: int, causal: bool, window_left: int, fixed_split_size: int = -1,
        disable_split_kv: bool = False, num_colocated_ctas: int = 0, _uniform_q_len: int = 0,
    ) -> Attention:  # fmt: skip
        """A plan for CUDA graphs whose page numbers, and the bits of a mask, lie in the constructor's buffers already.

        The workspaces are the wrapper's; the batch size, the rows and CUDA graphs follow from the arrays and buffers.
        """
        w = self._wrapper
        graph, before = w._graph, planned(w._attention)
        if graph is None or graph.told is None or not enable_cuda_graph or num_colocated_ctas:
            raise UnsupportedError("_cached_module.plan(): only for wrappers with use_cuda_graph=True; call plan().")
        options = graph.told._replace(
            num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, page_size=page_size, head_dim_qk=head_dim_qk,
            head_dim_vo=head_dim_vo, causal=causal, logits=graph.told.logits._replace(window_left=window_left),
            fixed_split_size=split_size(fixed_split_size, disable_split_kv),
        )  # fmt: skip
        last = kv_lens - (kv_indptr.diff() - 1).clamp_(min=0) * page_size
        indices = Indices(batch_size, qo_indptr, 0, kv_indptr, last.to(torch.int32), graph.kv_indices, page_size)
        bits = None
        if before.spec.mask is MaskMode.CUSTOM and graph.mask is not None:
            bits = graph.mask[: int(((qo_indptr.diff() * kv_lens + 7) // 8).sum())]
        spec = AttentionSpec(indices, options, None, bits)
        return Attention(spec, w._layout, w._workspace, w._backend, graph, before)


class MlaModule:
    """The part of FlashInfer's module for multi-head latent attention (MLA) that SGLang calls between replays."""

    def __init__(self, wrapper: EngineAttributes) -> None:
        self._wrapper = wrapper

    def plan(
        self, _float_workspace: torch.Tensor, _int_workspace: torch.Tensor, _pinned_int_workspace: torch.Tensor,
        qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_lens: torch.Tensor, num_heads: int, head_dim_ckv: int,
        causal: bool,
    ) -> None:  # fmt: skip
        """Plans the wrapper, for CUDA graphs, on page numbers that lie in the constructor's buffer already."""
        w = self._wrapper
        graph, before = w._graph, planned(w._attention)
        if graph is None or graph.told is None:
            raise UnsupportedError("_cached_module.plan(): only for wrappers with use_cuda_graph=True; call plan().")
        options = graph.told._replace(num_qo_heads=num_heads, head_dim_vo=head_dim_ckv, causal=causal)
        last = kv_lens - (kv_indptr.diff() - 1).clamp_(min=0) * options.page_size
        pages, batch = graph.kv_indices, graph.batch_size
        indices = Indices(batch, qo_indptr, 0, kv_indptr, last.to(torch.int32), pages, options.page_size)
        w._attention = Attention(AttentionSpec(indices, options), w._layout, w._workspace, w._backend, graph, before)
