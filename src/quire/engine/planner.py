"""Makes a plan from index arrays: schedules on the host and copies once to the device, or schedules on the device."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import get_num_threads

from quire.engine.checks import check_same_device, check_shape, check_tensor
from quire.engine.device import (
    CaptureUploader,
    DeviceBuffer,
    OwnWorkspace,
    Uploader,
    Workspace,
    is_capturing,
    max_ctas,
    on_cuda,
    partials_bytes,
    refuse_capture,
    uploader_of,
)
from quire.engine.launch import LOG2E, AttentionPlan, OwnPartials, base_of, launch
from quire.engine.operands import NO_OPERANDS, check_names, write_operands
from quire.engine.options import LogitsOptions, PlanOptions
from quire.engine.schedule import Indices, Lengths, Schedule, make_schedule, measure_schedule, schedule_input
from quire.engine.spec import GraphState
from quire.errors import PlanError, ValidationError
from quire.jit import CudaModule, HostModule, Module, config, get_module, host_target
from quire.jit.unit import Spec
from quire.kernels import Decision, TileShape
from quire.kernels.attention import MOST_OWN_SPLITS, OWN_SPLITS, with_operands
from quire.kernels.expressions.cxx import mask_heads, operands_struct
from quire.kernels.expressions.variant import Variant
from quire.kernels.features import MaskMode, PosEncodingMode
from quire.kernels.operation import (
    CTAS_PER_ROW_TILE,
    PARALLEL_THREADS,
    ExpressionBlocksParams,
    OperationKey,
    rope_frequencies,
)
from quire.kernels.params import AttentionParams, FastDivisor, RowTile, ScheduleInput, ScheduleOutput, aligned_copy

TILE_ALIGNMENT = 16  #: bytes, of row tiles
_MOST_MASK_BYTES = 1 << 28  #: of block masks for each KV head


def load(spec: Spec, device: torch.device) -> tuple[Module, int]:
    """A kernel, compiled and loaded if necessary, and how many of its CTAs run at the same time."""
    module = get_module(spec)
    ctas = _prepare(module, device) if isinstance(module, CudaModule) else max_ctas(device, 1)
    return module, ctas


def _compile_together(decision: Decision) -> None:
    """Where plan() launches an operation for a kernel: what of the two has to be compiled is compiled at a time."""
    operation = decision.kernel.planning(decision.key)
    if operation is not None:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(get_module, (decision.spec, operation.spec())))


@lru_cache(maxsize=4096)
def _prepare(module: CudaModule, device: torch.device) -> int:
    """Load a kernel on a GPU; PlanError in a capture. Returns how many of its CTAs run at the same time."""
    if not module.is_loaded(device.index or 0) and is_capturing(device):
        raise PlanError(
            f"{module.slug} is not loaded on {device}, and a capture cannot: make this call once before it."
        )
    exports = module.exports
    module.prepare(device.index or 0, exports.get("kSmemBytes", 0))
    return max_ctas(device, exports.get("kMinCtas", 1))


class _PlanTemplate(NamedTuple):
    """The common part of plans with the same options and kernel."""

    params: ctypes.Structure  #: of the kernel, with all that no schedule decides
    schedule: ScheduleInput
    tile: TileShape
    partial_bytes: int  #: of a partial result, tile.rows rows
    ctas: int  #: that run at the same time, or pairs of them
    frequencies: torch.Tensor | None  #: the table of rotary embeddings, to which `params` points
    unit_bytes: int  #: of the kernel's own plan memory, for each work unit of a kv head

    def new_params(self) -> tuple[ctypes.Structure, AttentionParams]:
        """A copy of the parameters for one plan, and in it the part that all kernels have."""
        same = type(self.params)
        params = aligned_copy(self.params) if same is not AttentionParams else same.from_buffer_copy(self.params)
        return params, params if isinstance(params, AttentionParams) else params.base

    def partials_bytes(self, num_partials: int) -> int:
        """Bytes of the workspace that a schedule takes."""
        return num_partials * self.partial_bytes

    def own_partials(self, num_partials: int) -> OwnPartials | None:
        """The memory that each run takes for partial results, in place of a workspace."""
        num_bytes = num_partials * self.partial_bytes
        return OwnPartials(num_bytes, num_bytes - num_partials * self.tile.rows * 8) if num_bytes else None

    def set_partials(self, p: AttentionParams, partials: torch.Tensor, num_partials: int) -> None:
        """Where the partial results are."""
        p.partial_o = at = partials.data_ptr()
        p.partial_md = at + num_partials * (self.partial_bytes - self.tile.rows * 8)


def plan_template(
    decision: Decision, options: PlanOptions, device: torch.device, ctas: int, tile_capacity: int = 0, *,
    divided: bool = True,
) -> _PlanTemplate:  # fmt: skip
    """The template of a decision, made once; equal options and devices have one decision. `ctas`: how many run at the
    same time, and may have partial results. Not `divided`: row tiles are computed whole, without partial results.
    """
    key = ctas, tile_capacity, divided
    template = decision.templates.get(key)
    if template is None:
        template = decision.templates[key] = _new_template(decision, options, device, ctas, tile_capacity, divided)
    return template


def _new_template(
    decision: Decision, options: PlanOptions, device: torch.device, ctas: int, tile_capacity: int, divided: bool
) -> _PlanTemplate:
    kernel, key = decision.kernel, decision.key
    tile = kernel.tile(key)
    params = kernel.params_of(key)()
    base = base_of(params)
    base.num_qo_heads, base.num_kv_heads = options.num_qo_heads, options.num_kv_heads
    base.group, base.page = FastDivisor.of(options.group_size), FastDivisor.of(options.page_size or 1)
    base.window_left, base.logits_cap = options.logits.window_left, options.logits.logits_soft_cap * LOG2E
    if options.is_mla:
        params.cache_page = FastDivisor.of(options.cache_page)
    frequencies = None
    if options.logits.pos_encoding is PosEncodingMode.ROPE_LLAMA:
        frequencies = _rope_frequencies(options.head_dim_qk, options.logits, device)
        base.rope_frequencies = frequencies.data_ptr()
    base.rows_vary = int(decision.problem.fixed_split_size != 0 and not decision.problem.uniform)
    splits = kernel.splits(decision.problem, tile, options.logits.window_left) if divided else {"fixed_split_size": -1}
    schedule = schedule_input(
        num_kv_heads=options.num_kv_heads, group_size=options.group_size, page_size=options.page_size or 1, tile=tile,
        mask=key.mask, window_left=options.logits.window_left, max_ctas=ctas, **splits,
        tile_capacity=tile_capacity, **kernel.schedule_input(key),
    )  # fmt: skip
    partial_bytes = partials_bytes(1, tile.rows, key.head_dim_vo)
    return _PlanTemplate(params, schedule, tile, partial_bytes, ctas, frequencies, kernel.plan_bytes(key))


def _template_for(
    decision: Decision, indices: Indices, options: PlanOptions, device: torch.device, graph: GraphState | None
) -> tuple[Module, _PlanTemplate]:
    """The kernel and the template for plans of this batch; with a graph, for those of the largest batch."""
    if device not in decision.loaded:
        _compile_together(decision)
        decision.loaded[device] = load(decision.spec, device)
    (module, ctas), capacity = decision.loaded[device], 0
    if isinstance(module, HostModule):
        ctas = get_num_threads()  # which a program may change
    if graph is not None:
        tile = decision.kernel.tile(decision.key)
        splits = decision.kernel.splits(decision.problem, tile, options.logits.window_left)
        most = MOST_OWN_SPLITS if options.fixed_split_size == OWN_SPLITS else None
        capacity = graph.tile_capacity(
            indices.batch_size, indices.qo_len, options.group_size, tile.rows, max(0, splits["fixed_split_size"]), most
        )
    ctas = ctas * options.sms // max_ctas(device, 1) if options.sms else ctas
    return module, plan_template(decision, options, device, ctas // decision.ctas_per_tile or 1, capacity)


def workspace_bytes(
    decision: Decision, indices: Indices, options: PlanOptions, device: torch.device, graph: GraphState | None
) -> int:
    """The exact number of bytes that make_plan() with these arguments takes of the workspace."""
    _, template = _template_for(decision, indices, options, device, graph)
    return template.partials_bytes(measure_schedule(indices, template.schedule).num_partials)


def variants_of(decision: Decision, indices: Indices | Lengths, packs_mask: bool) -> list[Spec]:
    """All variants that one call loads: the kernel, and the operations that plan it."""
    target, operation = decision.key.target, decision.kernel.planning(decision.key)
    on_device = isinstance(indices, Lengths)
    planner = ("schedule_lengths", target) if on_device else ("schedule_attention", host_target())
    keys = [OperationKey(*planner), *([OperationKey("packbits", target)] if packs_mask else [])]
    return [decision.spec, *(key.spec() for key in keys), *([] if operation is None else [operation.spec()])]


def make_plan(
    decision: Decision, indices: Indices, options: PlanOptions, workspace: Workspace, mask_bits: torch.Tensor | None,
    graph: GraphState | None, given: Mapping[str, Any] = NO_OPERANDS,
) -> AttentionPlan:  # fmt: skip
    """Compile or load the variant, plan, and send the plan to the device without waiting for it.

    With `graph`, replays of a captured run() use each new plan. `given`: operands that the mask of a variant reads.
    """
    device, kernel = workspace.device, decision.kernel
    module, template = _template_for(decision, indices, options, device, graph)
    operation = _load_operation(decision, device) if template.unit_bytes else None
    for_one_call = isinstance(workspace, OwnWorkspace)
    uploader = None
    if on_cuda(device):
        uploader = uploader_of(device, for_capture=for_one_call and graph is None and is_capturing(device))
    template, schedule, note = _schedule(decision, indices, options, workspace, template, uploader)
    s = schedule.sizes
    params, base = template.new_params()
    stream = 0 if uploader is None else uploader.stream
    bits = _mask_bits(mask_bits, s.mask_bytes, device) if decision.key.mask is MaskMode.CUSTOM else mask_bits
    partials = None
    if not for_one_call:
        num_bytes = s.num_partials * template.partial_bytes
        if num_bytes > workspace.most_bytes and options.fixed_split_size == OWN_SPLITS:
            partials, note = _partials_beside(workspace, num_bytes, graph)
        else:
            partials = workspace.take(num_bytes)
        template.set_partials(base, partials, s.num_partials)
    if graph is not None and bits is not None:
        bits = graph.bits(bits)
    units = template.unit_bytes and _most_units(template, s, graph)
    mask_bytes = template.unit_bytes * units * _num_masks(decision, template, units)
    own_bytes = mask_bytes and mask_bytes + _order_bytes(template, s, device)
    at, sent, pages = _send(schedule, indices, device, uploader, graph, own_bytes, for_one_call)
    if bits is not None:
        base.mask = bits.data_ptr()
    if indices.kv_indices is not None:
        base.kv_indices = at + s.filled_bytes if pages is None else pages.data_ptr()
    _set_schedule(base, s, at)
    tensors: tuple[torch.Tensor | None, ...] = bits, partials, pages, template.frequencies
    variant = decision.key.variant
    if variant is not None and variant.has_mask:
        tensors += _write_mask_operands(params, variant, given, options, indices, device)
    if own_bytes or kernel.fill is not None:
        own = at + (s.staged_bytes if graph is None else s.buffer_bytes) if own_bytes else 0
        if own and uploader is None and graph is None:
            memory = torch.empty(own_bytes, dtype=torch.uint8, device=device)
            own, tensors = memory.data_ptr(), (*tensors, memory)
        todo, ctas = _fill(decision, template, params, s, at, own, units)
        if operation is not None and todo is not None and ctas:
            if _sorts_tiles(decision, s):
                scratch = -(-(own + mask_bytes) // TILE_ALIGNMENT) * TILE_ALIGNMENT
                todo.scratch, todo.arrivals = scratch, at + s.tile_counter_offset
            launch(operation, ctypes.addressof(todo), device, grid=ctas, block=PARALLEL_THREADS)
    if graph is not None:
        base.num_tiles = template.schedule.tile_capacity
        assert partials is not None
        graph.keep(decision, partials, params)
    grid = (min(s.num_ctas, template.ctas) if kernel.persistent else s.num_ctas) * decision.ctas_per_tile
    return AttentionPlan(
        decision, module, params, options.logits, device, grid, tensors, stream=stream,
        uses_pdl=bool(s.is_partitioned), schedule=schedule, sent=sent, pages=pages, note=note,
        schedule_input=template.schedule, own_partials=template.own_partials(s.num_partials) if for_one_call else None,
    )  # fmt: skip


def _schedule(
    decision: Decision, indices: Indices, options: PlanOptions, workspace: Workspace, template: _PlanTemplate,
    uploader: Uploader | CaptureUploader | None,
) -> tuple[_PlanTemplate, Schedule, str]:  # fmt: skip
    """The schedule, and its template; of fewer partitions if the workspace holds no more partial results, which a note
    says.
    """
    schedule = make_schedule(indices, template.schedule, uploader)
    if not config.says_nothing_of_pages() and config.checks_pages() and not is_capturing(workspace.device):
        schedule.sizes.largest_page = _largest_page(indices)
    fits = schedule.sizes.num_partials * template.partial_bytes <= workspace.most_bytes
    if fits or options.fixed_split_size or options.cascade:
        return template, schedule, ""
    return _schedule_within(decision, indices, options, workspace, template, schedule, uploader)


def _largest_page(indices: Indices) -> int:
    """The largest page number, also of those on a device, which it waits for; ValidationError if one is negative."""
    if indices.kv_indices is None:
        return -1
    used = indices.kv_indices[int(indices.kv_indptr[0]) : int(indices.kv_indptr[-1])].cpu()
    if used.numel() and int(used.min()) < 0:
        raise ValidationError(f"paged_kv_indices: expected page numbers from 0 on, got {indices.page_beyond(2**31)}.")
    return int(used.max()) if used.numel() else -1


def _partials_beside(workspace: Workspace, num_bytes: int, graph: GraphState | None) -> tuple[torch.Tensor, str]:
    """Memory of torch's for partial results that splits which do not depend on the batch need, and the workspace does
    not hold; and a note for explain().
    """
    known = None if graph is None else graph.partials
    memory = OwnWorkspace(workspace.device).take(num_bytes) if known is None else known
    return memory, f"workspace: it does not hold {num_bytes} bytes of partial results, which torch has allocated"


def _fill(
    decision: Decision, template: _PlanTemplate, params: Any, s: ScheduleOutput, at: int, own: int, units: int
) -> tuple[Any, int]:
    """Fill what only this kernel has: parameters, and the address `own` of its plan memory. Returns the parameters of
    the operation that writes there, if any, and its number of CTAs.
    """
    todo, ctas, variant = None, 0, decision.key.variant
    if decision.kernel.fill is not None:
        todo, ctas = decision.kernel.fill(params, template.schedule, s, at, own)
    if own and variant is not None and variant.has_mask:
        params.operands.block_mask = own
        if (num_masks := _num_masks(decision, template, units)) > 1:
            params.operands.block_mask_stride = units
        todo = _expression_blocks(params, variant, template, s.num_tiles, num_masks)
        ctas = CTAS_PER_ROW_TILE * s.num_tiles
    return todo, ctas


def _sorts_tiles(decision: Decision, s: ScheduleOutput) -> bool:
    """Whether a GPU puts row tiles in the order of what a mask leaves of them: if no partition refers to them."""
    return decision.problem.on_cuda and not decision.key.cascade and bool(not s.is_partitioned or s.is_dynamic)


def _order_bytes(template: _PlanTemplate, s: ScheduleOutput, device: torch.device) -> int:
    """Memory in which row tiles are put in order: see tile/shared/tile_order.cuh."""
    tiles = template.schedule.tile_capacity or s.num_tiles
    return 0 if device.type == "cpu" else TILE_ALIGNMENT + tiles * (ctypes.sizeof(RowTile) + 4 * CTAS_PER_ROW_TILE)


def _write_mask_operands(
    params: Any, variant: Variant, given: Mapping[str, Any], options: PlanOptions, indices: Indices,
    device: torch.device,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    names = variant.expression.mask_operands
    score_only = {operand.name for operand in variant.expression.operands} - names
    check_names("plan", given, names, score_only, "run")
    return write_operands(params.operands, variant.expression, names, given, device, index_limits(options, indices))


def index_limits(options: PlanOptions, indices: Indices | Lengths) -> dict[str, int]:
    """How many values each index of an expression has in a batch."""
    limits = {"head": options.num_qo_heads, "request": indices.batch_size}
    if isinstance(indices, Lengths) or not indices.batch_size:
        return limits
    return {**limits, "q_idx": int(indices.qo_lens().max()), "kv_idx": int(indices.kv_lens().max())}


def _num_masks(decision: Decision, template: _PlanTemplate, units: int) -> int:
    """Block masks of a plan: one for each KV head if the mask of a variant differs between heads, unless they would
    take too much memory.
    """
    variant, heads = decision.key.variant, template.schedule.num_kv_heads
    differs = units and variant is not None and mask_heads(variant.expression)
    return heads if differs and units * heads <= _MOST_MASK_BYTES else 1


def _expression_blocks(
    params: Any, variant: Variant, template: _PlanTemplate, num_tiles: int, num_masks: int
) -> ctypes.Structure:
    """The parameters of the operation that classifies KV tiles under the mask of a variant."""
    given, base = template.schedule, base_of(params)
    same, heads = mask_heads(variant.expression), base.num_qo_heads // num_masks
    todo = with_operands(ExpressionBlocksParams, operands_struct(variant.expression))(
        tiles=base.tiles, num_tiles=num_tiles, tile_rows=given.tile_rows, tile_kv=given.tile_kv,
        group_size=given.group_size, mask_mode=given.mask_mode, window_left=given.window_left, num_masks=num_masks,
        mask_heads=heads, tested_heads=1 if same % heads == 0 else heads,
    )  # fmt: skip
    todo.operands = params.operands
    return todo


def _schedule_within(
    decision: Decision, indices: Indices, options: PlanOptions, workspace: Workspace, template: _PlanTemplate,
    schedule: Schedule, uploader: Uploader | CaptureUploader | None,
) -> tuple[_PlanTemplate, Schedule, str]:  # fmt: skip
    """A schedule of fewer partitions than `schedule`, whose partial results fit into the workspace; says so."""
    needed, most, capacity = schedule.sizes.num_partials, workspace.most_bytes, template.schedule.tile_capacity
    ctas = min(template.ctas - 1, most // template.partials_bytes(2))
    device = workspace.device
    fewer = plan_template(decision, options, device, ctas, capacity) if ctas else None
    if fewer is not None:
        within = make_schedule(indices, fewer.schedule, uploader)
    if fewer is None or fewer.partials_bytes(within.sizes.num_partials) > most:
        fewer, ctas = plan_template(decision, options, device, template.ctas, capacity, divided=False), 0
        within = make_schedule(indices, fewer.schedule, uploader)
    note = (
        f"workspace: {most} bytes hold the partial results of {ctas} partitions, not of {template.ctas}: reserve "
        f"{template.partials_bytes(needed)} bytes (workspace_size()) to keep all SMs or cores busy"
    )
    return fewer, within, note


def _send(
    schedule: Schedule, indices: Indices, device: torch.device, uploader: Uploader | CaptureUploader | None,
    graph: GraphState | None, own_bytes: int, for_one_call: bool,
) -> tuple[int, DeviceBuffer | None, torch.Tensor | None]:  # fmt: skip
    """The address of the schedule on the device, followed there by page numbers of the host and `own_bytes` of the
    kernel; the objects that keep this memory; and the page numbers, if they are elsewhere.
    """
    s, host_buffer, pages = schedule.sizes, schedule.host_buffer, indices.kv_indices
    if graph is not None:
        if pages is not None:
            pages = graph.pages(schedule.pages if pages.is_cpu else pages, s.nnz_kv)
        at = graph.upload(schedule.buffer, s.buffer_bytes + own_bytes, device).data_ptr()
        if isinstance(uploader, Uploader):
            uploader.release(host_buffer)
        return at, None, pages
    pages = None if pages is None or pages.is_cpu else pages.to(device)
    if uploader is None:
        return host_buffer.address, None, pages
    sent = uploader.send(host_buffer, s.staged_bytes, own_bytes, for_one_call=for_one_call)
    return sent.address, sent, pages


@lru_cache(maxsize=1024)
def _rope_frequencies(head_dim: int, logits: LogitsOptions, device: torch.device) -> torch.Tensor:
    refuse_capture("the first plan() with these rope_scale and rope_theta", device)
    frequencies = rope_frequencies(head_dim, logits.rope_scale, logits.rope_theta)
    return torch.tensor(frequencies, dtype=torch.uint64, device="cpu").to(device)


def _load_operation(decision: Decision, device: torch.device) -> Module | None:
    """The operation that fills the kernel's own plan memory."""
    operation = decision.kernel.planning(decision.key)
    return None if operation is None else load(operation.spec(), device)[0]


