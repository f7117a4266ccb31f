"""Pictures of a plan: which CTA, or which thread of a CPU, computes what, and when.

    quire.viz.schedule(wrapper)             # in a notebook; .save("schedule.svg") or .save("schedule.html") elsewhere
    quire.viz.timeline(wrapper, q, cache)   # the same, measured
    python -m quire.viz --out schedule.html --kv-lens 8000,300,300 --heads 32/8

Times of a schedule are the scheduler's estimate, in KV tiles. Times of a timeline were measured while the batch was
computed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from copy import copy
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import torch

from quire.attention import BatchAttention
from quire.attention.cascade import MultiLevelCascadeAttentionWrapper
from quire.attention.decode import BatchDecodeWithPagedKVCacheWrapper
from quire.attention.prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper
from quire.engine.attention import planned
from quire.engine.inspection import Explanation, Placed, Work
from quire.engine.wrapper import AttentionWrapper
from quire.errors import QuireError, ValidationError

__all__ = ["Picture", "schedule", "timeline"]

_WIDTH, _LEFT, _TOP, _BOTTOM = 960, 76, 10, 40
_MOST_JOINED = 64  #: merge groups, or lines, that a reader can follow
_MOST_TILES = 20000  #: work tiles that a browser draws smoothly


class Picture:
    """A picture of a plan. Notebooks show it; `svg` and `html` are text, and save() writes one of them.

    work: a Placed for each work tile: its request, KV head, rows, keys and merge group; its line (CTA, SM or thread),
        and its begin and end, in KV tiles for a schedule and in microseconds for a timeline.
    """

    def __init__(
        self, explanation: Explanation, work: Sequence[Placed], unit: str, time: str = "KV tiles",
        names: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.explanation, self.work = explanation, work
        self._unit, self._time = unit, time
        self._lines = 1 + max((placed.line for placed in self.work), default=0)
        self._names = range(self._lines) if names is None else names
        self._end = max((placed.end for placed in self.work), default=1.0)

    @property
    def balance(self) -> float:
        """Mean length of the lines divided by the longest: 1 if all end together."""
        return sum(placed.end - placed.begin for placed in self.work) / (self._lines * self._end)

    @property
    def svg(self) -> str:
        """The picture as SVG, in the colour of the surrounding text."""
        height = min(34.0, max(3.0, 560 / self._lines))
        bottom = _TOP + height * self._lines
        body = (*self._axes(height, bottom), *self._tiles(height), *self._merges(height))
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + _BOTTOM:.0f}" '
            f'font-family="system-ui, sans-serif" font-size="11" fill="currentColor" role="img">'
            f"<title>{escape(self._summary())}</title>{_HATCH}{''.join(body)}</svg>"
        )

    @property
    def html(self) -> str:
        """A standalone page: the picture, the result of explain(), and the merge groups."""
        return self.page()

    def page(self, *others: Picture) -> str:
        """A standalone page with further pictures below this one, such as the timeline."""
        pictures = "".join(f"<h2>{picture._title()}</h2>{picture._repr_html_()}" for picture in (self, *others))
        body = f"<h1>A plan</h1>{pictures}<h2>Which kernel, and why</h2>{self.explanation._repr_html_()}"
        return _PAGE.format(body=body + self._groups())

    def save(self, path: str | Path) -> None:
        """Write the page, or only the picture if `path` ends in .svg."""
        path = Path(path)
        path.write_text(self.svg if path.suffix == ".svg" else self.html, encoding="utf-8")

    def _title(self) -> str:
        return "Schedule" if self._time == "KV tiles" else f"Timeline: {self._end:,.1f} µs, measured"

    def _repr_html_(self) -> str:
        picture = f'<div style="overflow-x:auto"><div style="min-width:640px">{self.svg}</div></div>'
        return f'<p style="max-width:60em">{escape(self._summary())}</p>{picture}'

    def _summary(self) -> str:
        groups = {placed.work.group for placed in self.work} - {-1}
        divided = f"in {len(groups)} merge groups the last {self._unit} to arrive merges the parts of a row tile"
        return (
            f"{len(self.work)} work tiles on {_count(len(set(self._names)), self._unit)}, busy for "
            f"{100 * self.balance:.0f} % of the time; {divided if groups else 'no row tile is divided'}. A colour is a "
            f"request, hatched work tiles are parts, and lines join what is merged.{self._shared()}"
        )

    def _shared(self) -> str:
        has_shared = any(placed.work.request < 0 for placed in self.work)
        text = " Grey work tiles have keys that several requests share; each row merges the results of all levels."
        return text if has_shared else ""

    def _x(self, at: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - 10) * at / self._end

    def _axes(self, height: float, bottom: float) -> Iterator[str]:
        every = -(-14 // int(height)) if height < 14 else 1
        for line in range(0, self._lines, every):
            y = _TOP + height * (line + 0.5) + 4
            yield f'<text x="{_LEFT - 8}" y="{y:.1f}" text-anchor="end">{self._unit} {self._names[line]}</text>'
        for tick in _ticks(self._end):
            x = self._x(tick)
            yield f'<path d="M{x:.1f} {_TOP}V{bottom:.1f}" stroke="currentColor" stroke-opacity=".18"/>'
            yield f'<text x="{x:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{tick:,}</text>'
        yield f'<text x="{_WIDTH / 2}" y="{bottom + 33:.1f}" text-anchor="middle">time, in {self._time}</text>'

    def _tiles(self, height: float) -> Iterator[str]:
        for work, line, begin, end in self.work:
            x, width = self._x(begin), max(0.6, self._x(end) - self._x(begin) - (0.8 if height > 6 else 0))
            y, tall = _TOP + height * line + height * 0.06, height * 0.88
            box = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{tall:.2f}"'
            when = "" if self._time == "KV tiles" else f", {begin:.1f} to {end:.1f} {self._time}"
            yield f'<g><title>{escape(self._describe(work, line) + when)}</title><rect {box} fill="{_colour(work)}"/>'
            if work.group >= 0:
                fill = "url(#quire-part)" if height > 6 and width > 4 else "#fff4"
                yield f'<rect {box} fill="{fill}"/>'
            if width > 62 and tall > 12:
                name = f"{work.request if work.request >= 0 else 'shared'} · head {work.kv_head}"
                at = f'x="{x + 5:.1f}" y="{y + tall / 2 + 4:.1f}"'
                yield f'<text {at} fill="#fff" paint-order="stroke" stroke="#0006" stroke-width="2">{name}</text>'
            yield "</g>"

    def _merges(self, height: float) -> Iterator[str]:
        """A line from part to part of each merge group, if there are few enough to follow."""
        groups = self._parts().values()
        for parts in groups if len(groups) <= _MOST_JOINED and self._lines <= _MOST_JOINED else ():
            points = [
                f"{self._x((p.begin + p.end) / 2):.1f},{_TOP + height * (p.line + 0.5):.1f}"
                for p in sorted(parts, key=lambda p: p.work.keys)
            ]
            yield f'<polyline points="{" ".join(points)}" fill="none" stroke="currentColor" stroke-opacity=".75"/>'
            yield "".join('<circle cx="{}" cy="{}" r="2.6"/>'.format(*point.split(",")) for point in points)

    def _parts(self) -> dict[int, list[Placed]]:
        """The work tiles of each merge group."""
        groups: dict[int, list[Placed]] = {}
        for placed in self.work:
            if placed.work.group >= 0:
                groups.setdefault(placed.work.group, []).append(placed)
        return groups

    def _describe(self, work: Work, line: int) -> str:
        part = f", a part of merge group {work.group}" if work.group >= 0 else ""
        return (
            f"{self._unit} {self._names[line]}: {_owner(work)}, KV head {work.kv_head}, rows {work.rows[0]} to "
            f"{work.rows[1] - 1}, keys {work.keys[0]} to {max(work.keys[1] - 1, work.keys[0])}{part}"
        )

    def _groups(self, most: int = 200) -> str:
        rows = []
        for group, parts in sorted(self._parts().items())[:most]:
            work, lines = parts[0].work, ", ".join(str(part.line) for part in parts)
            cells = group, _owner(work), work.kv_head, f"{work.rows[0]} to {work.rows[1] - 1}", lines
            rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
        if not rows:
            return ""
        head = "".join(f"<th>{name}</th>" for name in ("group", "keys of", "KV head", "rows", f"{self._unit}s"))
        title = f"What is merged: {len(self._parts())} groups" + (f", the first {most}" if len(rows) == most else "")
        table = f"<table><tr>{head}</tr>{''.join(rows)}</table>"
        return f"<details{' open' if len(rows) <= 12 else ''}><summary>{title}</summary>{table}</details>"


def schedule(plan: AttentionWrapper | BatchAttention | MultiLevelCascadeAttentionWrapper) -> Picture:
    """Draw the schedule of the current plan of a wrapper: which CTA, or which CPU thread, computes what.

    plan: a wrapper after plan(), planned on the host. The lines of the picture are the resident CTAs of a GPU, or the
    threads of a CPU. In a cascade, work tiles of shared keys have negative requests. Raises PlanError before plan(),
    ValidationError for anything but a wrapper, and for a cascade whose levels are separate launches.

    >>> wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    >>> lens = torch.tensor([0, 100, 130], dtype=torch.int32)
    >>> wrapper.plan(lens, lens, 8, 2, 64, causal=True, q_data_type=torch.float32)
    >>> picture = quire.viz.schedule(wrapper)
    >>> sorted({placed.work.request for placed in picture.work})
    [0, 1]
    >>> picture.svg[:4]
    '<svg'
    """
    attention = planned(_wrapper_of(plan)._attention)
    unit = "CTA" if attention.decision.problem.on_cuda else "thread"
    return Picture(attention.explain(), _few(attention.placed_work()), unit)


def timeline(plan: AttentionWrapper | BatchAttention, *tensors: Any, **options: Any) -> Picture:
    """Run the batch of the current plan, and draw which SM, or which CPU thread, computed what, and when.

    plan: as in schedule(). tensors, options: the arguments of its run(): q, then the cache or keys and values, ... The
    batch runs twice, in a special variant of the planned kernel, which records when each work tile begins and ends; the
    picture shows the second run. A wrapper for CUDA graphs runs without a graph. Raises UnsupportedError if the kernel
    has no such variant (MLA, heads of 512 dims, custom variants), and for cascades.

    >>> wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    >>> lens = torch.tensor([0, 100, 130], dtype=torch.int32)
    >>> wrapper.plan(lens, lens, 8, 2, 64, causal=True, q_data_type=torch.float32)
    >>> q, k, v = (torch.randn(130, heads, 64) for heads in (8, 2, 2))
    >>> measured = quire.viz.timeline(wrapper, q, k, v)
    >>> len(measured.work) == len(quire.viz.schedule(wrapper).work)
    True
    """
    wrapper = _wrapper_of(plan)
    attention, notes = planned(wrapper._attention).with_timeline()
    twin, unit = copy(wrapper), "SM" if attention.decision.problem.on_cuda else "thread"
    twin._attention, twin._graph = attention, None
    for _ in range(2):
        notes.clear()
        twin.run(*tensors, **options)
    work, names = notes.read()
    return Picture(attention.explain(), _few(work), unit, "µs", names)


def _wrapper_of(plan: Any) -> AttentionWrapper:
    if isinstance(plan, MultiLevelCascadeAttentionWrapper) and plan._apart:
        raise ValidationError(f"plan: expected a cascade whose levels are one launch, got one apart: {plan._apart}.")
    wrapper = plan._joined if isinstance(plan, MultiLevelCascadeAttentionWrapper) else plan
    wrapper = wrapper._wrapper if isinstance(wrapper, BatchAttention) else wrapper
    if not isinstance(wrapper, AttentionWrapper):
        raise ValidationError(f"plan: expected a wrapper that has planned one batch, got {type(plan).__name__}.")
    return wrapper


def _few(work: Sequence[Placed]) -> Sequence[Placed]:
    """`work`; ValidationError if it is too large for a browser."""
    if len(work) > _MOST_TILES:
        raise ValidationError(f"schedule: expected at most {_MOST_TILES} work tiles to draw, got {len(work)}.")
    return work


def _owner(work: Work) -> str:
    """The request, or the shared level, to which the keys belong."""
    return f"request {work.request}" if work.request >= 0 else f"shared node {-1 - work.request}"


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}{'' if number == 1 else 's'}"


def _ticks(end: float, most: int = 10) -> range:
    """Round numbers from 0 to `end`."""
    step = 1
    while end / step > most:
        step = step * 5 // 2 if str(step)[0] == "2" else step * 2
    return range(0, int(end) + 1, step)


def _colour(work: Work) -> str:
    """A colour: the hue depends on the request, the lightness on row tile and KV head."""
    is_odd = (work.rows[0] // max(1, work.rows[1] - work.rows[0]) + work.kv_head) % 2
    saturation = 50 if work.request >= 0 else 0
    return f"hsl({(212 + work.request * 137.508) % 360:.0f} {saturation}% {46 + 7 * is_odd}%)"


_HATCH = (
    '<defs><pattern id="quire-part" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<path d="M0 0V6" stroke="#fff" stroke-opacity=".45" stroke-width="2.4"/></pattern></defs>'
)
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Quire: the schedule of a plan</title>
<style>
:root {{ color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif }}
body {{ max-width: 1080px; margin: 2rem auto; padding: 0 1rem; overflow-wrap: anywhere }}
table {{ border-collapse: collapse }}
td, th {{ padding: 2px 14px 2px 0; text-align: left }}
</style>
<body>{body}</body></html>
"""


