"""Draws the committed result files: speed beside peers, roofline, first call, host cost, the CPU, and scaling.

It also writes the tables of README.md and docs/measured.md (tables.py).

    python benchmarks/figures.py [--out docs/figures]

Each picture is an SVG for light pages and one for dark pages. The bytes depend on the files and on matplotlib's version
alone. Nothing is drawn that is not in a file, and each picture names the machine and the date of its file.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import tables
from tables import RESULTS, ROOT, WITHOUT_PAGES, latest, newest_of_each_cpu

#: What rcParams say on each kind of page; C0 is Quire's colour, C1 a warning's, the others are of peers.
THEMES = {
    "light": {"ink": "#24292f", "faint": "#d0d7de", "cycle": ["#0a7d74", "#c2410c", "#2563eb", "#7c3aed", "#a16207"]},
    "dark": {"ink": "#e6edf3", "faint": "#3d444d", "cycle": ["#2dd4bf", "#fb923c", "#60a5fa", "#c084fc", "#facc15"]},
}
#: Providers of the result files, their names, and their colours and marks.
PROVIDERS = {
    "quire": ("Quire", "C0", "o"),
    "fa3": ("FlashAttention-3", "C2", "s"),
    "fi-fa3": ("FlashInfer fa3", "C3", "^"),
    "fi-fa2": ("FlashInfer fa2", "C3", "v"),
    "fi-decode-tc": ("FlashInfer decode", "C3", "D"),
    "fi-xqa": ("FlashInfer xqa", "C3", "X"),
    "torch-cudnn": ("cuDNN", "C4", "P"),
}
_SHORT_DECODE = "FlashInfer decode"
#: Rows of attention.py in words, which stand without the lines above them.
LABELS = {name: label for labels in (tables.PREFILL, tables.DECODE) for label, name in labels.items()} | {
    "prefill-d192-128-causal-b2-8k": "d192/128, 128 heads, causal, 2 x 8192",
    "prefill-rope-p16-b2-8k": "RoPE on the fly, pages of 16, causal, 2 x 8192",
    "append-q4-kv8k-b64": "4 new tokens, 64 x 8192, 64/8, as prefill",
    "decode-b128-skewed-down": "128 requests of 32768 to 16, the longest first",
    "decode-b128-skewed-up": "128 requests of 16 to 32768, the shortest first",
    "decode-b128-skewed-alternating": "128 requests, long and short ones in turn",
}


class Row(NamedTuple):
    """One row of a report of attention.py."""

    name: str
    flops: float
    num_bytes: float
    unit: str
    has_pages: bool
    rates: dict[str, float]  #: by provider

    @property
    def best_peer(self) -> str:
        return max((name for name in self.rates if name != "quire"), key=self.rates.__getitem__)

    @property
    def ratio(self) -> float:
        """Quire's speed, as a multiple of the fastest peer's."""
        return self.rates["quire"] / self.rates[self.best_peer]

    @property
    def label(self) -> str:
        return LABELS.get(self.name, self.name)

    @property
    def rival(self) -> str:
        """The fastest peer, and whether its keys have no pages though the row's have."""
        name = PROVIDERS[self.best_peer][0] if self.best_peer in PROVIDERS else _SHORT_DECODE
        return name + (" *" if self.has_pages and self.best_peer in WITHOUT_PAGES else "")


def attention_rows() -> list[Row]:
    """The rows that Quire and a peer computed."""
    rows = []
    for row in latest("*-h200-attention.json")["rows"]:
        measured = [result for result in row["results"] if result["timing"]]
        rates = {r["provider"]: r["rate"] for r in measured if r["peer"] or r["provider"] == "quire"}
        if {"quire"} < rates.keys():
            paged = row["problem"]["page_size"] > 0
            rows.append(Row(row["row"], row["flops"], row["bytes"], row["unit"], paged, rates))
    return rows


def _machine(report: dict[str, Any]) -> str:
    day = report["date"][:10]
    return f"{report['device']}, {day}, random bf16 inputs, medians, all libraries in turn in one process"


def _ranked(ax: Axes, names: list[str]) -> None:
    """Rows from the top down, named on the left."""
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x")


# --- pictures --------------------------------------------------------------------------------------------------------


