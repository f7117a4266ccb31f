"""Keys and values of 8 and 4 bits, as kernels of 16 bits compute with them: scales, and upcasts to 16 bits.

Caches of 4 bits (NVFP4) have numbers of E2M1, tensors [..., head_dim / 2] of bytes, the first number of two in the low
bits. Their scales, kv_cache_sf, are e4m3 [..., head_dim / 16] with the other dimensions of the numbers, in the same
order, and with strides of their own: both may lie in one allocation. A key is number x scale x k_scale, a value number
x scale x v_scale.

A kernel that converts keys as it reads them converts a key again for each row tile that sees it. For long prompts it
is faster to write keys and values once in 16 bits, in a prologue, and to read them again. The copies are in the
workspace, page after page in the order of paged_kv_indices. A page that several requests share is copied for each.
Where splits are fixed, and the length of a prompt may change no bit, the copy has what the kernel itself makes of
narrow numbers, fp16 also beside queries of bf16, and the same variant reads it. There tokens in pages of their own are
put side by side for long prompts, because the row tiles that gather them fast have other sums.

8-bit queries are converted by torch, unless the kernel reads them as they are.

FlashInfer's kernels for such queries also take a scale for each head of q, k and v. A query head has one KV head, so
the scales of q and k can multiply the copy, and those of v the result. In float16 the copy is also divided by a power
of two that brings its largest number below 2^15, and logits are multiplied by it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from quire.engine.checks import check_same_device, check_shape, check_tensor, scalar
from quire.engine.device import OwnWorkspace, Workspace, is_capturing
from quire.engine.launch import launch, row_grid
from quire.engine.options import PlanOptions
from quire.engine.rope_prologue import Prologue, kept, largest_page, set_aside, view_of
from quire.engine.schedule import Indices
from quire.engine.spec import AttentionSpec
from quire.engine.tensors import PagedCache, cache_tensors
from quire.errors import UnsupportedArgumentError, ValidationError
from quire.jit import get_module, is_obtainable, without_matrix_unit
from quire.kernels import PIN, Decision
from quire.kernels.features import (
    NVFP4,
    SCALED_NUMBERS,
    SCALED_OPERANDS,
    DType,
    MaskMode,
    Operand,
    PosEncodingMode,
    View,
    blocks_of,
)
from quire.kernels.operation import PARALLEL_THREADS, OperationKey, WidenParams

_BYTES = (torch.uint8, getattr(torch, "float4_e2m1fn_x2", torch.uint8))
_SCALES = (torch.float8_e4m3fn, torch.uint8)
#: FlashInfer's backend that reads the scales of values in another order than all others.
_SWIZZLES = "trtllm-gen"


def numbers_in_byte(tensor: torch.Tensor) -> int:
    """2 for a tensor of such numbers, 1 for any other."""
    return 2 if tensor.dtype in _BYTES else 1


def scaled(kv: Any, kv_cache_sf: Any, page_size: int) -> tuple[PagedCache, tuple[torch.Tensor, ...]]:
    """A cache of such numbers as uint8, and its scales as `others` of RunOptions; none where there are none.

    page_size: 0 for ragged keys and values.
    """
    if kv_cache_sf is None:
        return kv, ()
    tensors = tuple(as_bytes(tensor) for tensor in cache_tensors(kv))
    for tensor in tensors:
        if (dtype := getattr(tensor, "dtype", None)) is not torch.uint8:
            raise ValidationError(f"kv_cache_sf: expected None with keys and values of {dtype}, got scales.")
    scales = scales_of(kv_cache_sf, page_size)
    return tensors[0] if len(tensors) == 1 else (tensors[0], tensors[1]), scales


def check_order(backend: Any) -> None:
    """Refuse the one of FlashInfer's backends for which the scales of values would be in another order."""
    if str(backend) == _SWIZZLES:
        raise UnsupportedArgumentError(
            f"backend: expected another than {_SWIZZLES!r} with kv_cache_sf, which interleaves scales of four "
            f"tokens of values; they are read in the order of the cache, as fa2 and xqa have them."
        )