# --- quire viz -------------------------------------------------------------------------------------------------------


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected whole numbers such as 8000,300, got {text!r}") from error


def _heads(text: str) -> tuple[int, int]:
    try:
        qo, kv = (int(word) for word in text.split("/"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected query and KV heads such as 32/8, got {text!r}") from error
    return qo, kv


def _planned(options: argparse.Namespace) -> tuple[AttentionWrapper, list[torch.Tensor]]:
    """A wrapper that has planned the batch of the command line, and tensors for its run()."""
    kv_lens, size, (qo_heads, kv_heads) = options.kv_lens, options.page_size, options.heads
    qo_lens = options.qo_lens * (len(kv_lens) if len(options.qo_lens) == 1 else 1)
    if len(qo_lens) != len(kv_lens):
        raise ValidationError(f"--qo-lens: expected 1 or {len(kv_lens)} lengths, got {len(qo_lens)}.")
    randn = partial(torch.randn, dtype=torch.bfloat16, device=options.device)
    own = kv_heads, options.head_dim
    q = randn(sum(qo_lens), qo_heads, options.head_dim)
    workspace = torch.empty(1 << 30, dtype=torch.uint8, device=options.device)
    shared: dict[str, Any] = {"q_data_type": torch.bfloat16, "fixed_split_size": options.split}
    if size is None:
        ragged = BatchPrefillWithRaggedKVCacheWrapper(workspace)
        heads = qo_heads, kv_heads, options.head_dim
        ragged.plan(_offsets(qo_lens), _offsets(kv_lens), *heads, causal=options.causal, **shared)
        return ragged, [q, randn(sum(kv_lens), *own), randn(sum(kv_lens), *own)]
    pages = _offsets([-(-n // size) for n in kv_lens])
    last = torch.tensor([(n - 1) % size + 1 if n else 0 for n in kv_lens], dtype=torch.int32, device="cpu")
    cache = randn(int(pages[-1]), 2, size, *own)
    table = (
        pages, torch.arange(int(pages[-1]), dtype=torch.int32, device="cpu"), last, qo_heads, kv_heads,
        options.head_dim, size,
    )  # fmt: skip
    if set(qo_lens) == {1}:
        decode = BatchDecodeWithPagedKVCacheWrapper(workspace)
        decode.plan(*table, **shared)
        return decode, [q, cache]
    prefill = BatchPrefillWithPagedKVCacheWrapper(workspace)
    prefill.plan(_offsets(qo_lens), *table, causal=options.causal, **shared)
    return prefill, [q, cache]


def _offsets(lens: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *lens], device="cpu").cumsum(0).int()


def main(arguments: Sequence[str] | None = None, prog: str = "python -m quire.viz") -> None:
    """Plan a batch, compute it, and write a page about it."""
    parser = argparse.ArgumentParser(prog=prog, description="Draw who computes what under a plan.")
    parser.add_argument("--out", type=Path, default=Path("schedule.html"), help="file to write (default schedule.html)")
    parser.add_argument("--qo-lens", type=_numbers, default=[1], help="queries of each request, or of all (default 1)")
    parser.add_argument("--kv-lens", type=_numbers, default=[8000, 2000, 900, 900, 300, 300, 300, 50], help="keys")
    parser.add_argument("--heads", type=_heads, default=(32, 8), help="query and KV heads (default 32/8)")
    parser.add_argument("--head-dim", type=int, default=128, help="default 128")
    parser.add_argument("--page-size", type=int, help="tokens of a page (default: keys without pages)")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--split", type=int, help="fixed_split_size of plan(), tokens")
    parser.add_argument("--no-timeline", action="store_true", help="draw the schedule alone: compute nothing")
    parser.add_argument("--threads", type=int, help="threads of the host that share the work (default: torch's)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        wrapper, tensors = _planned(options)
        picture = schedule(wrapper)
        page = picture.page(*[] if options.no_timeline else [timeline(wrapper, *tensors)])
    except QuireError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    options.out.write_text(page, encoding="utf-8")
    print(picture.explanation)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