def speed(figure: Figure) -> str:
    """Speed of Quire relative to the fastest other library, row by row."""
    rows = attention_rows()
    parts = [[row for row in rows if row.unit == unit] for unit in ("TFLOP/s", "GB/s")]
    figure.set_size_inches(8.4, 1.6 + 0.235 * len(rows))
    axes = figure.subplots(2, 1, height_ratios=[*map(len, parts)])
    for ax, part, title in zip(axes, parts, ("prefill and chunks", "decode, and decode beside prefill"), strict=True):
        for y, row in enumerate(part):
            colour, end = "C0" if row.ratio >= 1 else "C1", min(row.ratio, 2.6)
            ax.barh(y, end - 1, left=1, height=0.62, color=colour)
            ax.annotate(
                f"{row.ratio:.2f}{' →' if row.ratio > end else ''}  {row.rival}", (max(end, 1), y), (5, 0), va="center",
                textcoords="offset points", fontsize=8.5,
            )  # fmt: skip
        _ranked(ax, [row.label for row in part])
        ax.set_xticks([1, 1.5, 2, 2.5], ["1x", "1.5x", "2x", "2.5x"])
        ax.set_xlim(0.85, 3.5)
        ax.axvline(1, color=mpl.rcParams["text.color"], linewidth=1)
        ax.set_title(title)
    slower = sum(row.ratio < 1 for row in rows)
    figure.suptitle(f"Quire's speed relative to the fastest other library ({slower} of {len(rows)} rows are slower)")
    return (
        f"{_machine(latest('*-h200-attention.json'))}.\n"
        "d128: dims of a head; 32/8: heads of queries and of keys; 2 x 8192: requests and their tokens.\n"
        "* the other library ran on keys without pages, which is less work."
    )


def summary(figure: Figure) -> str:
    """Speed of Quire as a multiple of the fastest other library's, in some rows."""
    rows = [*tables.summaries()]
    figure.set_size_inches(8.4, 2.9)
    ax = figure.subplots()
    for y, row in enumerate(rows):
        ax.barh(y, row.ratio, height=0.62, color="C0" if row.ratio >= 1 else "C1")
        ax.annotate(f"{row.ratio:.2f}x {row.rival}", (row.ratio, y), (5, 0), va="center", textcoords="offset points")
    _ranked(ax, [row.label for row in rows])
    ax.set_xticks([0, 1, 2, 3, 4], ["0", "1x", "2x", "3x", "4x"])
    ax.set_xlim(0, 1.45 * max(row.ratio for row in rows))
    ax.axvline(1, color=mpl.rcParams["text.color"], linewidth=1)
    return f"{_machine(latest('*-h200-attention.json'))}"


def rates(figure: Figure) -> str:
    """The rates of each library."""
    rows, report = attention_rows(), latest("*-h200-attention.json")
    units = {"TFLOP/s": "tflops", "GB/s": "gigabytes_per_s"}
    parts = [[row for row in rows if row.unit == unit] for unit in units]
    figure.set_size_inches(8.4, 1.9 + 0.235 * len(rows))
    axes = figure.subplots(2, 1, height_ratios=[*map(len, parts)])
    for ax, part, (unit, roof) in zip(axes, parts, units.items(), strict=True):
        for name, (_, colour, mark) in reversed(PROVIDERS.items()):
            at = [y for y, row in enumerate(part) if name in row.rates]
            size = 58 if name == "quire" else 30
            ax.scatter([part[y].rates[name] for y in at], at, s=size, color=colour, marker=mark, zorder=3, lw=0)
        _ranked(ax, [row.label for row in part])
        ax.set_xlim(0, report["roof"][roof] * 1.06)
        ax.axvline(report["roof"][roof], color=mpl.rcParams["text.color"], linewidth=1, linestyle=(0, (4, 3)))
        ax.set_title(f"{unit} (dashed: the peak that this card reached)")
    _legend(figure, list(PROVIDERS))
    return f"{_machine(report)}."


