"""When and where a timed variant computed its work tiles: reads the records of tile/shared/stamps.h, for pictures."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from quire.errors import PlanError
from quire.runtime.work import Placed, Work

_COLUMNS = 8  #: numbers of a Stamp
_END = 1  #: Moment::kEnd


class _Span(NamedTuple):
    """A work tile as it was computed, in nanoseconds."""

    begin: int
    end: int
    place: int  #: SM, or the host's thread
    work: Work


class Stamps:
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
