"""The attention family: what a caller asks for (problem), what is compiled (key), how a kernel cuts it (tile)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import NamedTuple

from quire.errors import ValidationError
from quire.jit.spec import Spec
from quire.kernels.params import AttentionParams, struct_of
from quire.types import DType, MaskMode, dtype_of

__all__ = ["AttentionKernel", "AttentionKey", "AttentionProblem", "Geometry", "TensorCopy", "TileShape", "same_rows"]


@dataclass(frozen=True)
class AttentionProblem:
    """Everything that decides which kernel runs; no tensor, no device handle."""

    target: str  #: what the code is compiled for: "sm90a", "x86-64-v4", ...
    q: DType
    kv: DType
    o: DType
    head_dim_qk: int
    head_dim_vo: int
    page_size: int  #: 0: ragged
    mask: MaskMode
    window: bool
    soft_cap: bool
    rows: int  #: packed rows (qo_len * group_size) of a typical request, see same_rows()
    uniform: bool = True  #: every request has as many rows, whatever else is in the batch
    fixed_split_size: int = 0  #: tokens between cuts, -1: none (no request may then influence another); 0: any

    @property
    def paged(self) -> bool:
        return self.page_size > 0

    @property
    def on_cuda(self) -> bool:
        return self.target.startswith("sm")

    def __str__(self) -> str:
        dims = f"head_dim={self.head_dim_qk}" + (f"/{self.head_dim_vo}" if self.head_dim_vo != self.head_dim_qk else "")
        flags = [self.mask.slug] + ["window"] * self.window + ["soft cap"] * self.soft_cap
        storage = f"page_size={self.page_size}" if self.paged else "ragged"
        return f"({self.target}, q={self.q}, kv={self.kv}, o={self.o}, {dims}, {storage}, {', '.join(flags)})"


def same_rows(rows: int) -> int:
    """The most rows that each kernel takes like `rows`: their bounds are multiples of 16 up to 256, then powers of two.

    Batches of a server, no two alike, are so a few problems, of which only the first of each is decided (a plan of one
    that had to be: 58 us instead of 25 on a host, 2026-11-21).
    """
    return -(-rows // 16) * 16 if rows <= 256 else min(1 << (rows - 1).bit_length(), 4096)


class TileShape(NamedTuple):
    """How a kernel cuts work."""

    rows: int  #: packed query rows of a tile
    kv: int  #: keys of a kv tile


#: What a GPU kernel tells of itself: threads of a CTA, CTAs that share an SM, bytes of dynamic shared memory.
_EXPORTS = ("kThreads", "kMinCtas", "kSmemBytes")


@dataclass(frozen=True)
class AttentionKey:
    """What changes the generated code, and nothing else. `slug` and `parse` are each other's inverse."""

    kernel: str  #: "attention_fa2"
    target: str
    q: DType
    kv: DType
    o: DType
    head_dim_qk: int
    head_dim_vo: int
    paged: bool
    page_size: int  #: that the code is made for; 0: any
    mask: MaskMode
    window: bool
    soft_cap: bool
    tile_rows: int

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Once a key: each plan() looks things up by it."""
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    @property
    def slug(self) -> str:
        flags = "-".join([self.mask.slug] + ["window"] * self.window + ["cap"] * self.soft_cap)
        return ".".join(
            (
                self.kernel,
                self.target,
                f"{self.q}-{self.kv}-{self.o}",
                f"d{self.head_dim_qk}-{self.head_dim_vo}",
                f"paged{self.page_size or ''}" if self.paged else "ragged",
                flags,
                f"m{self.tile_rows}",
            )
        )

    def problem(self) -> AttentionProblem:
        """A problem that this variant takes."""
        return AttentionProblem(
            self.target, self.q, self.kv, self.o, self.head_dim_qk, self.head_dim_vo,
            (self.page_size or 1) if self.paged else 0, self.mask, self.window, self.soft_cap, self.tile_rows,
        )  # fmt: skip

    @classmethod
    def parse(cls, slug: str) -> AttentionKey:
        """The key that `slug` names."""
        try:
            kernel, target, dtypes, dims, storage, flags, rows = slug.split(".")
            q, kv, o = (dtype_of(name, "dtype") for name in dtypes.split("-"))
            head_dim_qk, head_dim_vo = map(int, dims.removeprefix("d").split("-"))
            mask, *rest = flags.split("-")
            page_size = int(storage.removeprefix("paged") or 0) if storage != "ragged" else 0
            key = cls(
                kernel, target, q, kv, o, head_dim_qk, head_dim_vo, storage != "ragged", page_size,
                MaskMode[mask.upper()], "window" in rest, "cap" in rest, int(rows.removeprefix("m")),
            )  # fmt: skip
        except (ValueError, KeyError) as error:
            raise ValidationError(
                f"slug: expected kernel.target.q-kv-o.dQK-VO.storage.mask.mROWS, got {slug!r}."
            ) from error
        if key.slug != slug:
            raise ValidationError(f"slug: {slug!r} does not name a variant; the nearest is {key.slug!r}.")
        return key


class Geometry(NamedTuple):
    """The tensors of a call as tensor maps describe them; strides in elements, without the last dimension."""

    nnz_qo: int
    nnz_kv: int  #: ragged: rows of k and v
    num_pages: int
    page_size: int
    num_kv_heads: int
    group_size: int
    q_strides: tuple[int, int]  #: token, head
    k_strides: tuple[int, int, int]  #: page, token, head
    v_strides: tuple[int, int, int]


class TensorCopy(NamedTuple):
    """What one tensor map lets the copy engine move; dimensions innermost first."""

    field: str  #: of the parameter struct
    tensor: str  #: "q", "k" or "v"
    dims: tuple[int, ...]
    strides: tuple[int, ...]  #: in elements, of all but the innermost dimension
    box: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class AttentionKernel:
    """One row of the catalogue: what a kernel accepts and how it cuts it."""

    name: str  #: stem of its header: kernels/<name>.cuh or .h
    backend: str  #: what the caller calls it
    header: str
    cxx: str  #: the class template
    reject: Callable[[AttentionProblem], str | None]  #: why it cannot take a problem; None if it can
    tiles: Callable[[AttentionProblem], tuple[TileShape, ...]]  #: the shapes it has for a problem, smallest first
    choose_rows: Callable[[AttentionProblem, tuple[TileShape, ...]], int]  #: tile rows for a problem
    yields: Callable[[AttentionProblem], str | None] = lambda _: None  #: why it takes this only if no other does
    page_size: Callable[[AttentionProblem], int] = lambda _: 0  #: that its code is made for; 0: any
    params: type[ctypes.Structure] = AttentionParams  #: what it is given; if another struct, `base` leads in it
    copies: Callable[[AttentionKey, TileShape, Geometry], tuple[TensorCopy, ...]] | None = None  #: its tensor maps
    max_bytes: Callable[[AttentionKey, str], int] = lambda *_: 0  #: of a "kv" or "out" tensor that it reaches; 0: any
    persistent: bool = False  #: one CTA an SM takes queue for whole tiles
    reads_block_mask: bool = False  #: of a custom mask's tiles, made while planning: kernels/block_mask.cuh
    pdl: bool = False  #: the kernel waits for its predecessor itself, so that it may be launched before that one ends

    def key(self, problem: AttentionProblem) -> AttentionKey:
        """The key of the variant that takes `problem`."""
        return self.key_with(problem, self.choose_rows(problem, self.tiles(problem)))

    def key_with(self, problem: AttentionProblem, rows: int) -> AttentionKey:
        """The key of the variant whose tiles have `rows` rows."""
        p = problem
        return AttentionKey(
            self.name, p.target, p.q, p.kv, p.o, p.head_dim_qk, p.head_dim_vo, p.paged, self.page_size(p), p.mask,
            p.window, p.soft_cap, rows,
        )  # fmt: skip

    @cache  # noqa: B019
    def tile(self, key: AttentionKey) -> TileShape:
        """The tile of a key; ValidationError if the kernel has none of that height."""
        shapes = self.tiles(key.problem())
        for shape in shapes:
            if shape.rows == key.tile_rows:
                return shape
        raise ValidationError(
            f"tile rows: {self.name} has {', '.join(str(s.rows) for s in shapes)}, got {key.tile_rows}."
        )

    @cache  # rows of the catalogue live as long as the process  # noqa: B019
    def spec(self, key: AttentionKey) -> Spec:
        """What the compiler is given for `key`."""
        tile = self.tile(key)
        return Spec(
            slug=key.slug,
            target=key.target,
            header=self.header,
            kernel=self.cxx,
            entry="quire_attention",
            params=struct_of(self.params),
            types=(("Q", key.q.cxx), ("Kv", key.kv.cxx), ("O", key.o.cxx)),
            constants=(
                ("kHeadDimQk", key.head_dim_qk),
                ("kHeadDimVo", key.head_dim_vo),
                ("kPaged", int(key.paged)),
                ("kPageSize", key.page_size),
                ("kMask", int(key.mask)),
                ("kWindow", int(key.window)),
                ("kSoftCap", int(key.soft_cap)),
                ("kTileRows", tile.rows),
                ("kTileKv", tile.kv),
            ),
            asserts=(("kTileRows", tile.rows), ("kTileKv", tile.kv)),
            exports=_EXPORTS if key.target.startswith("sm") else (),
            warmup=key.slug,
        )


def first_tile_that_holds(problem: AttentionProblem, shapes: tuple[TileShape, ...]) -> int:
    """The lowest tile that a typical request fills."""
    return next((s.rows for s in shapes if problem.rows <= s.rows), shapes[-1].rows)


def head_dim_reason(problem: AttentionProblem) -> str | None:
    """Why no kernel of the family takes these head dims; None if they are fine."""
    for name, dim in (("head_dim_qk", problem.head_dim_qk), ("head_dim_vo", problem.head_dim_vo)):
        if not (32 <= dim <= 256 and dim % 16 == 0):
            return f"{name}={dim} is not a multiple of 16 from 32 to 256"
    return None