def roofline(figure: Figure) -> str:
    """Rates by operations per byte, under the card's two roofs."""
    rows, report = attention_rows(), latest("*-h200-attention.json")
    figure.set_size_inches(8.4, 4.8)
    ax = figure.subplots()
    tflops, bandwidth = report["roof"]["tflops"], report["roof"]["gigabytes_per_s"] / 1e3
    low, high = 1.5, 4e4
    ink = mpl.rcParams["text.color"]
    ax.plot([low, tflops / bandwidth, high], [low * bandwidth, tflops, tflops], color=ink, linewidth=1.3)
    for name, (_, colour, mark) in reversed(PROVIDERS.items()):
        for row in (row for row in rows if name in row.rates):
            intensity = row.flops / row.num_bytes
            rate = row.rates[name] * (1 if row.unit == "TFLOP/s" else intensity / 1e3)
            ax.scatter(intensity, rate, s=46 if name == "quire" else 22, color=colour, marker=mark, zorder=3, lw=0)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(low, high)
    ax.set_ylim(1.5, 1600)
    ax.set_xticks([10, 100, 1000, 10000], ["10", "100", "1,000", "10,000"])
    ax.set_yticks([10, 100, 1000], ["10", "100", "1,000"])
    ax.set_xlabel("operations per byte (q, keys, values and output, each counted once)")
    ax.set_ylabel("TFLOP/s")
    ax.grid(which="major")
    ax.text(2, 2 * bandwidth * 3, f"memory:\n{bandwidth * 1e3:,.0f} GB/s", fontsize=9)
    ax.text(high * 0.9, tflops * 1.12, f"tensor cores: {tflops:.0f} TFLOP/s", fontsize=9, ha="right")
    _legend(figure, list(PROVIDERS))
    return f"{_machine(report)}.\nThe roofs are the rates of a matrix product and of a large read in the same run."


def first_call(figure: Figure) -> str:
    """Duration of a cold compile."""
    report = latest("*-compile.json")
    families = sorted(report["families"].items(), key=lambda item: -item[1]["median_seconds"])
    figure.set_size_inches(8.4, 2.9)
    ax = figure.subplots()
    for y, (_, found) in enumerate(families):
        ax.barh(y, found["median_seconds"], height=0.55, color="C0")
        ax.plot([found["median_seconds"], found["largest_seconds"]], [y, y], color="C0", linewidth=1.4)
        ax.plot(found["largest_seconds"], y, marker="|", markersize=11, color="C0", markeredgewidth=1.6)
        text = f"{found['median_seconds']:.1f} s, slowest {found['largest_seconds']:.1f} s"
        ax.annotate(text, (found["largest_seconds"], y), (8, 0), textcoords="offset points", va="center", fontsize=9)
    busy = {name for name, found in families if "note" in found}
    names = [f"{name} ({found['variants']}){' *' if name in busy else ''}" for name, found in families]
    _ranked(ax, names)
    ax.set_xlim(0, max(found["largest_seconds"] for _, found in families) * 1.32)
    ax.set_xlabel("seconds per cold compile (number of variants in brackets)")
    return (
        f"{report['date']}, nvcc {report['nvcc']}, g++ {report['gxx']}, two compiles at a time on 2 cores, "
        f"commit {report['commit']}.\n* measured while other programs used both cores."
    )


def host(figure: Figure) -> str:
    """Host time of plan() and run()."""
    report = latest("*-h200-plan.json")
    results = [result for result in report["results"] if result["plan"]]
    cases = list(dict.fromkeys(result["case"] for result in results))
    figure.set_size_inches(9.6, 3.4)
    shown = {"quire": 0.0, "fi-fa2": 0.26, "fi-fa3": 0.52}
    for ax, call in zip(figure.subplots(1, 2), ("plan", "run"), strict=True):
        for result in results:
            name, value = result["provider"], result[call]["p50"]
            y = cases.index(result["case"]) + shown[name] - 0.26
            ax.barh(y, value, height=0.24, color=PROVIDERS[name][1], alpha=0.6 if name == "fi-fa2" else 1)
            ax.annotate(f"{value:.0f}" if value > 20 else f"{value:.1f}", (value, y), (3, 0),
                        textcoords="offset points", va="center", fontsize=7.5)  # fmt: skip
        _ranked(ax, cases)
        ax.set_xlim(0, max(result[call]["p50"] for result in results) * 1.14)
        ax.set_title(f"{call}(), microseconds")
    figure.legend(
        [Line2D([], [], lw=6, color=PROVIDERS[name][1], alpha=0.6 if name == "fi-fa2" else 1) for name in shown],
        ["Quire", "FlashInfer fa2 (pale)", "FlashInfer fa3"], loc="outside upper center", ncols=3,
    )  # fmt: skip
    return (
        f"Host of one {report['device']}, {report['date'][:10]}, {report['calls']:,} calls, medians; b: number of "
        f"requests,\n{report['kv_len']} keys each; flashinfer-python {report['peers']['flashinfer-python']}."
    )


