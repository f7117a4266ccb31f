"""Attention kernels: what a call needs (problem), what is compiled (key), and the rows of the catalogue."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Annotated, Any, NamedTuple

from quire.errors import ValidationError
from quire.jit import without_matrix_unit
from quire.jit.unit import Spec
from quire.kernels.expressions.cxx import operands_struct, render
from quire.kernels.features import (
    ANY_PAGE_SIZE,
    ATTENTION_OPERANDS,
    NVFP4,
    PREFIX_OPERANDS,
    SCALED_NUMBERS,
    SCALED_OPERANDS,
    Feature,
    Features,
    MaskMode,
    Operand,
    OperandBlock,
    PosEncodingMode,
    TensorCopy,
    View,
    blocks_of,
    rows_of,
)
from quire.kernels.operation import OperationKey
from quire.kernels.params import AttentionParams, ScheduleInput, ScheduleOutput, StampList, struct_of


@dataclass(frozen=True)
class AttentionProblem(Features):
    """Everything on which the choice of a kernel depends. Holds no tensors and no device handles."""

    rows: int  #: packed rows (qo_len * group_size) of a typical request, rounded by same_rows()
    group_size: int = 1  #: query heads of a KV head
    uniform: bool = True  #: rows of a request are part of what is asked for: all requests have as many, as in decode
    #: tokens of a split; -1: never split; OWN_SPLITS: as the kernel says; 0: automatic. Only with 0 requests influence
    #: each other.
    fixed_split_size: int = 0
    is_mla: bool = False  #: latent attention: keys and values are one cache, see MLA_OPERANDS

    def __str__(self) -> str:
        """The target and the features of the problem; absent features are omitted, except for the mask."""
        told = [f"{name}={value}" for name, value in self.fields if name == "mask" or value not in ("no", "none")]
        return f"({self.target}, {', '.join(told)})"


@lru_cache(maxsize=1024)
def same_rows(rows: int) -> int:
    """`rows`, rounded up to a multiple of 16 up to 256, then to a power of two.

    The limits of all kernels are such numbers, so rounding does not change the choice of a kernel. Different batches of
    a server thus become a few problems, and each is decided once.
    """
    return -(-rows // 16) * 16 if rows <= 256 else min(1 << (rows - 1).bit_length(), 4096)


class TileShape(NamedTuple):
    """Tile sizes of a kernel."""

    rows: int  #: packed query rows of a row tile
    kv: int  #: tokens of a KV tile


#: Head dims of a key and of a value in latent attention (MLA).
MLA_DIMS = (576, 512)
#: Tokens of a latent kernel's own splits: there is one KV head, so that few row tiles fill no GPU.
MLA_SPLIT = 4096
#: In place of a fixed split size: that of the kernel.
OWN_SPLITS = -2
#: Tokens of the shortest splits that splits_of() in core/schedule.h makes; and the most splits of a request for which
#: buffers of a CUDA graph are made, which splits_of() does not exceed.
LEAST_OWN_SPLIT, MOST_OWN_SPLITS = 256, 32
#: The only head dim above 256 that tensor-core kernels take.
WIDE_HEAD_DIM = 512
#: The exports of a GPU kernel: threads of a CTA, CTAs per SM, bytes of dynamic shared memory.
GPU_EXPORTS = ("kThreads", "kMinCtas", "kSmemBytes")


@dataclass(frozen=True)
class AttentionKey(Features):
    """The options that change the generated code, and nothing else. `parse` is the inverse of `slug`."""

    kernel: str  #: "attention_fa2"
    tile_rows: Annotated[int, Feature({"kTileRows": int}, {}, "m{}", ".")]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Computed once per key, because every plan() looks modules up by key."""
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    @cached_property
    def slug(self) -> str:
        """Its readable name: "attention_fa2.sm90a.bf16-bf16-bf16.d128-128.paged.causal-window.m128"."""
        spelled = (row.spell(getattr(self, name)) for name, row in rows_of(AttentionKey).items())
        return f"{self.kernel}.{self.target}{''.join(spelled)}"

    @property
    def members(self) -> Mapping[str, int | str]:
        """The constants (int) and the types (str) of Variant in C++."""
        rows = rows_of(AttentionKey).items()
        return {cxx: of(getattr(self, name)) for name, row in rows for cxx, of in row.members.items()}

    @property
    def preset(self) -> tuple[str, ...]:
        """The words of `quire warmup --preset config.json,WORD,...` with which a model's preset has this variant."""
        needs_prefixes = self.mask is MaskMode.NONE and not self.is_of_mla and (self.paged or self.cascade)
        is_step = self.kernel == "attention_decode" and self.tile_rows <= 16
        decoded = 64 if max(self.head_dim_qk, self.head_dim_vo) <= 64 or self.kv.bits < 16 else 16
        is_undivided = self.kernel == "attention_fa2" and self.tile_rows <= decoded and not self.cascade
        page_size, has_8_bit_queries = self.page_size if self.page_size > 0 else 1, self.q.bits == 8
        dtype = self.o if has_8_bit_queries else self.q
        words = {
            f"page={page_size}": self.page_size > 0 or (self.paged and "fa3" in self.kernel),
            f"dtype={dtype.slug}": dtype.slug != "bf16", f"kv={self.kv.slug}": self.kv is not dtype,
            "ragged": not self.paged and not self.is_of_mla,
            "flash": is_undivided or has_8_bit_queries or (self.is_of_mla and self.mask is MaskMode.CAUSAL),
            "cascade": self.cascade or (needs_prefixes and not is_step), "tree,spec=N": self.mask is MaskMode.TREE,
            "custom,spec=N": self.mask is MaskMode.CUSTOM,
        }  # fmt: skip
        return tuple(word for word, is_needed in words.items() if is_needed)

    @property
    def is_of_mla(self) -> bool:
        """Whether it is of a kernel for latent attention alone."""
        return self.kernel.startswith("attention_mla")

    def problem(self) -> AttentionProblem:
        """A problem that this variant solves."""
        page_size = 1 if self.page_size == ANY_PAGE_SIZE else self.page_size
        shared = {**shared_fields(self), "page_size": page_size}
        return AttentionProblem(**shared, rows=self.tile_rows, is_mla=self.is_of_mla)

    @classmethod
    def parse(cls, slug: str) -> AttentionKey:
        """The key that `slug` names; ValidationError if it names none."""
        rows = rows_of(AttentionKey)
        pattern = r"(?P<kernel>[^.]+)\.(?P<target>[^.]+)" + "".join(row.pattern for row in rows.values())
        if (match := re.fullmatch(pattern, slug)) is None:
            parts = "kernel.target.q-kv-o.dQK-VO.storage.mask.mROWS"
            raise ValidationError(f"slug: expected {parts}, got {slug!r}.")
        words = match.groupdict(default="")
        values = {name: row.read(words[name]) for name, row in rows.items()}
        key = cls(kernel=words["kernel"], target=words["target"], **values)
        if key.slug != slug:
            raise ValidationError(f"slug: {slug!r} does not name a variant; the nearest is {key.slug!r}.")
        return key