def as_bytes(tensor: Any) -> torch.Tensor:
    """A tensor of such numbers as uint8, which is what torch's float4_e2m1fn_x2 is."""
    is_other = isinstance(tensor, torch.Tensor) and tensor.dtype in _BYTES and tensor.dtype is not torch.uint8
    return tensor.view(torch.uint8) if is_other else tensor  # type: ignore[no-any-return]


def scales_of(kv_cache_sf: Any, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales of keys and of values, [pages, ...] in the order of the cache; ragged ones are one page."""
    if isinstance(kv_cache_sf, torch.Tensor):
        stacked = kv_cache_sf
        if stacked.dim() not in ((4, 5) if page_size == 1 else (5,)) or stacked.shape[1] != 2 or not page_size:
            raise ValidationError(
                f"kv_cache_sf: expected a pair (k_sf, v_sf), or for pages one tensor [num_pages, 2, ..., head_dim / "
                f"{SCALED_NUMBERS}], got {list(stacked.shape)}."
            )
        pair: tuple[Any, ...] = (stacked.select(1, 0), stacked.select(1, 1))
    elif isinstance(kv_cache_sf, (tuple, list)) and len(kv_cache_sf) == 2:
        pair = tuple(kv_cache_sf)
    else:
        raise ValidationError(
            f"kv_cache_sf: expected the scales of keys and values, a pair (k_sf, v_sf) or one tensor, got "
            f"{type(kv_cache_sf).__name__}."
        )
    k_sf, v_sf = (_as_pages(scales, f"kv_cache_sf[{i}]", page_size) for i, scales in enumerate(pair))
    return k_sf, v_sf


def _as_pages(scales: Any, name: str, page_size: int) -> torch.Tensor:
    if not isinstance(scales, torch.Tensor) or scales.dtype not in _SCALES:
        got = scales.dtype if isinstance(scales, torch.Tensor) else type(scales).__name__
        raise ValidationError(f"{name}: expected scales of {_SCALES[0]}, or their bytes, got {got}.")
    tensor = scales.view(torch.float8_e4m3fn)
    if tensor.dim() == 3 and page_size in (0, 1):
        tensor = tensor.unsqueeze(1 if page_size else 0)
    if tensor.dim() != 4:
        wanted = "[num_pages, page_size, num_kv_heads" if page_size else "[nnz_kv, num_kv_heads"
        raise ValidationError(
            f"{name}: expected {wanted}, head_dim / {SCALED_NUMBERS}] in the order of kv_layout, got "
            f"{list(scales.shape)}."
        )
    return tensor


#: The operands of run() with such keys and values, in the order of AttentionScaledParams.
OPERANDS = tuple(operand for block in blocks_of(SCALED_OPERANDS) for operand in block)


def check_others(kv: DType, operands: Sequence[Operand], count: int) -> None:
    """Check the number of tensors beside q, k, v and the result of run(), for keys and values of type `kv`: scales of
    latents may be left out.
    """
    if kv is NVFP4 and count != len(operands) - 4:
        raise ValidationError("kv_cache_sf: expected the scales of keys and values of 4 bits (NVFP4), got None.")
    if count > len(operands) - 4:
        raise ValidationError(f"kv_cache_sf: expected None, as plan() was told keys and values of {kv.torch_name}.")


def check_scales_fit(views: Mapping[str, View], operands: Sequence[Operand]) -> None:
    """Check that scales are of as many pages, tokens and heads as the operand that they are of."""
    for operand in operands:
        if operand.scales is None or operand.scales.name not in views:
            continue
        wanted, got = (list(views[name].sizes[:3]) for name in (operand.name, operand.scales.name))
        if wanted != got:
            raise ValidationError(
                f"kv_cache_sf: expected scales of {wanted} pages, tokens and heads, as the cache has, got {got}."
            )


# --- upcasts ahead of the kernel -------------------------------------------------------------------------------------


#: Query rows that see a key, tokens times grouped heads, from which on the pass takes less time than it saves: 3 bytes
#: of memory for each number, against the sixth by which such a kernel is slower over 8-bit keys. No kernel with wgmma
#: reads keys of 4 bits: those with mma.sync take twice the time.
_LEAST_ROWS = 1400
_LEAST_ROWS_OF_4_BITS = 512
_LEAST_ROWS_SIDE_BY_SIDE = 4096  #: of tokens that low row tiles would gather
_VECTOR = 8  #: numbers that a thread reads at a time, or of 4 bits twice as many: kVec in kernels/widen.h
_KINDS = ("e4m3", "e5m2", "nvfp4")  #: WidenKind in kernels/widen.h, whose last one copies others


def _plain_options(options: PlanOptions, kv: DType) -> PlanOptions:
    """The options of attention over copies of keys, of type `kv`."""
    return options._replace(types=options.types._replace(kv=kv))


def plain_decision(spec: AttentionSpec, decision: Decision, device: torch.device, backend: str) -> Decision:
    """The kernel over copies of keys; where splits are fixed the same variant, whose sums are those without copies."""
    if spec.options.fixed_split_size:
        return decision.over_copies
    return spec._replace(options=_plain_options(spec.options, spec.options.types.q)).decide(device, backend)


def may_pay(options: PlanOptions, decision: Decision, backend: str) -> bool:
    """Whether copies of keys are possible and worth a look. Prompts are long, no mask hides most keys, the caller has
    pinned no kernel, and results may depend on neighbours, as the choice of a kernel does, or the kernel makes the same
    sums over copies.
    """
    problem, types = decision.problem, options.types
    puts_side_by_side = options.page_size == 1 and options.fixed_split_size != 0 and types.kv == types.q
    return (
        types.q == types.o
        and types.q.bits == 16
        and (types.kv.slug in _KINDS or puts_side_by_side)
        and not backend.startswith(PIN)
        and (decision.kernel.is_slower_over_8_bits or (types.kv is NVFP4 and problem.on_cuda))
        and problem.rows >= _least_rows(options)
        and problem.mask in (MaskMode.NONE, MaskMode.CAUSAL)
        and options.page_size > 0
        and options.logits.window_left < 0
        and not (options.cascade or options.variant)
        and (not options.fixed_split_size or _makes_same_sums(decision))
    )


def _makes_same_sums(decision: Decision) -> bool:
    """Whether the kernel makes the same sums of keys in place and of their copies: fa3 alone takes copies in fp16, and
    where it widens it applies soft caps and biases elsewhere.
    """
    kernel, problem = decision.kernel, decision.problem
    changes_logits = problem.soft_cap or problem.pos_encoding is not PosEncodingMode.NONE
    if not kernel.is_slower_over_8_bits or problem.kv is NVFP4 or (problem.kv.bits == 8 and changes_logits):
        return False
    return kernel.tile(decision.over_copies.key).kv == kernel.tile(decision.key).kv


def is_faster(plain: Decision, decision: Decision) -> bool:
    """Whether the kernel for the converted keys is the same, or of keys of 4 bits one that does not take these, and its
    variant is available or may be compiled.
    """
    is_better = plain.kernel.scaled_params is None if decision.problem.kv is NVFP4 else plain.kernel is decision.kernel
    return is_better and is_obtainable(plain.spec) and is_obtainable(_key(plain).spec())


def _least_rows(options: PlanOptions) -> int:
    if options.types.kv.bits == 16:
        return _LEAST_ROWS_SIDE_BY_SIDE
    return _LEAST_ROWS_OF_4_BITS if options.types.kv is NVFP4 else _LEAST_ROWS


def _key(plain: Decision) -> OperationKey:
    return OperationKey("widen", without_matrix_unit(plain.key.target), plain.key.kv.slug)


class UpcastPrologue(Prologue):
    """The part of a plan that converts: the memory of the copies, and the batch that the kernel is planned on."""

    def __init__(
        self, plain: Decision, indices: Indices, options: PlanOptions, rest: Workspace, memory: torch.Tensor
    ) -> None:
        indices = kept(indices)
        assert indices.kv_indices is not None
        self._first, count = _pages(indices)
        copied = _plain_options(options, plain.key.kv)._replace(page_size=plain.problem.page_size)
        if copied.page_size == 0:
            planned = indices._replace(kv_indices=None, kv_indptr=indices.kv_indptr - self._first)
        else:
            pages = torch.arange(-self._first, count, dtype=torch.int32, device="cpu").clamp_(min=0)
            planned = indices._replace(kv_indices=pages)
        super().__init__(indices, planned, copied, rest, 0, largest_page(indices))
        self._pages = indices.kv_indices.to(memory.device, torch.int32)  # the same memory where it lies there already
        self._use(memory, self._pages)
        numbers, rows = memory.view(plain.key.kv.torch), (count, options.page_size, options.num_kv_heads)
        rows = rows if copied.page_size else (1, count, options.num_kv_heads)
        size = math.prod(rows) * options.head_dim_qk
        self._k = numbers[:size].view(*rows, options.head_dim_qk)
        self._v = numbers[size : size + math.prod(rows) * options.head_dim_vo].view(*rows, options.head_dim_vo)
        self._params = WidenParams(
            k_out=self._k.data_ptr(), v_out=self._v.data_ptr(),
            kv_indices=self._pages.data_ptr() + self._first * self._pages.element_size(), num_indices=count,
            page_size=options.page_size, num_kv_heads=options.num_kv_heads, head_dim_k=options.head_dim_qk,
            head_dim_v=options.head_dim_vo, kind=[*_KINDS, options.types.kv.slug].index(options.types.kv.slug),
        )  # fmt: skip
        self._key = _key(plain)
        vectors = max(options.head_dim_qk, options.head_dim_vo) // (_VECTOR * (2 if options.types.kv is NVFP4 else 1))
        self._grid = row_grid(count * options.page_size, options.num_kv_heads * vectors)

    def bind(
        self, _q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _out: torch.Tensor, views: Mapping[str, View]
    ) -> dict[str, View]:
        for name in {"k", "v", "k_sf", "v_sf"} & {*views}:
            for dim, stride in zip(("page", "token", "head"), views[name].strides, strict=False):
                setattr(self._params, f"{name}_{dim}_stride", stride * (k.element_size() if name in "kv" else 1))
        self._params.num_pages = min(k.shape[0], v.shape[0], 2**31 - 1)  # page numbers have 32 bits
        return {"k": view_of(self._k), "v": view_of(self._v)}

    def launch(self, pointers: list[int]) -> list[int]:
        q, k, v, *others = pointers
        self._record_stream()
        self._params.k, self._params.v = k, v
        if self._params.kind == _KINDS.index(NVFP4.slug):
            *others, self._params.k_sf, self._params.v_sf = others
        module = get_module(self._key.spec())
        launch(module, ctypes.addressof(self._params), self._pages.device, grid=self._grid, block=PARALLEL_THREADS)
        return [q, self._k.data_ptr(), self._v.data_ptr(), *others]


def fit_workspace(
    workspace: Workspace, indices: Indices, options: PlanOptions, plain: Decision
) -> tuple[UpcastPrologue | None, str]:
    """The launch, or None if the copies do not fit into the caller's workspace, if too few queries see the keys, or if
    plan() will refuse the pages; and a note for explain().
    """
    if isinstance(workspace, OwnWorkspace):  # a copy of the cache is too much to ask torch for
        return None, ""
    first, count = _pages(indices)
    if first < 0 or count <= 0 or indices.kv_indices is None or indices.kv_indices.shape[0] < first + count:
        return None, ""
    if _rows_of_a_key(indices, options) < _least_rows(options):
        return None, ""
    token_bytes = options.num_kv_heads * (options.head_dim_qk + options.head_dim_vo) * options.types.q.bits // 8
    parts, num_bytes = set_aside(workspace, count * options.page_size * token_bytes)
    done = "copied" if options.types.kv.bits == 16 else "widened"
    if parts is None:
        return None, (
            f"keys and values are {'gathered' if done == 'copied' else done} in the kernel: {num_bytes} bytes of "
            f"workspace would hold {done} ones, over which {plain.kernel.name} is faster"
        )
    note = f"keys and values are {done} into {num_bytes} bytes of the workspace, ahead of the kernel"
    return UpcastPrologue(plain, indices, options, *parts), note


def _pages(indices: Indices) -> tuple[int, int]:
    """Where the batch's page numbers begin among paged_kv_indices, and how many there are."""
    first = int(indices.kv_indptr[0])
    return first, int(indices.kv_indptr[-1]) - first


def _rows_of_a_key(indices: Indices, options: PlanOptions) -> float:
    """How many query rows see a key, in the mean."""
    qo_lens, kv_lens = indices.qo_lens(), indices.kv_lens()
    seen = kv_lens - qo_lens.minimum(kv_lens) / 2 if options.causal else kv_lens
    return options.group_size * float((qo_lens * seen).sum()) / max(1, int(kv_lens.sum()))


_LARGEST_EXPONENT = 15  #: of numbers in the copy: float16 ends at 2^16
_MOST_SHIFT = 64  #: binary places by which it is moved at most: the scale of logits stays within float32


def run_upcast(
    run: Callable[..., Any], options: PlanOptions, q: torch.Tensor, kv: Any, out: torch.Tensor | None,
    lse: torch.Tensor | None, return_lse: bool, given: Any,
) -> Any:  # fmt: skip
    """`run` of a plan with queries converted to the kernel's type. Each scale of the RunOptions `given` is a number or
    float32 [heads].
    """
    check_shape(check_tensor(q, "q"), "q", {"rows": None, "num_qo_heads": None, "head_dim_qk": None})
    wide, (q_scale, k_scale, v_scale) = q.to(options.types.q.torch), (given.q_scale, given.k_scale, given.v_scale)
    of_q, of_k, of_v = _of_heads(options, given, q.device)
    logits_scale_by = given.logits_scale_by
    if of_q is not None or of_k is not None:
        wide, number, by = _scaled(wide, _product(of_q, of_k), torch.finfo(q.dtype).max, _reads_scales(options))
        q_scale = number if of_q is not None else q_scale
        k_scale = k_scale if of_k is None else number if of_q is None else None
        logits_scale_by = _product(logits_scale_by, by)
    others = given.others  # keys and values of a prefix, or further parts of the queries
    if not options.prefix:
        others = tuple(tensor.to(wide.dtype) if tensor.dtype is q.dtype else tensor for tensor in others)
    upcast = given._replace(
        q_scale=q_scale, k_scale=k_scale, v_scale=v_scale if of_v is None else None, logits_scale_by=logits_scale_by,
        others=others,
    )  # fmt: skip
    result = run(wide, kv, out, lse, return_lse, upcast)
    if of_v is not None:
        (result[0] if isinstance(result, tuple) else result).mul_(of_v)
    return result


def has_scales_of_heads(given: Any) -> bool:
    """Whether a scale of the RunOptions is a tensor of several numbers."""
    scales = given.q_scale, given.k_scale, given.v_scale
    return any(isinstance(scale, torch.Tensor) and scale.numel() != 1 for scale in scales)


def run_scaled(
    run: Callable[..., Any], options: PlanOptions, q: torch.Tensor, kv: Any, out: torch.Tensor | None,
    lse: torch.Tensor | None, return_lse: bool, given: Any,
) -> Any:  # fmt: skip
    """`run` of a plan whose kernel reads 8-bit queries as they are, with scales of heads: it takes those of logits."""
    of_q, of_k, of_v = _of_heads(options, given, q.device)
    of_logits = _product(of_q, of_k)
    rest = given._replace(
        q_scale=given.q_scale if of_q is None else None, k_scale=given.k_scale if of_k is None else None,
        v_scale=given.v_scale if of_v is None else None, others=() if of_logits is None else (of_logits.view(-1),),
    )  # fmt: skip
    result = run(q, kv, out, lse, return_lse, rest)
    if of_v is not None:
        (result[0] if isinstance(result, tuple) else result).mul_(of_v)
    return result


def check_scales(q: torch.Tensor, **scales: Any) -> None:
    """ValidationError for scales per head with 16-bit queries, by the caller's name."""
    for name, scale in scales.items():
        if isinstance(scale, torch.Tensor) and scale.numel() != 1 and check_tensor(q, "q").element_size() > 1:
            raise ValidationError(f"{name}: expected one number with queries of {q.dtype}, got {list(scale.shape)}.")


def scales_of_values(
    options: PlanOptions, q: torch.Tensor, v_scale: Any, name: str = "v_scale"
) -> tuple[float, torch.Tensor | None]:
    """What a result of several launches is multiplied by once they are merged: a number, and scales of query heads."""
    check_scales(q, **{name: v_scale})
    of_v = _of_query_heads(v_scale, name, options.num_kv_heads, options.num_qo_heads, q.device)
    return (scalar(v_scale, name), None) if of_v is None else (1.0, of_v)


def _of_heads(options: PlanOptions, given: Any, device: torch.device) -> tuple[torch.Tensor | None, ...]:
    """Those of q_scale, k_scale and v_scale that are scales of heads, as scales of query heads."""
    num_qo_heads, num_kv_heads = options.num_qo_heads, options.num_kv_heads
    return (
        _of_query_heads(given.q_scale, "q_scale", num_qo_heads, num_qo_heads, device),
        _of_query_heads(given.k_scale, "k_scale", num_kv_heads, num_qo_heads, device),
        _of_query_heads(given.v_scale, "v_scale", num_kv_heads, num_qo_heads, device),
    )


def _of_query_heads(scale: Any, name: str, count: int, num_qo_heads: int, device: torch.device) -> torch.Tensor | None:
    """Scales of heads as float32 [num_qo_heads, 1]; None for one number, which kernels take."""
    if not isinstance(scale, torch.Tensor) or scale.numel() == 1:
        return None
    check_same_device(check_tensor(scale, name), name, device)
    check_shape(scale, name, {"heads": count})
    return scale.float().repeat_interleave(num_qo_heads // count)[:, None]


def _product(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    return b if a is None else a if b is None else a * b


def _reads_scales(options: PlanOptions) -> bool:
    """Whether kernels on a GPU read a scale of logits there: over pages, but not over copies of rotated keys."""
    return options.page_size > 0 and options.logits.pos_encoding is not PosEncodingMode.ROPE_LLAMA


def _scaled(
    wide: torch.Tensor, factors: Any, most: float, reads_scales: bool
) -> tuple[torch.Tensor, float | None, torch.Tensor | None]:
    """`wide` times the factors of its heads, moved into the range of its type, which it has for itself; and what
    logits are to be multiplied by, as a number and as a float32 on the device.

    most: the largest number of the queries' type. Only a kernel that cannot read the device's number makes the host
    wait for it; where it cannot wait, in a capture, the range is not moved.
    """
    if torch.finfo(wide.dtype).max > 2.0**16 or not wide.numel():  # bfloat16 has the range of the factors
        return wide.mul_(factors), None, None
    is_on_host = wide.device.type == "cpu"
    if not (is_on_host or reads_scales) and is_capturing(wide.device):
        return wide.mul_(factors), None, None
    unit = _unit(wide, factors, most)
    wide.mul_(factors / unit)
    return (wide, None, unit) if reads_scales and not is_on_host else (wide, float(unit), None)


def _unit(wide: torch.Tensor, factors: torch.Tensor, most: float) -> torch.Tensor:
    """The power of two that brings the largest finite product below 2^15; float32 on the device."""
    peaks = torch.linalg.vector_norm(wide, math.inf, dim=(0, 2), dtype=torch.float32).nan_to_num(most, most)
    top = (peaks * factors[:, 0].abs()).nan_to_num(0.0, 0.0).amax()
    places = torch.frexp(top).exponent - _LARGEST_EXPONENT
    return torch.exp2(places.clamp(-_MOST_SHIFT, _MOST_SHIFT).float())