def cpu(figure: Figure) -> str:
    """Speed of the cpu backend relative to torch's SDPA, on each processor that was measured."""
    reports = newest_of_each_cpu()
    cases = list(dict.fromkeys(result["case"] for report in reports for result in report["results"]))
    figure.set_size_inches(9.6, 1.6 + 0.17 * len(cases) * len(reports))
    ax = figure.subplots()
    height = 0.8 / len(reports)
    for number, report in enumerate(reports):
        colour = ("C0", "C2", "C3", "C4")[number]
        for result in report["results"]:
            ratio, y = result["speedup"], cases.index(result["case"]) - 0.4 + height * (number + 0.5)
            ax.barh(y, ratio - 1, left=1, height=0.9 * height, color=colour)
            ax.annotate(
                f"{ratio:.1f}" if ratio >= 1 else f"{ratio:.2f}", (ratio, y), (4 if ratio >= 1 else -4, 0),
                textcoords="offset points", va="center", ha="left" if ratio >= 1 else "right", color=colour,
                fontsize=8.5,
            )  # fmt: skip
    _ranked(ax, cases)
    ax.set_xscale("log")
    ax.set_xticks([0.5, 1, 2, 4, 8, 16], ["0.5x", "1x", "2x", "4x", "8x", "16x"])
    ax.set_xticks([], minor=True)
    ratios = [result["speedup"] for report in reports for result in report["results"]]
    ax.set_xlim(0.8 * min(1, *ratios), 1.5 * max(ratios))
    ax.axvline(1, color=mpl.rcParams["text.color"], linewidth=1)
    ax.set_title("Quire's speed relative to torch's SDPA on CPUs")
    return "\n".join(_cpu_line(report, len(reports) > 1, number) for number, report in enumerate(reports))


def _cpu_line(report: dict[str, Any], has_others: bool, number: int) -> str:
    colour = f"{('First', 'Second', 'Third', 'Fourth')[number]} bar: " if has_others else ""
    return (
        f"{colour}{report['cpu']}, {report['threads']} threads, {report['target']}, {report['date'][:10]}, torch "
        f"{report['torch']}, medians; load average {report['load_before']} to {report['load_after']}: only the "
        "ratios are reliable."
    )


_PREFILLS = "prefill: batch, 512 tokens"
#: What a panel of the picture of scaling shows: its title, and its lines with the sweeps of benchmarks/scaling.py.
SWEEPS = {
    "run(), us, by length": (
        "run_us", {"decode, batch 1": "decode: length, batch 1", "decode, batch 16": "decode: length, batch 16",
                   "prefill": "prefill: length, batch 1"}),
    "run(), us, by batch": (
        "run_us", {"decode, 2048 keys": "decode: batch, 2048 keys", "prefill, 512 tokens": _PREFILLS}),
    "run(), us, by heads": (
        "run_us", {"query heads, 8 KV heads": "decode: query heads of 8 KV heads",
                   "KV heads, 32 query heads": "decode: KV heads of 32 query heads"}),
    "run(), us, by page size": (
        "run_us", {"decode, 16 x 8192 keys": "decode: page size", "prefill, 2 x 4096": "prefill: page size"}),
    "plan(), us, by batch": (
        "plan_us", {"decode, 2048 keys": "decode: batch, 2048 keys", "prefill, 512 tokens": _PREFILLS}),
}  # fmt: skip


def scaling(figure: Figure) -> str:
    """Scaling of run(), plan() and the cache."""
    report = latest("*-scaling.json")
    figure.set_size_inches(11.2, 6.4)
    panels = figure.subplots(2, 3).flatten().tolist()
    for ax, (title, (value, lines)) in zip(panels, SWEEPS.items(), strict=False):
        for number, (label, sweep) in enumerate(lines.items()):
            points = [(point["x"], point[value]) for point in report["points"] if point["sweep"] == sweep]
            _line(ax, points, number, label)
        _doubling(ax, title)
    caches = report["caches"]
    _line(panels[-1], [(found["entries"], found["lookup_us"]) for found in caches], 0, "a lookup, us")
    _line(panels[-1], [(found["entries"], 1e3 * found["list_s"]) for found in caches], 1, "quire cache list, ms")
    _doubling(panels[-1], "cache, by number of entries")
    return (
        f"{report['device']}, {report['date'][:10]}, random inputs, medians of single launches; 32 query heads, 8 KV "
        f"heads,\nhead_dim 128, pages of 16 unless a panel says otherwise; {report['left_out']} points were "
        "too large to run."
    )


