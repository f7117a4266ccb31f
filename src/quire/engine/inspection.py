"""What a plan will do and has done: its work tiles, their time stamps, the text of explain(), the record of its batch.

This is WorkCursor of core/schedule.h in Python, for pictures only.
"""

from __future__ import annotations

import ctypes
import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from io import StringIO
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from quire.engine.checks import last_entry
from quire.engine.device import is_capturing
from quire.engine.schedule import Indices, Lengths, Schedule, make_schedule
from quire.engine.spec import AttentionSpec
from quire.errors import PlanError
from quire.jit import record_batch
from quire.kernels import Decision
from quire.kernels.attention import OWN_SPLITS
from quire.kernels.features import KVLayout, MaskMode
from quire.kernels.params import Partition, RowTile, ScheduleInput, ScheduleOutput

if TYPE_CHECKING:
    from rich.console import Group

_Struct = TypeVar("_Struct", bound=ctypes.Structure)

START_COST_UNIT = 16  #: start costs are in sixteenths of a KV tile


class Work(NamedTuple):
    """A work tile: a run of KV tiles of one row tile and KV head, which one CTA computes at a time."""

    request: int  #: negative: keys that several requests share, -1 for the first such node of a cascade
    kv_head: int
    rows: tuple[int, int]  #: packed rows of the request or node: query token * group_size + query head in the group
    keys: tuple[int, int]  #: tokens of the request or node
    units: int  #: KV tiles, at least 1
    group: int  #: merge group, in a cascade the row tile and KV head; -1: it computes its rows alone


class Placed(NamedTuple):
    """A work tile on a line of the picture, with its begin and end in KV tiles."""

    work: Work
    line: int  #: the CTA, or the host's thread
    begin: float
    end: float


def place_work(indices: Indices, template: ScheduleInput) -> list[Placed]:
    """The work tiles of a batch, with place and time if every KV tile takes equally long.

    Each partition is computed by one CTA. Whole row tiles are assigned in order to the CTA that is free first.
    """
    schedule, template = make_schedule(indices, template), ScheduleInput.from_buffer_copy(template)
    template.num_shared_nodes = indices.num_shared_nodes
    start, lines = template.start_cost / START_COST_UNIT, max(1, template.max_ctas)
    tiles, count = _tiles(schedule, template), _num_partitions(schedule)
    placed: list[Placed] = []
    for line in range(count):
        at = 0.0
        for work in _of_line(line, schedule, tiles, template):
            placed.append(Placed(work, line, at, at + start + work.units))
            at = placed[-1].end
    free = [(0.0, line) for line in range(lines)]
    for work in () if count else _whole(tiles, template):
        at, line = heapq.heappop(free)
        placed.append(Placed(work, line, at, at + start + work.units))
        heapq.heappush(free, (placed[-1].end, line))
    return placed


def _num_partitions(schedule: Schedule) -> int:
    """The partitions with work; none if CTAs take whole row tiles."""
    sizes = schedule.sizes
    return sizes.num_ctas if sizes.is_partitioned and not sizes.is_dynamic else 0


def _array(cls: type[_Struct], schedule: Schedule, offset: int, count: int) -> list[_Struct]:
    address, size = schedule.host_buffer.address + offset, ctypes.sizeof(cls)
    return [cls.from_buffer_copy(ctypes.string_at(address + i * size, size)) for i in range(count)]


def _tiles(schedule: Schedule, template: ScheduleInput) -> list[RowTile]:
    """Row tiles; in a cascade the nodes of shared levels get numbers, and requests the caller's."""
    tiles = _array(RowTile, schedule, schedule.sizes.tiles_offset, schedule.sizes.num_tiles)
    node = 0
    for tile in tiles if template.num_shared_nodes else ():
        node -= tile.request < 0 and tile.row_begin == 0
        tile.request = node if tile.request < 0 else tile.request - template.num_shared_nodes
    return tiles


def _units(tile: RowTile) -> int:
    return int(max(1, tile.kv_end - tile.kv_begin))


def _work(tile: RowTile, kv_head: int, offset: int, units: int, group: int, template: ScheduleInput) -> Work:
    first = tile.kv_begin + offset
    keys = (first * template.tile_kv, min(min(first + units, tile.kv_end) * template.tile_kv, tile.kv_len))
    end = tile.partial if template.num_shared_nodes else tile.qo_len * template.group_size
    rows = tile.row_begin, min(tile.row_begin + template.tile_rows, end)
    return Work(tile.request, kv_head, rows, (keys[0], max(keys)), units, group)


