"""The base class of wrappers with plan() and run(): a workspace, a current plan, and attributes for engines."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from operator import itemgetter
from typing import Any

import torch

from quire.errors import PlanError
from quire.kernels.variant import Variant
from quire.runtime.attention import Attention, AttentionSpec, planned, workspace_bytes_of
from quire.runtime.checks import check_flags, check_same_device, check_tensor
from quire.runtime.engine_attributes import EngineAttributes
from quire.runtime.explanation import Explanation
from quire.runtime.graph import GraphState, graph_state
from quire.runtime.ops import TracedRun, handle_of, is_tracing
from quire.runtime.options import logits_options
from quire.runtime.workspace import ALIGNMENT, UserWorkspace
from quire.types import KVLayout, MaskMode


class AttentionWrapper(EngineAttributes):
    """plan() sets the current Attention, and run() uses it. Subclasses only translate arguments of FlashInfer's API.

    float_workspace_buffer: contiguous, 16-byte aligned, of any dtype. Its device is the device of all calls. It holds
        partial results; 128 MiB is plenty, and workspace_size() computes the exact size. Wrappers may share a workspace
        if their runs are on one stream: see runtime/workspace.py. Runs of one wrapper must not overlap.
    kv_layout: the order of dimensions in a page, or of ragged keys and values: "NHD" [tokens, heads, head_dim] or
        "HND".
    backend: "auto", one of FlashInfer's names ("fa2", "cutlass", ...), which mean "auto", or one of `quire.backends()`,
        which forces a kernel: "quire:fa2".
    variant: a custom quire.Variant; jit_args and jit_kwargs accept it, too. plan() then takes the tensors and numbers
        that its mask reads, by name, and run() those that only its score reads.
    """

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str, use_cuda_graph: bool, backend: str,
        variant: Variant | None = None, **buffers: torch.Tensor | None,
    ) -> None:  # fmt: skip
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

        With a smaller float workspace plan() divides the keys among fewer CTAs. The int workspace has the minimum size
        of a buffer, because a plan owns its index arrays. Nothing is planned; the kernel is compiled if necessary.
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

    def _runner(self) -> Attention | TracedRun:
        """What run() calls: the plan or, while torch traces, an operator."""
        return TracedRun(self) if is_tracing() else self._attention or planned(None)

    def _set_plan(self, spec: AttentionSpec) -> None:
        if self._variant is not None:
            spec = spec._replace(options=spec.options._replace(variant=self._variant))
        if self._specs is not None:
            self._specs.append(spec)
            return
        self.set_plan(spec)

    def set_plan(self, spec: AttentionSpec) -> None:
        """Plan the AttentionSpec that spec_of() returned."""
        self._attention = Attention(spec, self._layout, self._workspace, self._backend, self._graph, self._attention)

    def _sinks_and_scale(self, sinks: torch.Tensor | None, sm_scale: float | None = None) -> torch.Tensor | None:
        """The sinks of a run() that takes them and the scale of logits by position, which then holds."""
        if sm_scale is not None:
            attention = planned(self._attention)
            present = attention.spec.options
            cap = present.logits.logits_soft_cap
            scale = logits_options(present.head_dim_qk, sm_scale, present.logits.window_left, cap, "NONE").sm_scale
            logits = present.logits._replace(sm_scale=scale)
            self._attention = attention.replan(self._workspace, self._backend, logits=logits)
        if sinks is not None:
            check_same_device(check_tensor(sinks, "sink"), "sink", self.device)
        return sinks

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


_logits_arguments = itemgetter(
    "sm_scale", "window_left", "logits_soft_cap", "pos_encoding_mode", "rope_scale", "rope_theta"
)
