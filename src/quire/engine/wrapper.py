"""The base class of wrappers with plan() and run(), their keywords for type checkers, and what engines read of them.

vLLM compares the options of plan() with those of each layer. SGLang reads the buffers of wrappers for CUDA graphs,
and plans prefill between replays by a call into FlashInfer's module. mini-SGLang shares one int workspace. The values
are true ones; for example, the int workspace is empty unless the caller gave one, because a plan owns its index
arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from operator import itemgetter
from typing import Any, TypedDict

import torch

from quire.engine.attention import Attention, planned, workspace_bytes_of
from quire.engine.checks import check_flags, last_of_lens
from quire.engine.device import ALIGNMENT, UserWorkspace
from quire.engine.inspection import Explanation
from quire.engine.operators import TracedRun, handle_of, is_tracing
from quire.engine.options import logits_options, split_size
from quire.engine.run import RunOptions
from quire.engine.schedule import Indices
from quire.engine.spec import AttentionSpec, GraphState, graph_state
from quire.engine.tensors import PagedCache
from quire.engine.upcast import check_order, scaled
from quire.errors import PlanError, UnsupportedError
from quire.kernels.expressions.variant import Variant
from quire.kernels.features import KVLayout, MaskMode

Pair = tuple[torch.Tensor, torch.Tensor]  #: (o, lse)


class RunKeywords(TypedDict, total=False):
    """What run() of each planned wrapper takes beside its tensors."""

    q_scale: float | None
    k_scale: float | None
    v_scale: float | None
    out: torch.Tensor | None
    lse: torch.Tensor | None
    enable_pdl: bool | None
    window_left: int | None
    sinks: torch.Tensor | None
    kv_cache_sf: Any


class PrefillKeywords(RunKeywords, total=False):
    """What run() of the prefill wrappers takes."""

    lse_base: str
    lse_layout: str


class DecodeKeywords(RunKeywords, total=False):
    """What run() of the decode wrapper takes."""

    q_len_per_req: int | None


class SparseKeywords(TypedDict, total=False):
    """What run() of the block-sparse wrappers takes."""

    out: torch.Tensor | None
    lse: torch.Tensor | None
    enable_pdl: bool | None


class LatentKeywords(TypedDict, total=False):
    """What run() of the wrapper of latents takes."""

    query: torch.Tensor | None
    kv_cache: torch.Tensor | None
    out: torch.Tensor | None
    lse: torch.Tensor | None
    kv_len: torch.Tensor | None
    page_table: torch.Tensor | None
    return_lse_base_on_e: bool
    o_scale: float | None
    ckv_scale: float | None
    kpe_scale: float | None
    sinks: torch.Tensor | None
    enable_pdl: bool | None


class _SingleKeywords(TypedDict, total=False):
    kv_layout: str
    backend: str
    pos_encoding_mode: str
    sm_scale: float | None
    window_left: int
    logits_soft_cap: float | None
    rope_scale: float | None
    rope_theta: float | None
    k_scale: float | None
    v_scale: float | None
    deterministic: bool | None


class SingleDecodeKeywords(_SingleKeywords, total=False):
    """What single_decode_with_kv_cache() takes beside its tensors."""

    q_scale: float | None
    use_tensor_cores: bool


class SinglePrefillKeywords(_SingleKeywords, total=False):
    """What single_prefill_with_kv_cache() takes beside its tensors."""

    o_dtype: torch.dtype | None
    custom_mask: torch.Tensor | None
    packed_custom_mask: torch.Tensor | None
    causal: bool
    use_fp16_qk_reduction: bool
    allow_fp16_qk_reduction: bool


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

    # By the names that engines use
    _float_workspace_buffer = property(lambda self: self._workspace.buffer)
    _pin_memory_int_workspace_buffer = property(lambda _: torch.empty(0, dtype=torch.uint8, device="cpu"))
    _kv_layout = property(lambda self: self._layout.value)
    _use_cuda_graph = property(lambda self: self._graph is not None)
    _sm_scale = property(lambda self: planned(self._attention).spec.options.logits.sm_scale)
    _window_left = property(lambda self: planned(self._attention).spec.options.logits.window_left)
    _logits_soft_cap = property(lambda self: planned(self._attention).spec.options.logits.logits_soft_cap)
    _causal = property(lambda self: planned(self._attention).spec.options.causal)
    _qo_indptr_buf = property(lambda self: self._array("qo_indptr_buf", "qo_indptr"))
    _kv_indptr_buf = property(lambda self: self._array("kv_indptr_buf", "kv_indptr"))
    _paged_kv_indptr_buf = property(lambda self: self._array("paged_kv_indptr_buf", "kv_indptr"))
    _paged_kv_last_page_len_buf = property(lambda self: self._array("paged_kv_last_page_len_buf", "kv_last_page_len"))
    _paged_kv_indices_buf = property(lambda self: self._array("paged_kv_indices_buf", "kv_indices"))
    _mask_indptr_buf = property(lambda self: self._buffers.get("mask_indptr_buf", self._buffers.get("qk_indptr_buf")))

    @property
    def _max_total_num_rows(self) -> int | None:
        return self._graph.max_rows if self._graph is not None and self._graph.is_planned else None

    @property
    def _custom_mask_buf(self) -> torch.Tensor | None:
        if self._graph is not None:
            return self._graph.mask
        return None if self._attention is None else self._attention.spec.packed_custom_mask

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
        if graph is None or graph.requested is None or not enable_cuda_graph or num_colocated_ctas:
            raise UnsupportedError("_cached_module.plan(): only for wrappers with use_cuda_graph=True; call plan().")
        options = graph.requested._replace(
            num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, page_size=page_size, head_dim_qk=head_dim_qk,
            head_dim_vo=head_dim_vo, causal=causal, logits=graph.requested.logits._replace(window_left=window_left),
            fixed_split_size=split_size(fixed_split_size, disable_split_kv),
        )  # fmt: skip
        last = last_of_lens(kv_lens, kv_indptr, page_size)
        indices = Indices(batch_size, qo_indptr, 0, kv_indptr, last, graph.kv_indices, page_size)
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
        if graph is None or graph.requested is None:
            raise UnsupportedError("_cached_module.plan(): only for wrappers with use_cuda_graph=True; call plan().")
        options = graph.requested._replace(num_qo_heads=num_heads, head_dim_vo=head_dim_ckv, causal=causal)
        last = last_of_lens(kv_lens, kv_indptr, options.page_size)
        indices = Indices(graph.batch_size, qo_indptr, 0, kv_indptr, last, graph.kv_indices, options.page_size)
        w._attention = Attention(AttentionSpec(indices, options), w._layout, w._workspace, w._backend, graph, before)


class AttentionWrapper(EngineAttributes):
    """plan() sets the current Attention, and run() uses it. Subclasses only translate arguments of FlashInfer's API.

    float_workspace_buffer: contiguous, 16-byte aligned, of any dtype. Its device is the device of all calls. It holds
        partial results; 128 MiB is plenty, and workspace_size() computes the exact size. Wrappers may share a workspace
        if their runs are on one stream: see engine/device.py. Runs of one wrapper must not overlap.
    kv_layout: the order of dimensions in a page, or of ragged keys and values: "NHD" [tokens, heads, head_dim] or
        "HND".
    backend: "auto", one of FlashInfer's names ("fa2", "cutlass", ...), which mean "auto", or one of `quire.backends()`,
        which forces a kernel: "quire:fa2".
    variant: a custom quire.Variant; jit_args and jit_kwargs accept it, too. plan() then takes the tensors and numbers
        that its mask reads, by name, and run() those that only its score reads.
    deterministic: with True the bits of a request's result depend on that request alone, with False they may depend on
        the rest of the batch. None: as QUIRE_DETERMINISTIC says or, if it is unset, the switches of vLLM and SGLang.
        See docs/concepts/invariance.md.
    """

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str, use_cuda_graph: bool, backend: str,
        variant: Variant | None = None, deterministic: bool | None = None, **buffers: torch.Tensor | None,
    ) -> None:  # fmt: skip
        check_flags(deterministic=deterministic)
        self._deterministic = deterministic
        self._layout = KVLayout.of(kv_layout)
        self._backend, self._variant = backend, variant
        self._buffers = buffers
        self._handle = handle_of(self)  # by which an operator finds this wrapper
        self._attention: Attention | None = None
        self._graph: GraphState | None = None
        self._specs: list[AttentionSpec] | None = None  # of spec_of(), which only looks at what plan() would do
        self.reset_workspace_buffer(float_workspace_buffer)
        check_flags(use_cuda_graph=use_cuda_graph)
        self._graph = graph_state(use_cuda_graph, self._workspace.device, **buffers)

    def __repr__(self) -> str:
        plan = "not planned" if self._attention is None else f"planned: {self._attention.decision.key.slug}"
        return f"<{type(self).__name__} on {self._workspace.device}, {self._layout.value}, {plan}>"

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether run() may be captured, and plan() called again between replays."""
        return self._graph is not None

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor | None = None
    ) -> None:
        """Use another buffer from the next plan() on. No int workspace is needed, because a plan owns its index arrays.

        Raises PlanError with CUDA graphs after the first plan(), because a captured graph keeps using its buffer.
        """
        if self._graph is not None and self._graph.is_planned:
            raise PlanError("reset_workspace_buffer(): the first plan() of a wrapper for CUDA graphs fixes the buffer.")
        self._workspace = UserWorkspace(float_workspace_buffer, "float_workspace_buffer")
        none = torch.empty(0, dtype=torch.uint8, device=self._workspace.device)
        self._int_workspace_buffer = none if int_workspace_buffer is None else int_workspace_buffer
        UserWorkspace(self._int_workspace_buffer, "int_workspace_buffer")  # checked as FlashInfer checks it

    def explain(self) -> Explanation:
        """Which kernel plan() chose, why the others were not chosen, and how the work was divided: a string, which
        notebooks show as HTML and the Python prompt as a table.
        """
        return planned(self._attention).explain()

    def end_forward(self) -> None:
        """Does nothing: a plan is released with its wrapper or by the next plan()."""

    def workspace_size(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """The sizes in bytes of the float and the int workspace that plan() can use for the same arguments.

        With a smaller float workspace plan() divides the keys among fewer CTAs; with deterministic=True it refuses the
        batch. The int workspace has the minimum size of a buffer, because a plan owns its index arrays. Nothing is
        planned; the kernel is compiled if necessary.
        """
        num_bytes = workspace_bytes_of(
            self.spec_of(*args, **kwargs), self._workspace.device, self._backend, self._graph
        )
        return max(ALIGNMENT, num_bytes), ALIGNMENT

    def spec_of(self, *args: Any, **kwargs: Any) -> AttentionSpec:
        """The AttentionSpec that plan() would plan with these arguments."""
        twin = copy(self)
        twin._specs = []
        twin.plan(*args, **kwargs)
        return twin._specs[0]

    def plan(self, *args: Any, **kwargs: Any) -> None:
        """Plan a batch; each wrapper takes its own arguments."""
        raise NotImplementedError

    def run(self, *args: Any, **options: Any) -> Any:
        """Run the plan; each wrapper takes its own tensors."""
        raise NotImplementedError

    def run_return_lse(self, *args: Any, **options: Any) -> Pair:
        """run() with return_lse=True."""
        o, lse = self.run(*args, **options, return_lse=True)
        return o, lse

    def _runner(self) -> Attention | TracedRun:
        """What run() calls: the plan or, while torch traces, an operator."""
        return TracedRun(self) if is_tracing() else self._attention or planned(None)

    def _scaled(self, kv: Any, kv_cache_sf: Any, options: RunOptions) -> tuple[PagedCache, RunOptions]:
        """A cache of 4 bits and the options of run(), with its scales."""
        check_order(self._backend)
        kv, scales = scaled(kv, kv_cache_sf, planned(self._attention).spec.options.page_size)
        return kv, options._replace(others=scales)

    def set_plan(self, spec: AttentionSpec) -> None:
        """Plan what plan() was asked for; for spec_of(), only note it."""
        if self._variant is not None:
            spec = spec._replace(options=spec.options._replace(variant=self._variant))
        if self._deterministic is not None:
            spec = spec._replace(options=spec.options._replace(deterministic=self._deterministic))
        if self._specs is not None:
            self._specs.append(spec)
            return
        self._attention = Attention(spec, self._layout, self._workspace, self._backend, self._graph, self._attention)

    def _rescale(self, sm_scale: float) -> None:
        """Another scale of logits, which holds from then on."""
        attention = planned(self._attention)
        present = attention.spec.options
        cap = present.logits.logits_soft_cap
        scale = logits_options(present.head_dim_qk, sm_scale, present.logits.window_left, cap, "NONE").sm_scale
        logits = present.logits._replace(sm_scale=scale)
        self._attention = attention.replan(self._workspace, self._backend, logits=logits)

    def _replan(self, arguments: Mapping[str, Any]) -> None:
        """forward() has arguments of plan(), here by name: plan again where they differ from what was planned."""
        flags = ("causal", "use_fp16_qk_reduction", "allow_fp16_qk_reduction")
        check_flags(**{name: arguments[name] for name in flags if name in arguments})
        attention = planned(self._attention)
        has_bits = attention.spec.mask is MaskMode.CUSTOM  # which replace `causal`
        changes = {"causal": arguments["causal"]} if "causal" in arguments and not has_bits else {}
        head_dim, planned_logits = attention.spec.options.head_dim_qk, attention.spec.options.logits
        logits = logits_options(head_dim, *_logits_arguments(arguments), planned_logits.attention_chunk_size)
        self._attention = attention.replan(self._workspace, self._backend, logits=logits, **changes)
        self._graph = self._attention.graph


class ForwardWrapper(AttentionWrapper):
    """A wrapper whose forward() is run() that also takes arguments of plan(), as in older versions of FlashInfer."""

    def forward(self, *args: Any, **options: Any) -> Any:
        """run() that also takes arguments of plan(), and plans again if they differ from those of the plan."""
        raise NotImplementedError

    def forward_return_lse(self, *args: Any, **options: Any) -> Pair:
        """forward() with return_lse=True."""
        o, lse = self.forward(*args, **options, return_lse=True)
        return o, lse


_logits_arguments = itemgetter(
    "sm_scale", "window_left", "logits_soft_cap", "pos_encoding_mode", "rope_scale", "rope_theta"
)