def _group(tile: RowTile, kv_head: int) -> int:
    """The merge group of a fixed split; -1 of a whole row tile."""
    return tile.group + kv_head if tile.partial >= 0 else -1


def _whole(tiles: Iterable[RowTile], template: ScheduleInput) -> Iterator[Work]:
    for tile in tiles:
        for head in range(template.num_kv_heads):
            yield _work(tile, head, 0, _units(tile), _group(tile, head), template)


def _of_line(line: int, schedule: Schedule, tiles: list[RowTile], template: ScheduleInput) -> Iterator[Work]:
    """The work of a CTA: a partition, and in a cascade those that follow it."""
    size, is_cascade = ctypes.sizeof(Partition), template.num_shared_nodes > 0
    (partition,) = _array(Partition, schedule, schedule.sizes.partitions_offset + line * size, 1)
    yield from _of_partition(partition, tiles, template, is_cascade)
    if is_cascade and (following := partition.heads_per_l2_group):  # which a cascade calls next
        yield from _of_line(following, schedule, tiles, template)


def _of_partition(
    partition: Partition, tiles: list[RowTile], template: ScheduleInput, is_cascade: bool
) -> Iterator[Work]:
    head, index, offset, left = partition.kv_head, partition.tile, partition.offset, partition.units
    while left > 0:
        size = _units(tiles[index])
        units = min(left, size - offset)
        if is_cascade:
            group = -1 if units == size else index * template.num_kv_heads + head
        else:
            group = _group(tiles[index], head) if units == size else partition.group + (offset == 0)
        yield _work(tiles[index], head, offset, units, group, template)
        left, offset, index = left - units, 0, index + 1
        if index == partition.num_tiles:
            index, head = partition.group if is_cascade else 0, head + 1  # a cascade calls it first_tile


_COLUMNS = 8  #: numbers of a Stamp
_END = 1  #: Moment::kEnd


class _Span(NamedTuple):
    """A work tile as it was computed, in nanoseconds."""

    begin: int
    end: int
    place: int  #: SM, or the host's thread
    work: Work


class Timeline:
    """Memory for the records of one run of a plan. `operands`: the parameters of the plan that get its address."""

    def __init__(self, work: Sequence[Placed], operands: Any, device: torch.device) -> None:
        self._work: dict[tuple[int, ...], Work] = {(w.request, w.kv_head, w.rows[0], w.keys[0]): w for w, *_ in work}
        self._rows = torch.zeros(1 + 2 * len(work), _COLUMNS, dtype=torch.int64, device=device)
        operands.rows, operands.capacity = self._rows.data_ptr(), 2 * len(work)

    def clear(self) -> None:
        """Clear the records of earlier runs."""
        self._rows[0] = 0

    def read(self) -> tuple[list[Placed], list[int]]:
        """The work tiles of the last run, in microseconds since the first one began; and the SM or thread of each line.

        An SM that computes several work tiles at a time has several lines.
        """
        (count, *_), *rows = self._rows.tolist()
        if count != len(rows):
            raise PlanError(f"timeline: expected {len(rows)} notes of one run, got {count}.")
        return _lines(self._spans(rows))

    def _spans(self, rows: Sequence[list[int]]) -> list[_Span]:
        """Each work tile once, without overlaps within a CTA, which may begin one before it has stored another. A
        thread that computes several KV heads together divides its time evenly among them.
        """
        begins = {tuple(which): time for time, moment, _, _, *which in rows if moment != _END}
        ends = sorted(row for row in rows if row[1] == _END)
        left = Counter((time, cta) for time, _, cta, *_ in ends)
        spans, last = [], dict[int, int]()
        for time, _, cta, place, *which in ends:
            begin = max(begins[tuple(which)], last.get(cta, 0))
            last[cta] = begin + (time - begin) // left[time, cta]
            left[time, cta] -= 1
            spans.append(_Span(begin, last[cta], place, self._work[tuple(which)]))
        return spans


def _lines(spans: Sequence[_Span]) -> tuple[list[Placed], list[int]]:
    first = min((span.begin for span in spans), default=0)
    placed: list[Placed] = []
    names: list[int] = []
    for place, line_spans in _side_by_side(spans):
        placed += [Placed(s.work, len(names), (s.begin - first) / 1e3, (s.end - first) / 1e3) for s in line_spans]
        names.append(place)
    return placed, names