def shared_fields(features: Features) -> dict[str, Any]:
    """The fields that problems and keys have in common."""
    return {field.name: getattr(features, field.name) for field in fields(Features)}


@dataclass(frozen=True, eq=False)
class AttentionKernel:
    """One row of the catalogue: the problems that a kernel accepts, its tiles, and its parameters."""

    name: str  #: stem of its header, such as "attention_mla_fa3"
    reject: Callable[[AttentionProblem], str | None]  #: why it cannot take a problem on its device; None if it can
    tiles: Callable[[AttentionProblem], tuple[TileShape, ...]]  #: the shapes it has for a problem, smallest first
    choose_rows: Callable[[AttentionProblem, tuple[TileShape, ...]], int]  #: tile rows for a problem
    on_cuda: bool = True  #: whether it runs on GPUs, or on the host
    target: str = ""  #: the only one that it runs on
    #: whether its code for row tiles of that height uses the CPU's matrix unit
    uses_matrix_unit: Callable[[AttentionProblem, int], bool] = lambda *_: False
    yields: Callable[[AttentionProblem], str | None] = lambda _: None  #: why other kernels are preferred
    is_opt_in: bool = False  #: `auto` does not choose it, because it rounds more than other kernels
    #: the page size for which its code is compiled
    page_size: Callable[[AttentionProblem], int] = lambda problem: ANY_PAGE_SIZE if problem.paged else 0
    operands: tuple[Operand, ...] = ATTENTION_OPERANDS
    #: its parameter struct: AttentionParams, or another that begins with it as `base`
    params: type[ctypes.Structure] = AttentionParams
    #: makes its tensor maps
    copies: Callable[[AttentionKey, TileShape, Mapping[str, View]], tuple[TensorCopy, ...]] | None = None
    max_bytes: Callable[[AttentionKey, str], int] = lambda *_: 0  #: largest extent of an operand in memory; 0: any
    persistent: bool = False  #: launches at most as many CTAs as run at the same time
    ctas_per_tile: Callable[[AttentionKey], int] = lambda _: 1  #: CTAs that compute a work tile together (pair)
    schedule_input: Callable[[AttentionKey], Mapping[str, int]] = lambda _: {}  #: fields of the scheduler's input
    #: its own plan memory, in bytes per work unit of a KV head, and the operation that fills it in plan()
    unit_bytes: Callable[[AttentionKey], int] = lambda _: 0
    operation: Callable[[AttentionKey], OperationKey | None] = lambda _: None
    #: tokens of its own fixed splits (OWN_SPLITS), or of those of a window that is no longer; 0: as many as
    #: splits_of() in core/schedule.h says, by the length of a request. Large ones spare memory and merges, small ones
    #: give more CTAs to a few requests.
    own_split: int = 16384
    #: fills the fields of `params` that only this kernel has, from the scheduler's input and output and the addresses
    #: of the schedule and of that memory; returns the parameters of the operation, and its number of CTAs
    fill: Callable[[Any, ScheduleInput, ScheduleOutput, int, int], tuple[ctypes.Structure | None, int]] | None = None
    has_expression_blocks: bool = False  #: skips KV tiles that the mask of a custom variant hides
    #: `params` with PREFIX_OPERANDS; None: keys of shared levels must be in the cache
    prefix_params: type[ctypes.Structure] | None = None
    #: `params` with the scales of SCALED_OPERANDS; None: it takes no keys and values of 4 bits
    scaled_params: type[ctypes.Structure] | None = None
    has_cascades: bool = False  #: merges partial results across the levels of a cascade
    has_gaps: bool = False  #: with pages of one token, masks page numbers beyond params.num_pages
    notes_times: bool = False  #: has timed variants (tile/shared/stamps.h)
    #: converts a key of 8 bits again for each row tile, which long prompts avoid: engine/upcast.py
    is_slower_over_8_bits: bool = False
    pdl: bool = False  #: waits for its predecessor itself, and so may start early (programmatic dependent launch)

    @cached_property
    def backend(self) -> str:
        """Its name in `backend=`: the last word of its own."""
        return self.name.rpartition("_")[2]

    @property
    def header(self) -> str:
        """What the unit includes."""
        return f"quire/kernels/{self.name}.{'cuh' if self.on_cuda else 'h'}"

    @property
    def cxx(self) -> str:
        """The class template in it: "AttentionMlaFa3"."""
        return self.name.title().replace("_", "")

    def tensors(self, key: AttentionKey) -> tuple[Operand, ...]:
        """The operands and their scales, in the order of the parameter struct."""
        return tuple(operand for block in self._operand_blocks(key) for operand in block)

    def blocks(self, key: AttentionKey) -> tuple[OperandBlock, ...]:
        """Their places in the parameter struct."""
        first, *others = self._operand_blocks(key)
        blocks, before = [OperandBlock(0, first)], first
        for block in others:
            blocks.append(OperandBlock(getattr(self._own_params(key), block[0].name).offset, block, before))
            before += block
        return tuple(blocks)

    def _operand_blocks(self, key: AttentionKey) -> tuple[tuple[Operand, ...], ...]:
        operands = SCALED_OPERANDS if key.kv is NVFP4 else self.operands
        return blocks_of((*operands, *(PREFIX_OPERANDS if key.prefix else ())))

    def _own_params(self, key: AttentionKey) -> type[ctypes.Structure]:
        if key.kv is NVFP4 and self.scaled_params is not None:
            return self.scaled_params
        return self.params if self.prefix_params is None or not key.prefix else self.prefix_params

    @property
    def is_mla(self) -> bool:
        """Whether this kernel computes only latent attention (MLA)."""
        return self.operands[0].name == "q_pe"

    def is_for(self, problem: AttentionProblem) -> bool:
        """Whether `problem` is for the device and the kind of attention of this kernel."""
        return (self.on_cuda, self.is_mla) == (problem.on_cuda, problem.is_mla)

    def params_of(self, key: AttentionKey) -> type[ctypes.Structure]:
        """Its parameter struct for `key`: `params`, followed by the operands of the variant, if it has any."""
        own, behind = self._own_params(key), operands_behind(key)
        return own if behind is None else with_operands(own, behind)

    def splits(self, problem: AttentionProblem, tile: TileShape, window_left: int) -> Mapping[str, int]:
        """The scheduler's input that says where row tiles are divided.

        A row of a window sees at most two splits of the kernel's own size, so that the order of their sum is the same
        whatever the first split of its row tile is.
        """
        if problem.fixed_split_size != OWN_SPLITS:
            return {"fixed_split_size": problem.fixed_split_size}
        if self.own_split == 0:
            return {"fixed_split_size": LEAST_OWN_SPLIT, "splits_by_length": 1}
        size = -(-self.own_split // tile.kv) * tile.kv
        while size < window_left:
            size *= 2
        return {"fixed_split_size": size}

    def planning(self, key: AttentionKey) -> OperationKey | None:
        """The operation that plan() launches for `key`: it fills the kernel's own plan memory."""
        if self.has_expression_blocks and key.variant is not None and key.variant.has_mask:
            return OperationKey("expression_blocks", without_matrix_unit(key.target), f"expr{key.variant.digest}")
        return self.operation(key)

    def plan_bytes(self, key: AttentionKey) -> int:
        """Size of its own plan memory, in bytes per work unit of a KV head."""
        return int(self.planning(key) is not None) or self.unit_bytes(key)

    def refusal(self, problem: AttentionProblem) -> str | None:
        """Why the kernel does not accept `problem`, apart from the device; None if it does."""
        if self.on_cuda != problem.on_cuda:
            return f"target {problem.target} is another device"
        if self.is_mla != problem.is_mla:
            return f"it is {'only' if self.is_mla else 'not'} for multi-head latent attention"
        return self.lacks(problem) or self.reject(problem)

    def lacks(self, problem: AttentionProblem) -> str | None:
        """A feature of `problem` that other kernels support and this one does not, or None."""
        if self.target not in ("", problem.target):
            return f"target {problem.target} is not {self.target}"
        if problem.timed and not self.notes_times:
            return "it does not note when it computes what"
        if problem.timed and problem.variant is not None:
            return "custom variants cannot be timed"
        if problem.kv is NVFP4:
            return self._lacks_4_bits(problem)
        if problem.tile_scales and all(operand.scales is None for operand in self.operands):
            return "it takes no latents with scales, which rows of 656 bytes have"
        if problem.max_logits and self.on_cuda and not self.is_mla:
            return "it does not return the maximum of logits (max_scores); the CPU's kernel does"
        return None

    def _lacks_4_bits(self, problem: AttentionProblem) -> str | None:
        if self.scaled_params is None:
            return "it takes no keys and values of 4 bits (NVFP4)"
        if problem.prefix:
            return "shared keys in tensors of their own have 8 or 16 bits"
        multiple = 4 * SCALED_NUMBERS if problem.on_cuda else SCALED_NUMBERS
        for name, dim in (("head_dim_qk", problem.head_dim_qk), ("head_dim_vo", problem.head_dim_vo)):
            if dim % multiple or (problem.on_cuda and dim > 256):
                most = " up to 256" if problem.on_cuda else ""
                return f"{name}={dim}: expected a multiple of {multiple}{most} for keys and values of 4 bits"
        if problem.on_cuda and problem.pos_encoding is PosEncodingMode.ROPE_LLAMA:
            return "keys of 4 bits are not rotated in a kernel: rotate them before they are quantised"
        return None

    def key(self, problem: AttentionProblem) -> AttentionKey:
        """The key of the variant that takes `problem`."""
        return self.key_with(problem, self.choose_rows(problem, self.tiles(problem)))

    def key_with(self, problem: AttentionProblem, rows: int) -> AttentionKey:
        """The key of the variant whose row tiles have `rows` rows."""
        target = problem.target if self.uses_matrix_unit(problem, rows) else without_matrix_unit(problem.target)
        shared = {**shared_fields(problem), "target": target, "page_size": self.page_size(problem)}
        return AttentionKey(**shared, kernel=self.name, tile_rows=rows)

    def keys(self, problem: AttentionProblem) -> list[AttentionKey]:
        """The keys of all tile heights. Calls choose one of them by their lengths."""
        return [self.key_with(problem, tile.rows) for tile in self.tiles(problem)]

    def tile(self, key: AttentionKey) -> TileShape:
        """The tile of a key; ValidationError if the kernel has none of that height."""
        shapes = self.tiles(key.problem())
        for shape in shapes:
            if shape.rows == key.tile_rows:
                return shape
        raise ValidationError(
            f"tile rows: {self.name} has {', '.join(str(s.rows) for s in shapes)}, got {key.tile_rows}."
        )

    @lru_cache(maxsize=4096)  # rows of the catalogue live as long as the process  # noqa: B019
    def spec(self, key: AttentionKey) -> Spec:
        """The input of the compiler for `key`."""
        tile, members, own, behind = self.tile(key), key.members.items(), key.variant, operands_behind(key)
        text = () if own is None else (("expression", str(own)),)
        places = () if behind is None else (("kOperandsAt", ctypes.sizeof(self._own_params(key))),)
        code = "  using Operands = StampList;" if key.timed else ""
        return Spec(
            slug=key.slug, target=key.target, header=self.header, kernel=self.cxx, entry="quire_attention",
            params=struct_of(self._own_params(key)),
            types=tuple((name, value) for name, value in members if isinstance(value, str)),
            constants=(
                *((name, value) for name, value in members if isinstance(value, int)), ("kTileKv", tile.kv), *places,
            ),
            code=code if own is None else render(own.expression),
            operands=None if behind is None else struct_of(behind),
            asserts=(("kTileRows", tile.rows), ("kTileKv", tile.kv)), exports=GPU_EXPORTS if self.on_cuda else (),
            warmup=key.slug, preset=key.preset, fields=(*key.fields, *text),
        )  # fmt: skip


def operands_behind(key: AttentionKey) -> type[ctypes.Structure] | None:
    """The struct after the parameters of a variant: operands of its expression, a list of stamps, or None."""
    if key.variant is None:
        return StampList if key.timed else None
    return operands_struct(key.variant.expression)


@lru_cache(maxsize=1024)
def with_operands(params: type[ctypes.Structure], operands: type[ctypes.Structure]) -> type[ctypes.Structure]:
    """`params` followed by `operands`, as WithOperands in core/expression.h."""
    to_64 = ctypes.c_char * (-(ctypes.sizeof(params) + ctypes.sizeof(operands)) % 64)
    return type(params.__name__, (params,), {"_fields_": (("operands", operands), ("_operands_to_64", to_64))})


def rows_that_decide(problem: AttentionProblem) -> int:
    """The rows by which a kernel may be chosen: those of one query where splits are fixed and the rows of a request may
    be divided into calls in any way.
    """
    return problem.group_size if problem.fixed_split_size and not problem.uniform else problem.rows


def whole_blocks(head_dim: int) -> int:
    """`head_dim` rounded up to blocks of 16 dims, as GPU kernels store it; the last block may end in zeros."""
    return -(-head_dim // 16) * 16


def head_dim_reason(problem: AttentionProblem, most: int = 256) -> str | None:
    """Why a kernel for head dims up to `most` does not accept these, and what to do; None if it does."""
    if (problem.head_dim_qk, problem.head_dim_vo) == MLA_DIMS:
        return "head_dim=576/512: MLA is not supported by this wrapper; pass keys and values of at most 256 dims"
    for name, dim in (("head_dim_qk", problem.head_dim_qk), ("head_dim_vo", problem.head_dim_vo)):
        if dim > most:
            return f"{name}={dim}: expected at most {most}"
        if dim < 32 or dim % 8:
            return _to_pad(name, dim, "a multiple of 8 from 32 on", max(32, -(-dim // 8) * 8))
    return None


def _to_pad(name: str, dim: int, expected: str, padded: int) -> str:
    scale = f" and pass sm_scale={1 / math.sqrt(dim):.4f}" if name == "head_dim_qk" and dim > 0 else ""
    return f"{name}={dim}: expected {expected}; pad with zeros to {padded}{scale}"


def _block_reason(problem: AttentionProblem) -> str | None:
    """Why a tensor-core kernel does not accept a head dim that is an odd multiple of 8; None if it does."""
    what = "for 8-bit keys and values" if problem.kv.bits == 8 else "to rotate keys"
    if problem.kv.bits == 16 and problem.pos_encoding is not PosEncodingMode.ROPE_LLAMA:
        return None
    for name, dim in (("head_dim_qk", problem.head_dim_qk), ("head_dim_vo", problem.head_dim_vo)):
        if dim % 16:
            return _to_pad(name, dim, f"a multiple of 16 {what}", whole_blocks(dim))
    return None


def number_types_reason(problem: AttentionProblem) -> str | None:
    """Why a kernel of 16-bit tensor-core products does not take these number types, on this target."""
    if problem.target == "sm75":
        return "target sm75 has no asynchronous copies"
    if problem.q.slug not in ("fp16", "bf16"):
        return f"q dtype {problem.q} is not fp16 or bf16"
    if problem.kv != problem.q and problem.kv.bits > 8:
        return f"kv dtype {problem.kv} differs from q dtype {problem.q} (.to() converts); only 8-bit keys may"
    if problem.o != problem.q:
        return f"o dtype {problem.o} differs from q dtype {problem.q}"
    return None


def tensor_core_reason(problem: AttentionProblem) -> str | None:
    """Why a kernel of 16-bit tensor-core products does not take these number types and head dims."""
    if reason := number_types_reason(problem):
        return reason
    if problem.pos_encoding is PosEncodingMode.ROPE_LLAMA and problem.kv.bits == 8 and problem.head_dim_qk % 32:
        return f"head_dim_qk={problem.head_dim_qk}: expected a multiple of 32 to rotate 8-bit keys"
    return head_dim_reason(problem) or _block_reason(problem)
