"""`quire bench` without a record: this machine's attention, of Quire and of the libraries that are installed beside it.

All libraries compute the same rows, in turn, in one process. A result that is not Quire's within rounding is left out.
"""

from __future__ import annotations

import argparse
import importlib
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from importlib.util import find_spec
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import quire
from quire.cli import tell
from quire.jit.machine import host_target

if TYPE_CHECKING:
    import torch

Launch = Callable[[], "torch.Tensor"]
_PAGE, _LATENT, _ROPE = 16, 512, 64
_FLUSHED = 256 << 20  #: bytes that empty the L2 of a GPU before each launch
_MOST_ROUNDS, _LEAST_ROUNDS = 200, 5
_PATIENCE = 2  #: times a row's seconds, after which a slow machine has made enough rounds
_TOLERANCE = 0.02  #: of the largest result: bf16 has 8 bits


class Row(NamedTuple):
    """A batch."""

    name: str
    new: list[int]  #: queries of each request
    lens: list[int]  #: keys of each request
    heads: tuple[int, int] = (32, 8)
    dim: int = 128
    latents: bool = False


def rows_for(on_gpu: bool) -> list[Row]:
    """What is measured: on a CPU with fewer tokens."""
    mixed = [16 << (i % 12) for i in range(128)] if on_gpu else [16 << (i % 7) for i in range(16)]
    if on_gpu:
        return [
            Row("prefill, 2 x 8192 tokens", [8192] * 2, [8192] * 2),
            Row("chunks of 512 on 8192 tokens, 8 requests", [512] * 8, [8192] * 8),
            Row("decode, 64 x 4096 tokens", [1] * 64, [4096] * 64),
            Row("decode, 128 requests of 16 to 32768 tokens", [1] * 128, mixed),
            Row("decode with latents (MLA), 64 x 4096 tokens", [1] * 64, [4096] * 64, (128, 1), 576, latents=True),
        ]
    return [
        Row("prefill, 1024 tokens", [1024], [1024]),
        Row("chunks of 64 on 1024 tokens, 4 requests", [64] * 4, [1024] * 4),
        Row("decode, 16 x 1024 tokens", [1] * 16, [1024] * 16),
        Row("decode, 16 requests of 16 to 1024 tokens", [1] * 16, mixed),
        Row("decode with latents (MLA), 8 x 512 tokens", [1] * 8, [512] * 8, (16, 1), 576, latents=True),
    ]