def _side_by_side(spans: Sequence[_Span]) -> Iterator[tuple[int, list[_Span]]]:
    """The spans of each SM, divided into lines on which none overlap."""
    by_place = defaultdict[int, list[_Span]](list)
    for span in sorted(spans):
        by_place[span.place].append(span)
    for place, own in sorted(by_place.items()):
        lines: list[list[_Span]] = []
        for span in own:
            free = next((line for line in lines if line[-1].end <= span.begin), None)
            if free is None:
                lines.append([span])
            else:
                free.append(span)
        yield from ((place, line) for line in lines)


_STYLE = (
    "border-collapse:collapse;overflow-wrap:normal;margin:0.5em 0;font:13px/1.5 ui-monospace,monospace;text-align:left"
)
_CELL = "padding:2px 14px 2px 0;text-align:left;vertical-align:top;white-space:pre-wrap"


class Explanation(str):
    """Which kernel plan() chose, why the others were not chosen, how the work was divided, and notes.

    It is a string of several lines. The Python prompt shows it as a table, a notebook as HTML, and rich.print() in
    colours.
    """

    problem: str  #: what was asked for
    verdicts: tuple[tuple[str, str], ...]  #: kernels of the device, and what each said
    chosen: str  #: the variant
    figures: dict[str, str]  #: of the schedule
    note: str

    @classmethod
    def of(cls, decision: Decision, figures: dict[str, str], note: str) -> Explanation:
        """For a plan of the kernel that `decision` names."""
        lines = [f"  {name:<16} {value}" for name, value in figures.items()]
        made = cls("\n".join(filter(None, (str(decision), *lines, note))))
        made.problem, made.chosen, made.figures, made.note = str(decision.problem), decision.key.slug, figures, note
        verdicts = ((v.kernel.name, v.reason or v.yields or "accepts") for v in decision.trace)
        made.verdicts = tuple((name, "chosen" if name == decision.kernel.name else said) for name, said in verdicts)
        return made

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.table import Table

        kernels = Table("kernel", "what it says to this problem")
        for name, said in self.verdicts:
            kernels.add_row(name, said, style="bold green" if said == "chosen" else "dim")
        plan = Table("plan", "", show_header=False)
        for name, value in (("variant", self.chosen), *self.figures.items(), *self._notes()):
            plan.add_row(name, value)
        return Group(kernels, plan)

    def __repr__(self) -> str:
        from rich.console import Console

        console = Console(file=StringIO(), width=Console().width, no_color=True)
        with console.capture() as capture:
            console.print(self)
        return "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines())

    def _repr_html_(self) -> str:
        rows = [("problem", self.problem), ("variant", self.chosen), *self.verdicts, *self.figures.items()]
        return f'<table style="{_STYLE}">{"".join(_row(*row) for row in (*rows, *self._notes()))}</table>'

    def _notes(self) -> list[tuple[str, str]]:
        return [("note", self.note)] if self.note else []


def _row(name: str, value: str) -> str:
    weight = ";font-weight:bold" if value == "chosen" else ""
    head = f'<th style="{_CELL};white-space:nowrap">{escape(name)}</th>'
    return f'<tr>{head}<td style="{_CELL}{weight}">{escape(value)}</td></tr>'


def figures_of(sizes: ScheduleOutput | None, decision: Decision, batch_size: int, partial_bytes: int) -> dict[str, str]:
    """A description of the schedule; `partial_bytes`: the size of one partial result."""
    tile = decision.kernel.tile(decision.key)
    if sizes is None:
        return {"batch": f"{batch_size} requests", "schedule": "made on the GPU, at each call"}
    figures = {
        "batch": f"{batch_size} requests, {sizes.nnz_qo} query tokens, {sizes.kv_tokens} keys",
        "row tiles": f"{sizes.num_tiles} of up to {tile.rows} rows; a KV tile has {tile.kv} keys",
        "schedule": _mode(sizes, decision.problem.fixed_split_size),
    }
    if sizes.num_partials:
        size = f"{sizes.num_partials * partial_bytes / 1e6:.1f} MB"
        figures["partial results"] = f"up to {sizes.num_partials}, {size}, in up to {sizes.num_groups} merge groups"
    return figures