def _most_units(template: _PlanTemplate, s: ScheduleOutput, graph: GraphState | None) -> int:
    """Work units of a kv head; with a graph, as many as any batch within the limits has."""
    given = template.schedule
    units: int = s.work_per_head
    return units if graph is None else graph.unit_capacity(template.tile, given.group_size, given.tile_capacity)


def _set_schedule(p: AttentionParams, s: ScheduleOutput, sent: int) -> None:
    """What the schedule decides; `sent` is where its buffer lies on the device."""
    p.tiles, p.mask_indptr, p.groups = sent + s.tiles_offset, sent + s.mask_indptr_offset, sent + s.groups_offset
    p.partitions = sent + s.partitions_offset if s.is_partitioned else None
    p.num_tiles, p.num_ctas = s.num_tiles, s.num_ctas
    p.plan_is_resident = 1


def _mask_bits(bits: torch.Tensor | None, expected: int, device: torch.device) -> torch.Tensor:
    if bits is None:
        raise PlanError("a custom mask was planned without its bits.")
    name = "packed_custom_mask"
    check_tensor(bits, name)
    check_shape(bits, name, {"bytes of the batch's masks": expected})
    check_same_device(bits, name, device)
    if bits.dtype is not torch.uint8:
        raise ValidationError(f"{name}: expected dtype torch.uint8, got {bits.dtype}.")
    return bits.contiguous()