def _line(ax: Axes, points: list[tuple[float, float]], number: int, label: str) -> None:
    if points:
        xs, ys = zip(*points, strict=True)
        ax.plot(xs, ys, marker="os^"[number], color=f"C{(0, 2, 3)[number]}", label=label, markersize=4)


def _doubling(ax: Axes, title: str) -> None:
    """Both axes logarithmic, with a legend; nothing where nothing was measured."""
    ax.set_visible(bool(ax.lines))
    if not ax.lines:
        return
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    low, high = ax.get_xlim()
    ticks = [2**i for i in range(21) if low <= 2**i <= high]
    ticks = ticks[:: max(1, len(ticks) // 5)]
    ax.set_xticks(ticks, [f"{tick // 1024}k" if tick >= 1024 else str(tick) for tick in ticks])
    ax.set_xticks([], minor=True)
    ax.grid(which="major")
    ax.set_title(title)
    ax.legend(fontsize=7.5)


PICTURES: tuple[Callable[[Figure], str], ...] = (
    summary, speed, rates, roofline, first_call, host, cpu, *((scaling,) if [*RESULTS.glob("*-scaling.json")] else ())
)  # fmt: skip


def _legend(figure: Figure, names: list[str]) -> None:
    kinds = [PROVIDERS[name] for name in names]
    marks = [Line2D([], [], linestyle="", marker=mark, color=colour, markersize=6) for _, colour, mark in kinds]
    figure.legend(marks, [label for label, _, _ in kinds], loc="outside upper center", ncols=4)


# --- files -----------------------------------------------------------------------------------------------------------


def _settings(theme: dict[str, Any]) -> dict[str, Any]:
    ink, faint = theme["ink"], theme["faint"]
    return {
        "svg.hashsalt": "quire", "svg.fonttype": "none", "font.size": 9.5, "axes.titlesize": 10.5,
        "figure.titlesize": 12, "figure.titleweight": "bold", "text.color": ink, "axes.labelcolor": ink,
        "axes.edgecolor": faint, "xtick.color": ink, "ytick.color": ink, "grid.color": faint, "grid.linewidth": 0.6,
        "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False, "axes.facecolor": "none",
        "figure.facecolor": "none", "legend.frameon": False, "legend.handletextpad": 0.3,
        "axes.prop_cycle": mpl.cycler(color=theme["cycle"]),
    }  # fmt: skip


def draw() -> Iterator[tuple[str, str]]:
    """Name and text of each picture."""
    for kind, theme in THEMES.items():
        for picture in PICTURES:
            with mpl.rc_context({**mpl.rcParamsDefault, **_settings(theme)}):
                figure = Figure(layout="constrained")
                caption = picture(figure)
                figure.text(0.008, 0.012, caption, fontsize=7.5, alpha=0.8, linespacing=1.5)
                below = (0.02 + 0.2 * max(2, caption.count("\n") + 1)) / figure.get_figheight()
                left = 0.15 / figure.get_figwidth()  # other fonts than DejaVu Sans may be wider
                engine = figure.get_layout_engine()
                assert engine is not None
                engine.set(rect=(left, below, 1 - left, 1 - below))
                yield f"{picture.__name__.replace('_', '-')}-{kind}.svg", _svg(figure, picture.__doc__ or "")


def _svg(figure: Figure, title: str) -> str:
    file = StringIO()
    FigureCanvasSVG(figure).print_svg(file, metadata={"Date": None, "Creator": None, "Title": title})
    names: dict[str, str] = {}  # matplotlib's are digests of places, in whose last digits layouts differ

    def renamed(match: re.Match[str]) -> str:
        return names.setdefault(match.group(), f"{match.group()[0]}{len(names)}")

    # Without it some browsers round the width of each letter, and labels leave the picture.
    precise = file.getvalue().replace(
        '<style type="text/css">*{', '<style type="text/css">*{text-rendering: geometricPrecision; '
    )
    text = re.sub(r"\b[pm][0-9a-f]{10}\b", renamed, precise)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, text in draw():
        (out / name).write_text(text, encoding="utf-8")
    tables.write()


if __name__ == "__main__":
    main()