def _mode(sizes: ScheduleOutput, fixed_split_size: int) -> str:
    if fixed_split_size > 0:
        return f"row tiles divided at multiples of {fixed_split_size} keys"
    if fixed_split_size == OWN_SPLITS and sizes.num_partials:
        return "row tiles divided at multiples of as many keys as the kernel, or the length of the request, says"
    if sizes.is_dynamic:
        return f"{sizes.num_ctas} CTAs take whole row tiles, the longest first"
    if sizes.is_partitioned:
        return f"{sizes.num_ctas} partitions of equal cost (stream-K)"
    return f"{sizes.num_ctas} whole row tiles of a KV head, the longest first"


# --- batches for `quire bench` ---------------------------------------------------------------------------------------


def record(spec: AttentionSpec, decision: Decision, layout: KVLayout, device: torch.device) -> None:
    """Append a batch to the record, if it is the first of its size for the variant (see `quire bench`)."""
    indices = spec.indices
    if isinstance(indices, Lengths) and is_capturing(device):
        return
    tokens = 0 if isinstance(indices, Lengths) else last_entry(indices.kv_indptr) * max(1, indices.page_size)
    size = ".".join(str(number.bit_length()) for number in (indices.batch_size, spec.nnz_qo, tokens))
    record_batch(decision.spec, size, lambda: _described(spec, layout))


def _described(spec: AttentionSpec, layout: KVLayout) -> dict[str, Any]:
    """The batch as `quire bench` reads it: plain numbers and words, lengths in groups of equal ones."""
    options, logits = spec.options, spec.options.logits
    types = {"q": options.types.given or options.types.q, "kv": options.types.kv, "o": options.types.o}
    return {
        "requests": None if _is_particular(spec) else _grouped(spec.indices),
        "uniform": spec.indices.qo_indptr is None, "mask": spec.mask.name.lower(), "layout": layout.name,
        "num_qo_heads": options.num_qo_heads, "num_kv_heads": options.num_kv_heads,
        "head_dim_qk": options.head_dim_qk, "head_dim_vo": options.head_dim_vo, "page_size": options.page_size,
        "is_mla": options.is_mla, **{f"{name}_data_type": kind.torch_name for name, kind in types.items()},
        "sm_scale": logits.sm_scale, "window_left": logits.window_left, "logits_soft_cap": logits.logits_soft_cap,
        "pos_encoding_mode": logits.pos_encoding.name, "fixed_split_size": options.fixed_split_size,
    }  # fmt: skip


def _is_particular(spec: AttentionSpec) -> bool:
    """Whether a batch with random tensors and these lengths would be another problem: one with a mask made of bits,
    a variant, a tree of shared keys, or scales within a row.
    """
    options, plain = spec.options, (MaskMode.NONE, MaskMode.CAUSAL)
    return options.variant is not None or options.cascade or options.tile_scales or spec.mask not in plain


_MOST_GROUPS = 64  #: of lengths in a recorded batch


def _grouped(indices: Indices | Lengths) -> list[list[int]]:
    """[requests, qo_len, kv_len] of each group of requests with equal lengths, the longest first.

    Of more than 64 groups every n-th stands for its neighbours.
    """
    qo_lens, kv_lens = _lens(indices)
    pairs = sorted(zip(kv_lens.tolist(), qo_lens.tolist(), strict=True), reverse=True)
    groups = [[len(list(equal)), qo_len, kv_len] for (kv_len, qo_len), equal in groupby(pairs)]
    step = max(1, -(-len(groups) // _MOST_GROUPS))
    parts = [groups[i : i + step] for i in range(0, len(groups), step)]
    return [[sum(count for count, _, _ in part), *part[len(part) // 2][1:]] for part in parts]


def _lens(indices: Indices | Lengths) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and tokens of each request. Where only a device knows them, reading them waits for it."""
    if isinstance(indices, Indices):
        return indices.qo_lens(), indices.kv_lens()
    same = torch.full((indices.batch_size,), indices.qo_len, device="cpu")
    qo_lens = same if indices.qo_indptr is None else indices.qo_indptr.diff()
    if indices.kv_lens is not None:
        return qo_lens, indices.kv_lens
    longest = torch.full_like(same, indices.max_kv_len)
    return qo_lens, longest if indices.kv_indptr is None else indices.kv_indptr.diff()
