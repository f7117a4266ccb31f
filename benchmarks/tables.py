"""The tables of measurements in README.md and docs/measured.md, from the newest result files.

    python benchmarks/tables.py    rewrites what stands between `<!-- table: NAME -->` and `<!-- end -->`

`make figures` does so too, and tests/test_figures.py compares. The best figure of a line is bold; c: on contiguous keys
where the row has pages, which is less work.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
WITHOUT_PAGES = ("fa3", "torch-cudnn")  #: providers of attention.py that have no pages, or whose wheel has none

#: Columns of the two large tables: a heading and the providers of which the fastest counts.
PREFILL_COLUMNS = {
    "quire": ("quire",), "FlashInfer fa3": ("fi-fa3",), "FlashInfer fa2": ("fi-fa2",), "FlashAttention-3": ("fa3",),
    "cuDNN": ("torch-cudnn",),
}  # fmt: skip
DECODE_COLUMNS = {
    "quire": ("quire",), "FlashInfer decode": ("fi-decode", "fi-decode-tc", "fi-xqa"), "FlashInfer fa2": ("fi-fa2",),
    "FlashAttention-3": ("fa3",), "cuDNN": ("torch-cudnn",),
}  # fmt: skip
#: Rows of attention.py, as docs/measured.md describes them.
PREFILL = {
    "d128 32/8 causal, 2 x 8192": "prefill-d128-causal-b2-8k",
    "d128 32/8 full, 2 x 8192": "prefill-d128-full-b2-8k",
    "d128 64/8 causal, 1 x 32768": "prefill-d128-causal-b1-32k",
    "d128 32/8 causal, 16 x 1024": "prefill-d128-causal-b16-1k",
    "d128 32/8 causal, 64 x 128": "prefill-d128-causal-b64-128",
    "d64 64/8 causal, 2 x 8192": "prefill-d64-causal-b2-8k",
    "d64 64/8 full, 1 x 16384": "prefill-d64-full-b1-16k",
    "d256 16/8 causal, 2 x 8192": "prefill-d256-causal-b2-8k",
    "d192/128, 128 heads, causal, 2 x 4096": "prefill-d192-128-causal-b2-4k",
    "the same, 2 x 8192": "prefill-d192-128-causal-b2-8k",
    "skewed lengths, 16384 to 1, causal": "prefill-skewed",
    "pages of 16, causal, 2 x 8192": "prefill-p16-causal-b2-8k",
    "pages of 1, causal, 2 x 8192": "prefill-p1-causal-b2-8k",
    "chunk of 512 on 8192, batch 8, pages of 16": "append-q512-kv8k-b8",
    "chunk of 256 on 131072, 8/1 heads, pages of 16": "append-q256-kv128k-b1",
    "e4m3 keys and values, pages of 16, causal, 2 x 8192": "prefill-p16-e4m3-b2-8k",
    "chunk of 512 on 8192 of e4m3, batch 8, pages of 16": "append-e4m3-q512-kv8k-b8",
    "ALiBi, pages of 16, causal, 2 x 8192": "prefill-alibi-p16-b2-8k",
    "RoPE on the fly, the same": "prefill-rope-p16-b2-8k",
    "window 1023 and soft cap, 32/16, pages of 16": "prefill-p16-window-cap-b2-8k",
    "custom mask equal to causal, 2 x 8192": "prefill-custom-b2-8k",
    "sinks, d64 64/8 full, 1 x 16384": "prefill-sinks-d64-full-b1-16k",
    "sinks, d128 32/8 full, 2 x 8192": "prefill-sinks-d128-full-b2-8k",
}
DECODE = {
    "64 x 4096, 32/8, pages of 16": "decode-b64-kv4k-p16",
    "64 x 4096, 64/8, pages of 64": "decode-b64-kv4k-h64-p64",
    "32 x 8192, 32/32": "decode-b32-kv8k-h32-32",
    "128 requests of 16 to 32768": "decode-b128-skewed",
    "the same requests, the longest first": "decode-b128-skewed-down",
    "64 x 7000, then 64 x 32": "decode-b128-long-then-short",
    "255 x 512 and 1 x 65536": "decode-b256-512-and-64k",
    "256 x 300": "decode-b256-kv300",
    "1 x 32768, 32/8 (graph)": "decode-b1-kv32k",
    "1 x 131072, 64/8": "decode-b1-kv128k",
    "16 x 1024, 32/8 (graph)": "decode-b16-kv1k",
    "1 x 2048, 32/8 (graph)": "decode-b1-kv2k",
    "d64 64/8, 64 x 4096": "decode-d64-b64-kv4k",
    "d256 16/8, 64 x 4096": "decode-d256-b64-kv4k",
    "d512 16/8, 64 x 4096": "decode-d512-b64-kv4k",
    "e4m3 keys and values, 64 x 4096, 32/8": "decode-e4m3-b64-kv4k-p16",
    "e4m3 keys and values, 64 x 8192, 64/8, pages of 64": "decode-e4m3-b64-kv8k-p64",
    "64 x 8192, 64/8": "decode-q1-b64-kv8k",
    "ALiBi, 64 x 4096, 32/8": "decode-alibi-b64-kv4k-p16",
    "RoPE on the fly, 64 x 4096, 32/8": "decode-rope-b64-kv4k-p16",
    "4 new tokens, 64 x 8192, 64/8": "decode-q4-b64-kv8k",
    "2048 new tokens beside 63 decodes at 4096": "mixed-q2048-63decodes-kv4k",
    "window 128, sinks, d64 64/8, 128 x 8192 (graph)": "decode-window-sinks-b128-kv8k",
}


def latest(pattern: str) -> dict[str, Any]:
    """The newest result file of a name such as `*-h200-attention.json`; names begin with dates."""
    return _read(max(RESULTS.glob(pattern)))


def newest_of_each_cpu() -> list[dict[str, Any]]:
    """The newest file of each processor."""
    return list({report["cpu"]: report for report in map(_read, sorted(RESULTS.glob("cpu-*.json")))}.values())


def _read(path: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report


def figure(value: float) -> str:
    """Three digits: 768, 96.0, 7.3."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}"


