"""Attention problems for the tests: random inputs, every way to lay out a cache, and one call that compares.

Whatever a kernel must not read is NaN: pages that no request owns, the tail of last pages, the gaps of strided views,
and outputs that are passed in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import oracle
from quire.engine.device import target_of
from quire.kernels import AttentionProblem
from quire.kernels.features import MaskMode, dtype_of
from quire.kernels.portable import DECODE
from targets import pin

WORKSPACE_BYTES = 64 << 20
#: Options of positions, by the names of plan() and of a Problem.
POSITIONS = ("pos_encoding_mode", "rope_scale", "rope_theta")

#: Every head dim there is. Each is a variant to compile: the odd ones only where the slow tests run.
HEAD_DIMS = [
    pytest.param(dim, marks=[] if dim in (32, 64, 80, 128, 256) else [pytest.mark.slow]) for dim in range(32, 257, 16)
]
_workspaces: dict[str, Tensor] = {}


def workspace(device: str) -> Tensor:
    """One workspace per device, shared by all tests: what an earlier launch left in it must not matter."""
    if device not in _workspaces:
        _workspaces[device] = torch.full((WORKSPACE_BYTES,), 0xFF, dtype=torch.uint8, device=device)
    return _workspaces[device]


def ints(values: Sequence[int] | Tensor, device: str) -> Tensor:
    """int32 on `device`."""
    return torch.as_tensor(values, dtype=torch.int32).to(device)


def offsets(lens: Sequence[int], device: str = "cpu") -> Tensor:
    """int32 [len(lens) + 1]: where requests of these lengths begin, and the end of the last one."""
    return ints(oracle.indptr_of(lens), device)


def any_dtype(device: str) -> torch.dtype:
    """A number type that every kernel of the device takes, for tests that ask about something else."""
    return torch.float32 if device == "cpu" else torch.bfloat16


def poisoned(shape: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
    """A tensor of NaN."""
    return torch.full(tuple(shape), math.nan, dtype=dtype, device=device)


@dataclass(frozen=True)
class PagedCache:
    """A paged cache and its tables, ready for plan() and run()."""

    kv: Tensor | tuple[Tensor, Tensor]
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    page_size: int
    kv_layout: str

    def tables(self, device: str | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """indptr, indices, last_page_len; the first and the last moved to `device`."""
        move = (lambda t: t) if device is None else (lambda t: t.to(device))
        return move(self.indptr), self.indices, move(self.last_page_len)


#: A page number that is nobody's: the rest of a row of a block table.
NOWHERE = 1 << 30


def block_tables(cache: PagedCache, spare: int = 2) -> Tensor:
    """The page numbers of a cache, one row a request, with `spare` numbers of no page behind the longest."""
    indices, ends = cache.indices.tolist(), cache.indptr.tolist()
    rows = [indices[a:b] for a, b in pairwise(ends)]
    width = max([len(row) for row in rows], default=0) + spare
    table = [row + [NOWHERE] * (width - len(row)) for row in rows]
    return ints(table, str(cache.indices.device)).view(len(rows), width)


def _pages(tokens: Tensor, lens: Sequence[int], order: Sequence[int], page_size: int, num_pages: int) -> Tensor:
    """Ragged tokens in NHD pages, all else NaN. order: the page numbers, request after request."""
    pages = poisoned((num_pages, page_size, *tokens.shape[1:]), tokens.dtype, str(tokens.device))
    free, at = iter(order), 0
    for n in lens:
        for begin in range(0, n, page_size):
            count = min(page_size, n - begin)
            pages[next(free), :count] = tokens[at : at + count]
            at += count
    return pages


def _lay_out(k: Tensor, v: Tensor, kv_layout: str, signature: str) -> Tensor | tuple[Tensor, Tensor]:
    """NHD pages k, v in one of the forms that run() takes.

    tensor: one 5-D tensor; tuple: two contiguous 4-D tensors; permuted: a 5-D view whose storage has the other layout;
    sliced: views of bigger tensors, with other strides for k than for v.
    """
    swap = kv_layout == "HND"
    if signature == "permuted":
        stored = torch.stack([k, v], 1) if swap else torch.stack([k.transpose(1, 2), v.transpose(1, 2)], 1)
        return stored.contiguous().transpose(2, 3)
    k, v = ((t.transpose(1, 2) if swap else t).contiguous() for t in (k, v))
    if signature == "tensor":
        return torch.stack([k, v], 1)
    if signature == "tuple":
        return k, v
    assert signature == "sliced"
    wide_k = poisoned((*k.shape[:3], k.shape[3] + 16), k.dtype, str(k.device))
    wide_k[..., : k.shape[3]] = k
    wide_v = poisoned((v.shape[0], v.shape[1] + 1, v.shape[2] + 2, v.shape[3]), v.dtype, str(v.device))
    wide_v[:, 1:, 1:-1] = v
    return wide_k[..., : k.shape[3]], wide_v[:, 1:, 1:-1]


FORMS = ("tensor", "tuple", "permuted", "sliced")


@dataclass
class Problem:
    """Random queries, keys and values of a batch, ragged, and the options of attention.

    Tensors are as long as `qo_lens` and `kv_lens` say; `logits` are the options that both the oracle and plan() take.
    """

    qo_lens: Sequence[int]
    kv_lens: Sequence[int]
    num_qo_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    head_dim_vo: int | None = None
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None  #: of keys and values; None: dtype
    k_scale: float = 1.0  #: what keys and values as they are stored are to be multiplied by
    v_scale: float = 1.0
    device: str = "cpu"
    causal: bool = False
    mask: Tensor | None = None  #: flat bool
    window_left: int = -1
    soft_cap: float | None = None
    sm_scale: float | None = None
    pos_encoding_mode: str = "NONE"
    rope_scale: float | None = None
    rope_theta: float | None = None
    attention_chunk_size: int | None = None
    seed: int = 0
    q: Tensor = field(init=False)
    k: Tensor = field(init=False)
    v: Tensor = field(init=False)

    def __post_init__(self) -> None:
        """Draws the inputs on the CPU, so that every device gets the same."""
        source = torch.Generator().manual_seed(self.seed)
        dim_vo = self.head_dim if self.head_dim_vo is None else self.head_dim_vo

        def draw(rows: int, heads: int, dim: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
            return (torch.randn(rows, heads, dim, generator=source) / scale).to(dtype).to(self.device)

        stored = self.kv_dtype or self.dtype
        self.q = draw(sum(self.qo_lens), self.num_qo_heads, self.head_dim, self.dtype)
        self.k = draw(sum(self.kv_lens), self.num_kv_heads, self.head_dim, stored, self.k_scale)
        self.v = draw(sum(self.kv_lens), self.num_kv_heads, dim_vo, stored, self.v_scale)

    @property
    def qo_indptr(self) -> list[int]:
        """Rows of q, [batch_size + 1]."""
        return oracle.indptr_of(self.qo_lens)

    @property
    def kv_indptr(self) -> list[int]:
        """Rows of k, [batch_size + 1]."""
        return oracle.indptr_of(self.kv_lens)

    def within_tiles(self, backend: str) -> Problem:
        """The same, or a problem of fewer queries, if `backend` is decode and a typical request has more rows than its
        highest tile on this GPU.
        """
        if backend != pin("decode"):
            return self
        q, kv = dtype_of(self.dtype, "q"), dtype_of(self.kv_dtype or self.dtype, "kv")
        target, dims = target_of(torch.device(self.device)), (self.head_dim, self.v.shape[2])
        tiles = DECODE.tiles(AttentionProblem(target, q, kv, q, *dims, 0, MaskMode.NONE, False, False, rows=16))
        most = tiles[-1].rows * self.num_kv_heads // self.num_qo_heads if tiles else 0
        typical = -(-sum(self.qo_lens) // max(1, len(self.qo_lens)))
        if typical <= most or not most:
            return self
        return replace(self, qo_lens=[n * most // typical for n in self.qo_lens])

    def random_mask(self, density: float = 0.5, seed: int = 1) -> Problem:
        """The same problem under a random custom mask."""
        bits = sum(a * b for a, b in zip(self.qo_lens, self.kv_lens, strict=True))
        source = torch.Generator().manual_seed(seed)
        self.mask = (torch.rand(bits, generator=source) < density).to(self.device)
        return self

    def block_mask(self, rows: int = 50, keys: int = 150, seed: int = 1) -> Problem:
        """The same problem under a custom mask of blocks of which all is seen, nothing, or half at random."""
        source, masks = torch.Generator().manual_seed(seed), []
        for qo_len, kv_len in zip(self.qo_lens, self.kv_lens, strict=True):
            density = torch.randint(3, (qo_len // rows + 1, kv_len // keys + 1), generator=source) / 2
            density = density.repeat_interleave(rows, 0)[:qo_len].repeat_interleave(keys, 1)[:, :kv_len]
            masks.append(torch.rand(qo_len, kv_len, generator=source) < density)
        self.mask = torch.cat([mask.flatten() for mask in masks]).to(self.device)
        return self

    def packed_mask(self) -> Tensor:
        """The custom mask as plan(packed_custom_mask=) wants it."""
        assert self.mask is not None
        cuts = oracle.indptr_of([a * b for a, b in zip(self.qo_lens, self.kv_lens, strict=True)])
        return oracle.segment_packbits(self.mask.cpu(), cuts, "little")[0].to(self.device)

    def expected(self, **more: object) -> oracle.State:
        """The truth, in float64 on the CPU."""
        return oracle.attention(self.q, self.k, self.v, self.qo_indptr, self.kv_indptr, **self._options(more))

    def torch_error(self, **more: object) -> Tensor:
        """Torch's own answer in the dtype of the problem."""
        return oracle.torch_error(self.q, self.k, self.v, self.qo_indptr, self.kv_indptr, **self._options(more))

    def _options(self, more: Mapping[str, object]) -> dict[str, object]:
        own = {n: getattr(self, n) for n in ("causal", "mask", "window_left", "soft_cap", "v_scale", *POSITIONS)}
        own["attention_chunk_size"] = self.attention_chunk_size
        return {**own, "sm_scale": self._logits_scale(), **more}

    def _logits_scale(self) -> float:
        return self.k_scale * (1.0 / math.sqrt(self.head_dim) if self.sm_scale is None else self.sm_scale)

    def plan_options(self) -> dict[str, object]:
        """Keywords for the plan() of a prefill wrapper."""
        options: dict[str, object] = {"causal": self.causal, "window_left": self.window_left, "sm_scale": self.sm_scale}
        options |= {"logits_soft_cap": self.soft_cap, "q_data_type": self.dtype}
        options |= {name: getattr(self, name) for name in POSITIONS}
        if self.mask is not None:
            options["custom_mask"] = self.mask
        if self.attention_chunk_size is not None:
            options["attention_chunk_size"] = self.attention_chunk_size
        return options

    def paged(
        self, page_size: int = 8, kv_layout: str = "NHD", signature: str = "tuple", spare: int = 3, order_seed: int = 0
    ) -> PagedCache:
        """The keys and values in pages of a random order, with `spare` pages of NaN among them."""
        counts = [-(-n // page_size) for n in self.kv_lens]
        num_pages = sum(counts) + spare
        shuffle = torch.Generator().manual_seed(order_seed)
        order = torch.randperm(num_pages, generator=shuffle)[: sum(counts)].tolist()
        k, v = (_pages(t, self.kv_lens, order, page_size, num_pages) for t in (self.k, self.v))
        last = [(n - 1) % page_size + 1 if n else 0 for n in self.kv_lens]
        return PagedCache(
            kv=_lay_out(k, v, kv_layout, signature),
            indptr=ints(oracle.indptr_of(counts), self.device),
            indices=ints(order, self.device),
            last_page_len=ints(last, self.device),
            page_size=page_size,
            kv_layout=kv_layout,
        )

    def check(self, out: Tensor, lse: Tensor | None = None, **more: object) -> None:
        """Compares a result with the truth; `more` overrides options of the oracle (sinks, v_scale, ...)."""
        assert out.dtype == self.dtype, f"o: dtype {out.dtype}, expected {self.dtype}"
        assert out.device == self.q.device
        truth = self.expected(**more)
        oracle.assert_close(out, truth.o, self.torch_error(**more), self.qo_indptr)
        if lse is not None:
            assert lse.device == self.q.device
            magnitude = self._largest_logit() + self._largest_bias()
            rounded = self._rounded_lse(more) if self._rotates_in_16_bits() else None
            oracle.assert_lse_close(lse, truth.lse, magnitude=magnitude, soft_cap=self.soft_cap, rounded=rounded)

    def _rotates_in_16_bits(self) -> bool:
        """Whether a kernel rounds what it has rotated: GPUs do, for tensor cores."""
        return self.pos_encoding_mode == "ROPE_LLAMA" and target_of(self.q.device).startswith("sm")

    def _rounded_lse(self, more: Mapping[str, object]) -> Tensor:
        return self.expected(**{**more, "rotated_dtype": self.dtype}).lse

    def _largest_bias(self) -> float:
        """What ALiBi adds to a logit at most, in base 2: float32 rounds the lse relatively to it."""
        if self.pos_encoding_mode != "ALIBI":
            return 0.0
        lens = zip(self.qo_lens, self.kv_lens, strict=True)
        return max((abs(kv_len - qo_len) + kv_len for qo_len, kv_len in lens), default=0) * math.log2(math.e)

    def _largest_logit(self) -> float:
        if not self.q.numel() or not self.k.numel():
            return 1.0
        norms = [float(t.cpu().double().norm(dim=2).amax()) for t in (self.q, self.k)]
        return norms[0] * norms[1] * abs(self._logits_scale()) * math.log2(math.e)


def equal_queries(q_len: int, kv_lens: Sequence[int], **options: object) -> Problem:
    """q_len queries of each request, causal if they are several."""
    return Problem((q_len,) * len(kv_lens), kv_lens, **{"causal": q_len > 1, **options})
