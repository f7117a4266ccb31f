"""Problems of multi-head latent attention for the tests: random inputs, pages that hold them, and a comparison.

Whatever a kernel must not read is NaN: pages that no request owns, the tail of last pages, and the gaps of views.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

import oracle
import quire
from problems import ints, poisoned
from quire.engine.device import target_of
from quire.kernels import AttentionKey, kernel_of

SCALE = 192**-0.5
BYTES, E4M3 = 656, torch.float8_e4m3fn  #: of a latent in a row with scales, and the type of its numbers


def skips_gaps(device: str) -> bool:
    """Whether the kernel of a device skips indices that name no token. For others torch moves the tokens to the front:
    their number is another in each call, so that each one plans, and none is repeated as it was recorded.
    """
    target = target_of(torch.device(device))
    chosen = {"head_dim": 576, "head_dim_vo": 512, "dtype": torch.bfloat16, "page_size": 1, "mask": "none", "rows": 16}
    return kernel_of(AttentionKey.parse(quire.is_supported(**chosen, target=target).slug)).has_gaps


@dataclass
class Latents:
    """Random queries and latents of a batch, ragged, and the options of the call."""

    qo_lens: Sequence[int]
    kv_lens: Sequence[int]
    num_heads: int = 16
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    causal: bool = False
    sinks: Tensor | None = None
    seed: int = 0
    outlier: float = 1.0  #: by which one dim of latents is larger than the others
    kv_dtype: torch.dtype | None = None  #: of latents; None: dtype
    scale: float = 1.0  #: what latents as they are stored are to be multiplied by
    query: Tensor = field(init=False)  #: [nnz_qo, num_heads, 576]
    keys: Tensor = field(init=False)  #: [nnz_kv, 576]

    def __post_init__(self) -> None:
        """Draws the inputs on the CPU, so that every device gets the same."""
        source = torch.Generator().manual_seed(self.seed)
        self.query = torch.randn(sum(self.qo_lens), self.num_heads, 576, generator=source)
        self.keys = torch.randn(sum(self.kv_lens), 576, generator=source)
        self.keys[:, 7] *= self.outlier
        self.query = self.query.to(self.dtype).to(self.device)
        self.keys = (self.keys / self.scale).to(self.kv_dtype or self.dtype).to(self.device)

    @property
    def qo_indptr(self) -> list[int]:
        """Rows of the queries, [batch_size + 1]."""
        return oracle.indptr_of(self.qo_lens)

    def expected(self, dtype: torch.dtype = torch.float64) -> oracle.State:
        """The truth in float64, or torch's own answer, each operation rounded to `dtype`."""
        keys = self.keys.float() * self.scale
        parts = self.query[..., :512], self.query[..., 512:], keys[:, :512], keys[:, 512:]
        kv_indptr = oracle.indptr_of(self.kv_lens)
        return oracle.latent_attention(
            *(part.cpu() for part in parts), self.qo_indptr, kv_indptr, causal=self.causal, sm_scale=SCALE,
            sinks=self.sinks, dtype=dtype,
        )  # fmt: skip

    def check(self, out: Tensor, lse: Tensor | None = None) -> None:
        """Compares a result, and its base-2 lse, with the truth."""
        assert out.dtype == self.dtype
        truth = self.expected()
        oracle.assert_close(out, truth.o, self.expected(self.dtype).o.double(), self.qo_indptr)
        if lse is not None:
            norms = [float(t.cpu().double().norm(dim=-1).amax()) if t.numel() else 0.0 for t in (self.query, self.keys)]
            magnitude = norms[0] * norms[1] * self.scale * SCALE * math.log2(math.e) + 1.0
            oracle.assert_lse_close(lse, truth.lse, magnitude=magnitude)

    def paged(self, page_size: int = 16, form: str = "joined", spare: int = 3) -> LatentPages:
        """The latents in pages of a random order, with `spare` pages of NaN among them.

        joined: views of one tensor of 576 dims; split: two tensors; sliced: views of a wider one, pages apart.
        """
        counts = [-(-n // page_size) for n in self.kv_lens]
        num_pages, width = sum(counts) + spare, 576 if form == "joined" else 640
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(self.seed))[: sum(counts)].tolist()
        pages = poisoned((num_pages, page_size + (form == "sliced"), width), torch.float32, self.device)
        free, at = iter(order), 0
        for n in self.kv_lens:
            for begin in range(0, n, page_size):
                count = min(page_size, n - begin)
                pages[next(free), :count, :576] = self.keys[at : at + count].float()
                at += count
        pages = pages.to(self.keys.dtype)
        ckv, kpe = pages[:, :page_size, :512], pages[:, :page_size, 512:576]
        if form == "split":
            ckv, kpe = ckv.contiguous(), kpe.contiguous()
        return LatentPages(ckv, kpe, oracle.indptr_of(counts), order, page_size)


@dataclass(frozen=True)
class LatentPages:
    """A paged cache of latents and its tables."""

    ckv: Tensor
    kpe: Tensor
    indptr: list[int]
    indices: list[int]
    page_size: int

    def table(self, device: str) -> Tensor:
        """Page numbers [batch_size, pages], those that no request has beyond any cache."""
        counts = oracle.lengths(self.indptr)
        rows = torch.full((len(counts), max([*counts, 1])), 2**30, dtype=torch.int32)
        for row, begin, count in zip(rows, self.indptr, counts, strict=False):
            row[:count] = ints(self.indices[begin : begin + count], "cpu")
        return rows.to(device)


def of_flash_mla(lse: Tensor) -> Tensor:
    """FlashMLA's lse, a natural logarithm and +inf for a query without tokens, in base 2 and -inf."""
    assert not bool(lse.isneginf().any())
    return lse.masked_fill(lse.isposinf(), -math.inf) / math.log(2)


def packed(keys: Tensor, scales: Tensor | None = None) -> Tensor:
    """Rows uint8 [tokens, 656] of keys [tokens, 576]; by default the largest number of a tile becomes 448."""
    tiles = keys[:, :512].float().view(-1, 4, 128)
    if scales is None:
        scales = (tiles.abs().amax(2) / 448).clamp(min=torch.finfo(torch.float32).tiny)
    numbers = (tiles / scales[..., None]).to(E4M3).flatten(1)
    parts = numbers, scales.contiguous(), keys[:, 512:].bfloat16().contiguous()
    return torch.cat([part.view(torch.uint8) for part in parts], dim=1)


def packed_v4(keys: Tensor) -> Tensor:
    """Rows uint8 [tokens, 584] of keys [tokens, 512], of which a page has the last 8 bytes behind its rows."""
    tiles = keys[:, :448].float().view(-1, 7, 64)
    powers = (tiles.abs().amax(2) / 448).clamp(min=1e-4).double().log2().ceil()
    numbers = (tiles / torch.exp2(powers)[..., None].float()).to(E4M3).flatten(1)
    exponents = torch.nn.functional.pad((powers + 127).to(torch.uint8), (0, 1))
    parts = numbers.view(torch.uint8), keys[:, 448:].bfloat16().contiguous().view(torch.uint8), exponents
    return torch.cat(parts, dim=1)


def unpacked(rows: Tensor) -> Tensor:
    """What rows say, float64 [tokens, 576]: products in float32 are rounded once, to bfloat16."""
    numbers, scales, rest = rows[:, :512].contiguous(), rows[:, 512:528].contiguous(), rows[:, 528:].contiguous()
    tiles = numbers.view(E4M3).float().view(-1, 4, 128) * scales.view(torch.float32)[..., None]
    return torch.cat((tiles.flatten(1).bfloat16(), rest.view(torch.bfloat16)), dim=1).double()
