"""The result of explain(): text in a log, a table at the Python prompt, HTML in a notebook."""

from __future__ import annotations

from html import escape
from io import StringIO
from typing import TYPE_CHECKING

from quire.kernels import Decision
from quire.kernels.params import ScheduleOutput

if TYPE_CHECKING:
    from rich.console import Group

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
    if sizes.is_dynamic:
        return f"{sizes.num_ctas} CTAs take whole row tiles, the longest first"
    if sizes.is_partitioned:
        return f"{sizes.num_ctas} partitions of equal cost (stream-K)"
    return f"{sizes.num_ctas} whole row tiles of a KV head, the longest first"