class Batch:
    """The tensors of a row."""

    def __init__(self, row: Row, device: torch.device, dtype: torch.dtype) -> None:
        import torch

        self.row, self.device, self.dtype = row, device, dtype
        draw = partial(torch.randn, dtype=dtype, device=device)
        pages = [-(-n // _PAGE) for n in row.lens]
        self.q = draw(sum(row.new), row.heads[0], row.dim)
        self.cache = draw(sum(pages), 2, _PAGE, row.heads[1], row.dim) if not row.latents else None
        self.latents = draw(sum(pages), _PAGE, row.dim) if row.latents else None
        self.numbers = torch.randperm(sum(pages), dtype=torch.int32, device=device)
        self.qo_indptr, self.kv_indptr = self._offsets(row.new), self._offsets(pages)
        self.last = torch.tensor([(n - 1) % _PAGE + 1 for n in row.lens], dtype=torch.int32, device="cpu")
        self.lens = torch.tensor(row.lens, dtype=torch.int32, device=device)
        self.scale = (192 if row.latents else row.dim) ** -0.5
        table = [list(range(int(b), int(e))) for b, e in zip(self.kv_indptr[:-1], self.kv_indptr[1:], strict=True)]
        places = torch.tensor([line + [0] * (max(pages) - len(line)) for line in table], device=device)
        self.table = self.numbers[places]

    def _offsets(self, lens: Sequence[int]) -> torch.Tensor:
        import torch

        return torch.tensor([0, *lens], device="cpu").cumsum(0).int()

    def by_requests(self) -> torch.Tensor:
        """Queries [batch, tokens, heads, dim] of requests of one length."""
        return self.q.view(len(self.row.new), self.row.new[0], *self.q.shape[1:])

    def contiguous(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [batch, heads, tokens, dim] of requests of one length."""
        assert self.cache is not None
        pages = self.cache[self.table.long()]  # [batch, pages, 2, page, heads, dim]
        k, v = pages.movedim(2, 0).flatten(2, 3)[:, :, : self.row.lens[0]].transpose(2, 3)
        return k.contiguous(), v.contiguous()


# --- libraries -------------------------------------------------------------------------------------------------------


def _quire(b: Batch) -> Launch | None:
    return _wrappers(quire, b)


def _flashinfer(b: Batch) -> Launch | None:
    """The library, if it is not Quire under its name."""
    library = importlib.import_module("flashinfer")
    if b.device.type != "cuda" or library.BatchDecodeWithPagedKVCacheWrapper.__module__.startswith("quire"):
        return None
    return _wrappers(library, b)


def _wrappers(library: Any, b: Batch) -> Launch:
    """FlashInfer's wrappers, of either library."""
    import torch

    workspace, row = torch.empty(256 << 20, dtype=torch.uint8, device=b.device), b.row
    types, tables = {"q_data_type": b.dtype, "kv_data_type": b.dtype}, (b.kv_indptr, b.numbers, b.last)
    if row.latents:
        mla = library.mla.BatchMLAPagedAttentionWrapper(workspace)
        lens = b.lens.cpu() if library is quire else b.lens
        arrays = (
            [b.qo_indptr, b.kv_indptr] if library is quire else [b.qo_indptr.to(b.device), b.kv_indptr.to(b.device)]
        )
        mla.plan(*arrays, b.numbers, lens, row.heads[0], _LATENT, _ROPE, _PAGE, False, b.scale, b.dtype, b.dtype)
        assert b.latents is not None
        parts = b.q[..., :_LATENT], b.q[..., _LATENT:], b.latents[..., :_LATENT], b.latents[..., _LATENT:]
        return lambda: mla.run(*(part.contiguous() if library is not quire else part for part in parts))
    if set(row.new) == {1}:
        decode = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        decode.plan(*tables, *row.heads, row.dim, _PAGE, **types)
        return lambda: decode.run(b.q, b.cache)
    prefill = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    prefill.plan(b.qo_indptr, *tables, *row.heads, row.dim, _PAGE, causal=True, **types)
    return lambda: prefill.run(b.q, b.cache)


def _torch(b: Batch) -> Launch | None:
    """scaled_dot_product_attention() of requests of one length, over keys without pages."""
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention

    row = b.row
    if row.latents or len(set(row.lens)) > 1:
        return None
    k, v = b.contiguous()
    q = b.by_requests().transpose(1, 2)
    options: dict[str, Any] = {"scale": b.scale}
    if row.new[0] == row.lens[0]:
        options["is_causal"] = True
    elif row.new[0] > 1:
        options["attn_mask"] = causal_lower_right(row.new[0], row.lens[0])

    def launch(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        grouped = k.shape[1] != q.shape[1]
        return scaled_dot_product_attention(q, k, v, enable_gqa=grouped, **options).transpose(1, 2).flatten(0, 1)

    # Some of its kernels take no groups of heads, and others are so much faster that repeated keys pay.
    ways = partial(launch, k, v), partial(launch, *(t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v)))
    return min(ways, key=lambda way: min(_time(way, b.device, lambda: None) for _ in range(3)))


def _flash_attn_2(b: Batch) -> Launch | None:
    """Over keys without pages, as its pages have 256 tokens."""
    function = importlib.import_module("flash_attn").flash_attn_with_kvcache
    row = b.row
    if b.device.type != "cuda" or row.latents or len(set(row.lens)) > 1 or function.__module__.startswith("quire"):
        return None
    k, v = (t.transpose(1, 2).contiguous() for t in b.contiguous())
    q = b.by_requests()
    return lambda: function(q, k, v, cache_seqlens=b.lens, softmax_scale=b.scale, causal=True).flatten(0, 1)


def _flash_attn_3(b: Batch) -> Launch | None:
    function = importlib.import_module("flash_attn_interface").flash_attn_with_kvcache
    if b.device.type != "cuda" or b.cache is None or function.__module__.startswith("quire"):
        return None
    offsets, cache = b.qo_indptr.to(b.device), b.cache
    return lambda: function(
        b.q, cache[:, 0], cache[:, 1], cache_seqlens=b.lens, page_table=b.table, cu_seqlens_q=offsets,
        max_seqlen_q=max(b.row.new), softmax_scale=b.scale, causal=True,
    )  # fmt: skip


def _flash_mla(b: Batch) -> Launch | None:
    library = importlib.import_module("flash_mla")
    if b.latents is None or b.device.type != "cuda" or library.flash_mla_with_kvcache.__module__.startswith("quire"):
        return None
    pages = b.latents[b.table.long()].reshape(-1, 64, 1, b.row.dim)
    table = b.numbers.new_tensor(range(pages.shape[0])).view(len(b.row.new), -1)
    metadata = library.get_mla_metadata(b.lens, b.row.heads[0], 1)
    q = b.q.unsqueeze(1)
    call = partial(library.flash_mla_with_kvcache, q, pages, table, b.lens, _LATENT, *metadata, b.scale, True)
    return lambda: call()[0].squeeze(1)


#: Libraries: the package that has to be installed, the name for readers, and what makes a launch (None: not this row).
_LIBRARIES: tuple[tuple[str, str, Callable[[Batch], Launch | None]], ...] = (
    ("quire", "Quire", _quire), ("flashinfer", "FlashInfer", _flashinfer),
    ("flash_attn", "FlashAttention-2", _flash_attn_2), ("flash_attn_interface", "FlashAttention-3", _flash_attn_3),
    ("flash_mla", "FlashMLA", _flash_mla), ("torch", "torch", _torch),
)  # fmt: skip


# --- measuring -------------------------------------------------------------------------------------------------------


class Measured(NamedTuple):
    """A row: seconds of each library that computed it, and why others did not."""

    row: str
    seconds: dict[str, float]
    reasons: dict[str, str]

    @property
    def rival(self) -> tuple[str, float] | None:
        """The fastest library beside Quire."""
        others = {name: seconds for name, seconds in self.seconds.items() if name != "Quire"}
        return min(others.items(), key=lambda item: item[1]) if others else None


def measure(row: Row, device: torch.device, dtype: torch.dtype, seconds: float) -> Measured:
    """Time all libraries in turn, within `seconds`, or on a slow machine within _PATIENCE times as long."""
    batch = Batch(row, device, dtype)
    launches, reasons = _launches(batch)
    times: dict[str, list[float]] = {name: [] for name in launches}
    begin, flush = time.monotonic(), _flush(device)
    for number in range(_MOST_ROUNDS):
        for name in Random(number).sample(list(launches), len(launches)):
            times[name].append(_time(launches[name], device, flush))
        if time.monotonic() - begin > (seconds if number + 1 >= _LEAST_ROUNDS else _PATIENCE * seconds):
            break
    return Measured(row.name, {name: median(taken) for name, taken in times.items()}, reasons)


def _launches(batch: Batch) -> tuple[dict[str, Launch], dict[str, str]]:
    """Launches whose results agree with Quire's."""
    launches, reasons, right = dict[str, Launch](), dict[str, str](), None
    for package, name, make in _LIBRARIES:
        if find_spec(package) is None:
            continue
        try:
            launch = make(batch)
            if launch is None:
                continue
            result = launch().float()
        except Exception as error:  # of another library, whatever it is
            if name == "Quire":
                raise
            reasons[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:100]}"
            continue
        right = result if right is None else right
        difference = float((result - right).abs().max()) / float(right.abs().max())
        if difference > _TOLERANCE:
            reasons[name] = f"its result differs by {difference:.3f} of the largest number"
        else:
            launches[name] = launch
    return launches, reasons


def _flush(device: torch.device) -> Callable[[], object]:
    import torch

    if device.type != "cuda":
        return lambda: None
    return torch.empty(_FLUSHED, dtype=torch.uint8, device=device).zero_


def _time(launch: Launch, device: torch.device, flush: Callable[[], object]) -> float:
    """Seconds of one launch: of a GPU by its own clock."""
    if device.type != "cuda":
        start = time.perf_counter()
        launch()
        return time.perf_counter() - start
    import torch

    cuda: Any = torch.cuda
    begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    flush()
    cuda._sleep(200_000)  # the host is ahead when the launch begins
    begin.record()
    launch()
    end.record()
    cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


# --- what comes out --------------------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> int:
    """Measure, print the table, and write it and the picture."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    has_matrix_unit = host_target(matrix_unit=True) != host_target()
    dtype = torch.bfloat16 if device.type == "cuda" or has_matrix_unit else torch.float32
    rows = rows_for(device.type == "cuda")
    with torch.inference_mode():
        measured = [measure(row, device, dtype, options.seconds / len(rows)) for row in rows]
    about = _about(device, dtype)
    table = markdown(about, measured)
    files = {".md": table, ".svg": picture(about, measured)}
    for suffix, text in files.items():
        options.out.with_suffix(suffix).write_text(text, encoding="utf-8")
    written = ", ".join(str(options.out.with_suffix(suffix)) for suffix in files)
    return tell(options, f"{table}\nwrote {written}", about=about, rows=[one._asdict() for one in measured])


def _about(device: torch.device, dtype: torch.dtype) -> str:
    import torch

    threads = torch.get_num_threads()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{_processor()}, {threads} threads"
    return f"{name}, {str(dtype).removeprefix('torch.')}, torch {torch.__version__}, Quire {quire.__version__}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else host_target()


def markdown(about: str, measured: Sequence[Measured]) -> str:
    """A table: a column for each library."""
    names = list(dict.fromkeys(name for one in measured for name in one.seconds))
    lines = [
        f"{about}; median times",
        "",
        f"| | {' | '.join(names)} | times as fast |",
        f"| --- |{' --- |' * (len(names) + 1)}",
    ]
    for one in measured:
        cells = [_spell(one.seconds[name]) if name in one.seconds else "" for name in names]
        ratio = "" if one.rival is None else f"{one.rival[1] / one.seconds['Quire']:.2f}"
        lines.append(f"| {one.row} | {' | '.join(cells)} | {ratio} |")
    reasons = dict.fromkeys(f"{name}, {one.row}: {why}" for one in measured for name, why in one.reasons.items())
    return "\n".join([*lines, *([""] if reasons else []), *(f"- {reason}" for reason in reasons)]) + "\n"


def _spell(seconds: float) -> str:
    unit, factor = ("us", 1e6) if seconds < 1e-3 else ("ms", 1e3)
    value = seconds * factor
    return f"{value:.{max(0, 2 - int(math.log10(value)))}f} {unit}"


_WIDTH, _BAR, _LINE, _LEFT = 760, 260, 44, 330


def picture(about: str, measured: Sequence[Measured]) -> str:
    """Bars: how many times as fast Quire is as the fastest other library, whose name stands beside the bar."""
    compared = [(one.row, one.rival[0], one.rival[1] / one.seconds["Quire"]) for one in measured if one.rival]
    most = max([1.0, *(ratio for *_, ratio in compared)])
    height = 40 + _LINE * max(1, len(compared))
    x = _LEFT + _BAR / most
    font = 'font-family="sans-serif" font-size="13"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" {font}>',
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="10" y="20" fill="#444">Quire, times as fast as the fastest other library: {escape(about)}</text>',
        f'<line x1="{x:.1f}" y1="30" x2="{x:.1f}" y2="{height - 6}" stroke="#999"/>',
    ]
    if not compared:
        parts.append('<text x="10" y="56" fill="#444">no other library is installed that computes these rows</text>')
    for i, (row, rival, ratio) in enumerate(compared):
        y, colour = 40 + i * _LINE, "#00796b" if ratio >= 1 else "#b35c00"
        parts += [
            f'<text x="{_LEFT - 8}" y="{y + 17}" text-anchor="end">{escape(row)}</text>',
            f'<rect x="{_LEFT}" y="{y}" width="{_BAR * ratio / most:.1f}" height="24" fill="{colour}"/>',
            f'<text x="{_LEFT + _BAR * ratio / most + 6:.1f}" y="{y + 17}">{ratio:.2f} ({escape(rival)})</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"