def table(heading: Sequence[str], lines: Iterator[Sequence[str]]) -> str:
    """In Markdown."""
    rows = [heading, ["---"] * len(heading), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


# --- rows of attention.py --------------------------------------------------------------------------------------------


def _attention(
    title: str, rows: Mapping[str, str], columns: Mapping[str, Sequence[str]], value: Callable[[dict[str, Any]], float]
) -> str:
    """`value` of a result is what counts: a rate, or a time, of which less is better."""
    measured = {row["row"]: row for row in latest("*-h200-attention.json")["rows"]}
    is_time = columns is DECODE_COLUMNS

    def line(label: str, row: dict[str, Any]) -> Iterator[str]:
        values = {result["provider"]: value(result) for result in row["results"] if result["timing"]}
        best_of = min if is_time else max
        found = [best_of((values[n] for n in names if n in values), default=None) for names in columns.values()]
        best = best_of(number for number in found if number is not None)
        others = sum(number is not None for number in found) - 1
        yield label
        for number, names in zip(found, columns.values(), strict=True):
            text = "" if number is None else f"**{figure(number)}**" if number == best and others else figure(number)
            yield text + (" c" if text and row["problem"]["page_size"] and names[0] in WITHOUT_PAGES else "")

    return table([title, *columns], ([*line(label, measured[name])] for label, name in rows.items()))


def prefill() -> str:
    return _attention("prefill and append", PREFILL, PREFILL_COLUMNS, lambda result: float(result["rate"]))


def decode() -> str:
    return _attention("decode", DECODE, DECODE_COLUMNS, lambda result: float(result["timing"]["median"]))


# --- other programs --------------------------------------------------------------------------------------------------

Values = tuple[float | None, ...]


class Line(NamedTuple):
    """Figures of several rows side by side."""

    label: str
    unit: str  #: us, ms, TFLOP/s or tokens/s
    quire: Values
    others: dict[str, Values]
    note: str = ""  #: behind Quire's figures
    limit: str = ""  #: one of the others that does less work, such as a copy

    def cells(self) -> Iterator[str]:
        rivals = (values for name, values in self.others.items() if name != self.limit)
        best = [self._best(column) for column in zip(self.quire, *rivals, strict=True)]
        yield self.label
        yield f"{self._texts(self.quire, best)} {self.unit}{self.note}"
        yield "; ".join(f"{name} {self._texts(values, best)}" for name, values in self.others.items())

    def _best(self, column: Values) -> float | None:
        known = [value for value in column if value is not None]
        return None if len(known) < 2 else min(known) if self.unit in ("us", "ms") else max(known)

    def _texts(self, values: Values, best: Sequence[float | None]) -> str:
        pairs = zip(values, best, strict=True)
        return ", ".join("-" if v is None else f"**{figure(v)}**" if v == top else figure(v) for v, top in pairs)


def _by_provider(rows: Sequence[dict[str, Any]], name: str, value: str = "us") -> dict[str, float | None]:
    """The figures of a row of mla.py, sparse_mla.py or joined.py."""
    (row,) = (row for row in rows if row["row"]["name"] == name)
    return {
        result["provider"]: (result["timing"] or {}).get("median") if value == "us" else result[value]
        for result in row["results"]
    }


def _lines_of(
    pattern: str, unit: str, providers: Mapping[str, str], rows: Mapping[str, Sequence[str]]
) -> Iterator[Line]:
    """Lines with these providers, Quire's first, of whose names in the file the table has others."""
    measured = latest(pattern)["rows"]
    for label, names in rows.items():
        found = [_by_provider(measured, name, "us" if unit == "us" else "tflops") for name in names]
        columns = {title: tuple(row.get(key) for row in found) for key, title in providers.items()}
        others = {title: values for title, values in columns.items() if any(v is not None for v in values)}
        yield Line(label, unit, others.pop("quire"), others)


def _features() -> Iterator[Line]:
    mla = {"quire": "quire", "flashmla": "FlashMLA", "fa3-qv": "FlashAttention-3 (contiguous)", "fi-fa3": "FlashInfer"}
    yield from _lines_of("*-h200-latents.json", "us", mla, {
        "MLA decode, 128 heads: 64 x 4096, 2 queries each, 16 x 16384":
            ("b64-kv4096-h128", "b64-kv4096-h128-q2", "b16-kv16384-h128"),
        "the first with pages of 16, of 1": ("b64-kv4096-h128-p16", "b64-kv4096-h128-p1"),
        "MLA decode, 128 heads: 1 x 32768, 4 x 1024, 64 of 100 to 20000":
            ("b1-kv32768-h128", "b4-kv1024-h128", "b64-skewed-h128"),
        "MLA decode: 64 x 4096, 16 heads; 128 x 4096, 64 heads": ("b64-kv4096-h16", "b128-kv4096-h64"),
        "e4m3 latents, 16 heads: 64 x 4096, 128 x 8192": ("b64-kv4096-h16-e4m3", "b128-kv8192-h16-e4m3"),
    })  # fmt: skip
    sparse = {"quire": "quire", "quire-656": "quire (8-bit rows)", "flashmla": "FlashMLA (8-bit rows)"}
    yield from _lines_of("*-h200-sparse-latents.json", "us", sparse, {
        "sparse MLA, top 2048, 64 queries: 128, 64, 16 heads (graph)":
            ("decode-b64-q1-h128", "decode-b64-q1-h64", "decode-b64-q1-h16"),
        "the same, 128 heads: 2 queries each, 2 requests": ("decode-b64-q2-h128", "decode-b2-q1-h128"),
    })  # fmt: skip
    yield from _lines_of("*-h200-sparse-latents.json", "TFLOP/s", {"quire": "quire", "flashmla": "FlashMLA"}, {
        "sparse MLA prefill, 4096 queries on 8192, 32768 keys (a hot card)":
            ("prefill-q4096-h128-kv8192", "prefill-q4096-h128-kv32768"),
    })  # fmt: skip
    yield from _lines_of("*-h200-joined.json", "TFLOP/s", {"quire": "quire", "one": "quire in one launch"}, {
        "MLA prefill, 128 heads of 192/128: 2048 tokens on 32768": ("mla-1x2048-on-32768",),
    })  # fmt: skip
    yield from _lines_of("*-h200-joined.json", "us", {"quire": "quire", "two": "quire one after the other",
                                                      "flashinfer": "FlashInfer"}, {
        "prefill together with decodes (POD): 2 x 2048 with 128 at 2048, 1 x 4096 with 128 at 2048":
            ("pod-2x2048-with-128x2048", "pod-1x4096-with-128x2048"),
    })  # fmt: skip
    yield from _timed("*-h200-cascade.json", "plain decode", "plain", {
        "cascade: 64 requests share 8192 tokens, 256 share 32768, three levels":
            ("b64-8192+256-32/8", "b256-32768+256-64/8", "16x4x4-2048+1024+256-32/8"),
    })  # fmt: skip
    yield from _timed("*-h200-rope.json", "a copy of as many bytes", "torch-copy", {
        "8192 tokens: rotate q and k; append keys and values, too; the same as e4m3":
            ("rope-8192x32/8x128", "prologue-8192x32/8x128", "e4m3-8192x32/8x128"),
    })  # fmt: skip
    yield from _timed("*-h200-operations.json", "a copy of as many bytes", "torch-copy", {
        "`merge_states` 8192 x 4 x 32 x 128; `merge_state`; append 65,536 tokens; `packbits` of 2^28":
            ("merge_states-8192x4x32x128", "merge_state-8192x32x128", "append-65536x8x128", "packbits-2^28"),
    })  # fmt: skip
    yield from _variants()
    yield from _blocks()
    yield from _ranks()
    tokens = {name: found.get("tokens_per_s") for name, found in latest("*-h200-generate.json")["results"].items()}
    yield Line(
        "transformers' `generate()`, a Llama with the shape of Llama 3.2 1B, 8 prompts of 10 to 500 tokens", "tokens/s",
        (tokens["quire"],),
        {name: (tokens[key],) for name, key in (
            ("sdpa", "sdpa"), ("eager", "eager"), ("FlashAttention-3", "flash_attention_3"),
            ('`"quire_flash_2"`', "quire_flash_2"))},
    )  # fmt: skip


def _timed(pattern: str, title: str, provider: str, rows: Mapping[str, Sequence[str]]) -> Iterator[Line]:
    """Lines of a file whose results are one list: Quire, FlashInfer and one more way."""
    found = {(r["case"], r["provider"]): (r["timing"] or {}).get("median") for r in latest(pattern)["results"]}
    for label, names in rows.items():
        values = {key: tuple(found[name, key] for name in names) for key in ("quire", "flashinfer", provider)}
        others = {"FlashInfer": values["flashinfer"], title: values[provider]}
        yield Line(label, "us", values["quire"], others, limit=title if provider == "torch-copy" else "")


def _variants() -> Iterator[Line]:
    rows = {row["name"]: row for row in latest("*-h200-variants.json")["rows"]}

    def values(kind: str, names: Sequence[str], value: str, flex: str = "") -> Values:
        found = (rows.get(f"{kind}: {flex}{name}") for name in names)
        return tuple(row[value] if row else None for row in found)

    for label, names in (
        ("custom score: ALiBi, a soft cap, a table of biases", ("alibi", "soft cap", "table bias")),
        ("custom mask: 12 documents, a window of 1024, a prefix-LM", ("12 documents", "window 1024", "prefix-lm 1024")),
    ):
        plain = f" (plain {figure(rows['prefill: plain']['tflops'])})" if "score" in label else ""
        others = {"FlexAttention": values("prefill", names, "tflops", "flex: ")}
        yield Line(label, "TFLOP/s", values("prefill", names, "tflops"), others, plain)
    names = "alibi", "table bias"
    others = {"FlexAttention": values("decode", names, "us", "flex: ")}
    plain = f" (plain {figure(rows['decode: plain']['us'])})"
    label = "decode of 64 x 4096 with a custom score: ALiBi, a table of biases"
    yield Line(label, "us", values("decode", names, "us"), others, plain)


def _blocks() -> Iterator[Line]:
    rows = {row["name"]: row["tflops"] for row in latest("*-h200-sparse.json")["rows"]}
    names = "128x128, 10%", "128x128, 50%", "64x64, 10%"
    yield Line(
        "sparse attention, blocks of 16k x 16k: 10 % of 128 x 128, 50 %, 10 % of 64 x 64", "TFLOP/s",
        tuple(rows[f"blocks: {name}"] for name in names),
        {"FlashInfer": tuple(rows[f"blocks: {name}, flashinfer fa3"] for name in names)},
        f" (dense {figure(rows['blocks: dense'])})",
    )  # fmt: skip


def _ranks() -> Iterator[Line]:
    report = latest("*x2-distributed.json")
    found, gpu = report["results"], report["device"].split()[1]
    ways = "all_to_all", "all_gather", "peer_memory"
    decoded = found["decode"]
    yield Line(
        f"decode of 8 x 131072, 64/8, over two {gpu}s: all_to_all, all_gather, peer memory", "us",
        tuple(decoded[way]["us"] for way in ways), {f"one {gpu}": (decoded["one_gpu_us"],) * 3}, limit=f"one {gpu}",
    )  # fmt: skip
    if "exchange" in found:
        times = tuple(found["exchange"][way]["us"] for way in ways)
        yield Line(f"exchange and merge per layer on two {gpu}s, 64 requests, 64 heads: the same ways", "us", times, {})
    timed = {name: case for name, case in found.items() if "one_gpu_ms" in case}
    prefills = [case for name, case in timed.items() if name.startswith("prefill")]
    (num_qo_heads, num_kv_heads), lens = prefills[0]["heads"], [case["lens"] for case in prefills]
    yield _over_two(
        f"prefill in zigzag over two {gpu}s, {num_qo_heads}/{num_kv_heads}: "
        + ", ".join(f"{len(each)} x {each[0]}" for each in lens),
        prefills, gpu, "zigzag_peer_memory", {"with NCCL": "zigzag", "a ring": "ring_peer_memory"},
    )  # fmt: skip
    for case in (case for name, case in timed.items() if name.startswith("full")):
        text = f"full attention by Ulysses over two {gpu}s, {case['lens'][0]} tokens, {case['heads'][0]} heads"
        yield _over_two(text, [case], gpu, "ulysses", {"a ring": "ring_peer_memory"})


def _over_two(text: str, cases: list[dict[str, Any]], gpu: str, ours: str, ways: dict[str, str]) -> Line:
    """Milliseconds over two GPUs, and those of torch's context_parallel where all cases have them."""
    peers = {name: tuple(case[way]["ms"] for case in cases) for name, way in ways.items()}
    theirs = tuple(case.get("torch_cudnn", {}).get("ms") for case in cases)
    peers |= {"torch's context_parallel": theirs} if None not in theirs else {}
    half = tuple(case["one_gpu_ms"] / 2 for case in cases)
    return Line(
        text, "ms", tuple(case[ours]["ms"] for case in cases), {**peers, f"half of one {gpu}'s time": half},
        limit=f"half of one {gpu}'s time",
    )  # fmt: skip


def features() -> str:
    return table(["", "quire", "other ways"], ([*line.cells()] for line in _features()))


def cpu() -> str:
    """Speed as a multiple of torch's SDPA."""
    prefills, decodes = ("1x32/32x1024x128 causal", "1x32/32x1024x128 full"), ("8x32/32x4096x128", "8x32/8x4096x128")

    def line(report: dict[str, Any]) -> Iterator[str]:
        ratios = {result["case"]: result["speedup"] for result in report["results"]}
        name = report["cpu"].replace("(R)", "").replace(" Processor", "")
        yield f"{name}, {report['target']}, {report['date'][:10]}, load {report['load_before']}"
        for dtype in ("float32", "bfloat16"):
            yield "; ".join(f"{ratios[f'prefill {dtype} {case} NHD']:.2f}" for case in prefills)
            yield "; ".join(f"{ratios[f'decode {dtype} {case} full NHD']:.2f}" for case in decodes)

    return table(
        ["", "fp32 prefill", "decode", "bf16 prefill", "decode"], ([*line(report)] for report in newest_of_each_cpu())
    )


# --- a summary -------------------------------------------------------------------------------------------------------


class Summary(NamedTuple):
    """Quire beside the fastest other library."""

    label: str
    unit: str  #: us or TFLOP/s
    quire: float
    rival: str
    other: float

    @property
    def ratio(self) -> float:
        """Quire's speed, as a multiple of the other's."""
        return self.other / self.quire if self.unit == "us" else self.quire / self.other


#: Rows of attention.py, as the summary describes them; and lines of the table of features, of which each has a column.
SUMMARY = {
    "prefill, 2 x 8192 tokens, pages of 16": "prefill-p16-causal-b2-8k",
    "chunks of 512 on 8192 tokens": "append-q512-kv8k-b8",
    "prefill over an 8-bit cache": "prefill-p16-e4m3-b2-8k",
    "decode, 64 x 4096": "decode-b64-kv4k-p16",
    "decode, 128 requests of 16 to 32768": "decode-b128-skewed",
}
SUMMARY_OF_FEATURES = {
    "decode with latents (MLA), 64 x 4096": ("MLA decode, 128 heads: 64 x 4096, 2 queries each, 16 x 16384", 0),
    "decode, 64 requests share 8192 tokens": (
        "cascade: 64 requests share 8192 tokens, 256 share 32768, three levels", 0,
    ),
    "prefill, a custom mask: 12 documents": ("custom mask: 12 documents, a window of 1024, a prefix-LM", 0),
}  # fmt: skip


def summaries() -> Iterator[Summary]:
    measured = {row["row"]: row for row in latest("*-h200-attention.json")["rows"]}
    for label, name in SUMMARY.items():
        is_time = name.startswith("decode")
        columns = DECODE_COLUMNS if is_time else PREFILL_COLUMNS
        values = {
            r["provider"]: float(r["timing"]["median"] if is_time else r["rate"])
            for r in measured[name]["results"] if r["timing"]
        }  # fmt: skip
        best_of = min if is_time else max
        found = {title: best_of((values[n] for n in names if n in values), default=None)
                 for title, names in columns.items()}  # fmt: skip
        yield _summary(label, "us" if is_time else "TFLOP/s", found)
    lines = {line.label: line for line in _features()}
    for label, (name, column) in SUMMARY_OF_FEATURES.items():
        line = lines[name]
        rivals = {title: values[column] for title, values in line.others.items()}
        yield _summary(label, line.unit, {"quire": line.quire[column], **rivals})


def _summary(label: str, unit: str, found: Mapping[str, float | None]) -> Summary:
    known = {title: value for title, value in found.items() if value is not None}
    own = known.pop("quire")
    rival = (min if unit == "us" else max)(known, key=lambda title: known[title])
    return Summary(label, unit, own, rival.replace(" (contiguous)", ""), known[rival])


def summary() -> str:
    def cells(row: Summary) -> Sequence[str]:
        return row.label, f"{figure(row.quire)} {row.unit}", f"{figure(row.other)} ({row.rival})", f"{row.ratio:.2f}"

    return table(["on one H200", "Quire", "the fastest other library", "times as fast"], map(cells, summaries()))


TABLES: dict[str, Callable[[], str]] = {
    "summary": summary, "prefill": prefill, "decode": decode, "features": features, "cpu": cpu,
}  # fmt: skip
FILES = ROOT / "README.md", ROOT / "docs" / "measured.md"


def filled(text: str) -> str:
    """The text with what its marks name between them."""

    def between(match: re.Match[str]) -> str:
        return f"{match.group(1)}\n{TABLES[match.group(2)]()}\n{match.group(3)}"

    return re.sub(r"(<!-- table: (\w+) -->)\n.*?\n(<!-- end -->)", between, text, flags=re.DOTALL)


def write() -> None:
    for path in FILES:
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write()
