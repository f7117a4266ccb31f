"""Masks and scores that benchmarks/flex.py measures, and what they give for sampled rows, in float64."""

# ruff: noqa: ARG001, ARG005  # functions of torch's flex_attention have all of its arguments
from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.attention import flex_attention as theirs

Function = Callable[..., Any]
SAMPLED = 48  #: queries of a request that are compared, for three heads
UNSHOWN = -math.inf


class Size(NamedTuple):
    """Of all cases of a run."""

    batch: int = 2
    length: int = 8192
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    width: int = 128  #: of the picture whose tokens neighbourhoods are about
    film: tuple[int, int, int] = (8, 32, 32)
    tile: tuple[int, int, int] = (2, 8, 8)  #: of the film
    steps: tuple[int, int] = (64, 4096)  #: requests and keys of decode


SMALL = Size(2, 256, 4, 2, 64, 16, (4, 8, 8), (2, 4, 4), (3, 70))


class Mods(NamedTuple):
    """A score and a mask, of tensors that broadcast. lists: blocks [rows, columns] and their size, without a mask."""

    score: Function | None = None
    mask: Function | None = None
    lists: tuple[torch.Tensor, int] | None = None


def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


def documents(count: int, equal: bool) -> Callable[[Size, torch.device], Mods]:
    """Causal within each of `count` documents of a request."""

    def make(size: Size, device: torch.device) -> Mods:
        n, source = size.length, torch.Generator().manual_seed(count)
        cuts = torch.arange(1, count) * n // count if equal else torch.randperm(n, generator=source)[: count - 1]
        number = torch.bucketize(torch.arange(n), cuts.sort().values, right=True).int().to(device)
        return Mods(mask=lambda b, h, i, j: (i >= j) & (number[i] == number[j]))

    return make


def alibi(size: Size, device: torch.device) -> Mods:
    slopes = 2.0 ** (-8 / size.heads * torch.arange(1.0, size.heads + 1, device=device))
    return Mods(lambda s, b, h, i, j: s + slopes[h] * (j - i), causal)


def table(size: Size, device: torch.device) -> Mods:
    last = size.length - 1
    bias = torch.randn(size.heads, 2 * size.length - 1, device=device)
    return Mods(lambda s, b, h, i, j: s + bias[h, j - i + last], causal)


def neighbourhood(size: Size, device: torch.device) -> Mods:
    """NATTEN: 13 x 13 keys around the query, moved inside of the picture."""
    width, height, reach = size.width, size.length // size.width, 6

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        x = (i % width).clamp(reach, width - 1 - reach)
        y = (i // width).clamp(reach, height - 1 - reach)
        return ((x - j % width).abs() <= reach) & ((y - j // width).abs() <= reach)

    return Mods(mask=mask)


def tiles_of_film(size: Size, device: torch.device) -> Mods:
    """STA: tokens are in the order of tiles of a film, and see the tiles in reach (3, 3, 3) of theirs."""
    tiles = [n // m for n, m in zip(size.film, size.tile, strict=True)]
    numel = math.prod(size.tile)

    def place(index: Any) -> tuple[Any, Any, Any]:
        tile = index // numel
        return tile // (tiles[1] * tiles[2]), tile // tiles[2] % tiles[1], tile % tiles[2]

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        near: Any = True
        for at, other, count in zip(place(i), place(j), tiles, strict=True):
            middle = at.clamp(1, max(1, count - 2))
            near = ((other - middle).abs() <= 1) & near
        return near

    return Mods(mask=mask)


def blocks(share: float, block: int) -> Callable[[Size, torch.device], Mods]:
    """Random blocks, at least one a row, the same for all heads; lists alone say which."""

    def make(size: Size, device: torch.device) -> Mods:
        count, source = -(-size.length // block), torch.Generator().manual_seed(block)
        rank = torch.rand(count, count, generator=source).argsort(1).argsort(1)
        return Mods(lists=((rank < max(1, round(share * count))).to(device), block))

    return make


def per_head(size: Size, device: torch.device) -> Mods:
    """A window for each head, from 256 on."""
    step = size.length // size.heads
    return Mods(mask=lambda b, h, i, j: (i >= j) & (i - j < (h + 1) * step))


@dataclass(frozen=True)
class Case:
    """times: the target, in times torch's speed. of_plain: of the plain row's rate, by pairs (of_tiles: by tiles)."""

    make: Callable[[Size, torch.device], Mods]
    times: float | None = 1.4
    of_plain: float | None = None
    of_tiles: float | None = None
    plain: str = "causal"


CASES: Mapping[str, Case] = {
    "causal": Case(lambda *_: Mods(mask=causal)),
    "12 equal documents": Case(documents(12, True), 2.0, of_tiles=0.92),
    "12 random documents": Case(documents(12, False), 2.0, of_tiles=0.92),
    "100 random documents": Case(documents(100, False), 2.0, of_tiles=0.92),
    "ALiBi": Case(alibi, of_plain=0.92),
    "soft cap": Case(lambda *_: Mods(lambda s, b, h, i, j: 30 * torch.tanh(s / 30), causal), of_plain=0.92),
    "table": Case(table, of_plain=0.92),
    "per-head windows": Case(per_head),
    "prefix-LM": Case(lambda *_: Mods(mask=lambda b, h, i, j: (i >= j) | (j < 1024))),
    "window 1024": Case(lambda *_: Mods(mask=lambda b, h, i, j: (i >= j) & (i - j <= 1024))),
    "dilated": Case(lambda *_: Mods(mask=lambda b, h, i, j: (i >= j) & (i - j < 4096) & ((i - j) % 4 == 0))),
    "NATTEN 2-D": Case(neighbourhood),
    "STA 3-D": Case(tiles_of_film),
    "10 % of 128 x 128": Case(blocks(0.1, 128), of_plain=0.9, plain="dense"),
    "10 % of 64 x 64": Case(blocks(0.1, 64), of_plain=0.9, plain="dense"),
    "dense": Case(lambda *_: Mods(), None, plain="dense"),
}


class Inputs(NamedTuple):
    """Tensors [batch, heads, length, head_dim]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def draw(cls, size: Size, device: torch.device, q_len: int, kv_len: int, batch: int) -> Inputs:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        shapes = ((size.heads, q_len), (size.kv_heads, kv_len), (size.kv_heads, kv_len))
        return cls(*(torch.randn(batch, h, n, size.dim, device=device, dtype=dtype) for h, n in shapes))

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    def truth(self, mods: Mods, batch: int, head: int, rows: torch.Tensor) -> torch.Tensor:
        """Some rows of a head, in float64."""
        k, v = (t[batch, head // self.group].double() for t in (self.k, self.v))
        score = self.q[batch, head, rows].double() @ k.T / math.sqrt(self.q.shape[3])
        at = [torch.tensor(n, device=rows.device) for n in (batch, head)]
        at += [rows[:, None], torch.arange(k.shape[0], device=rows.device)[None, :]]
        score = score if mods.score is None else mods.score(score, *at)
        score = score.masked_fill(~shown_of(mods)(*at), -math.inf)
        return torch.softmax(score, 1).nan_to_num(0.0) @ v

    def error(self, mods: Mods, o: torch.Tensor) -> float:
        """The largest error of sampled rows."""
        batch, heads, length, _ = self.q.shape
        source, worst = torch.Generator().manual_seed(5), 0.0
        for b in {0, batch - 1}:
            for head in {0, heads // 2 - 1, heads - 1}:
                rows = torch.randperm(length, generator=source)[:SAMPLED].to(self.q.device)
                found = (o[b, head, rows].double() - self.truth(mods, b, head, rows)).abs().max()
                worst = max(worst, float(found.nan_to_num(math.inf)))
        return worst


def shown_of(mods: Mods) -> Function:
    """The mask as a function of tensors that broadcast."""
    if mods.lists is not None:
        listed, size = mods.lists
        return lambda b, h, i, j: listed[i // size, j // size]
    return mods.mask or (lambda b, h, i, j: (i >= 0) & (j >= 0))


def block_mask_of(mods: Mods, q_len: int, kv_len: int, heads: int, device: torch.device) -> Any:
    """torch's block mask."""
    if mods.lists is not None:
        listed, size = mods.lists
        counts, order = listed.sum(1, dtype=torch.int32), (~listed).int().argsort(dim=1, stable=True).int()
        empty = torch.zeros_like(counts)
        return theirs.BlockMask.from_kv_blocks(
            empty[None, None], order[None, None], counts[None, None], order[None, None].contiguous(), BLOCK_SIZE=size,
            seq_lengths=(q_len, kv_len),
        )  # fmt: skip
    if mods.mask is None:
        return None
    return theirs.create_block_mask(
        mods.mask, None, heads if is_of_heads(mods, device) else None, q_len, kv_len, device=str(device)
    )


def is_of_heads(mods: Mods, device: torch.device) -> bool:
    """Whether a mask differs between heads."""
    h = torch.arange(2, device=device).view(2, 1, 1)
    at = torch.arange(4, device=device)
    return mods.mask is not None and mods.mask(0, h, at[:, None], at[None, :]).dim() == 3


def pairs_of(mods: Mods, size: Size, device: torch.device, tile: tuple[int, int]) -> tuple[int, int]:
    """Pairs of query and key that a mask shows in a request, of all heads; and those in tiles (queries, keys) in which
    it shows some.
    """
    shown, n, of_heads = shown_of(mods), size.length, is_of_heads(mods, device)
    h, j = torch.arange(size.heads if of_heads else 1, device=device).view(-1, 1, 1), torch.arange(n, device=device)
    pairs = in_tiles = 0
    for begin in range(0, n, 16 * tile[0]):
        i = torch.arange(begin, min(n, begin + 16 * tile[0]), device=device)
        seen = torch.broadcast_to(shown(0, h, i[:, None], j[None, :]), (h.shape[0], i.shape[0], n))
        pairs += int(seen.sum())
        more = -i.shape[0] % tile[0], -n % tile[1]
        padded = torch.nn.functional.pad(seen, (0, more[1], 0, more[0]))
        cut = padded.unflatten(2, (-1, tile[1])).unflatten(1, (-1, tile[0]))
        in_tiles += int(cut.any(4).any(2).sum()) * tile[0] * tile[1]
    return pairs * size.heads // h.shape[0], in_tiles * size.heads // h.shape[0]
