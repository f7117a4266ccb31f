"""xqa(): decode with a block table, with the arguments of all versions of FlashInfer's function.

The module is callable: `quire.xqa(...)`, FlashInfer's name for the function, is `quire.xqa.xqa(...)`. The computation
is that of xqa_batch_decode_with_kv_cache() (decode.py).

They add exp(logit) to the denominators of their KV head's queries, and nothing to the sums. No kernel reads them:
attention over the other keys is multiplied by the part of the denominator that these have, in float32.
"""

from __future__ import annotations

import inspect
import math
import sys
from types import ModuleType
from typing import Any

import torch

from quire.cache.latents import LATENT_DIM, latent_parts
from quire.calls import Output, PagedKV, Scale
from quire.calls.decode import TableCall
from quire.engine.checks import check_output, check_positive, check_same_device, check_shape, check_tensor, scalar
from quire.engine.device import OwnWorkspace, UserWorkspace, Workspace
from quire.engine.operands import OperandValue
from quire.engine.plan_cache import replayed
from quire.engine.tensors import LN2
from quire.engine.upcast import scaled
from quire.errors import ValidationError
from quire.kernels.expressions.variant import Variant
from quire.kernels.features import KVLayout

__all__ = ["xqa", "xqa_mla"]


@replayed
def xqa(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor,
    output: torch.Tensor | None = None, workspace_buffer: torch.Tensor | None = None,
    semaphores: torch.Tensor | None = None, num_kv_heads: int | None = None, page_size: int | None = None,
    sinks: torch.Tensor | None = None, q_scale: float | torch.Tensor = 1.0,
    kv_scale: float | torch.Tensor | None = None, sliding_win_size: int = 0, kv_layout: str | int | None = "NHD",
    sm_count: int | None = None, enable_pdl: bool | None = None, rcp_out_scale: float = 1.0, q_seq_len: int = 1,
    mask: torch.Tensor | None = None, *, q_cu_seq_lens: torch.Tensor | None = None, k_sf_cache: Any = None,
    v_sf_cache: Any = None, head_dim: int | None = None, sliding_window_size: int = -1,
    pos_encoding_mode: str = "NONE", rope_scale: float | None = None, rope_theta: float | None = None,
    backend: str = "auto", variant: Variant | None = None, **operands: OperandValue,
) -> torch.Tensor:  # fmt: skip
    """Attention of the last q_seq_len tokens of each request over its pages, like FlashInfer's function.

    q: [batch_size, 1, num_qo_heads, head_dim], where 1 is the beam width and must be 1; or, without it, [batch_size,
    num_qo_heads, head_dim]; with draft tokens [batch_size, 1, q_seq_len, num_qo_heads, head_dim]; in float16 or
    bfloat16 (on the CPU also float32). k_cache, v_cache: [num_pages, page_size, num_kv_heads, head_dim] (kv_layout
    "HND": heads before tokens), or those rows as [num_pages * page_size * num_kv_heads, head_dim], in q's dtype,
    float8_e4m3fn or float8_e5m2. The 2-D cache needs num_kv_heads and page_size; otherwise they and head_dim are
    redundant, and checked. Any page size is supported. page_table: int32 [batch_size, pages]. seq_lens: uint32 or int32
    [batch_size] or [batch_size, 1], tokens of each request including new ones, at most pages * page_size.

    output: of q's shape, in q's dtype or float8_e4m3fn. Only with the latter, rcp_out_scale multiplies the result.
    Logits are q . k * q_scale * kv_scale / sqrt(head_dim), and kv_scale also multiplies the result. Scales are numbers,
    or tensors of one element, which are read on their device; None is 1. sliding_win_size: how many keys a query sees,
    including its own; 0: all. sliding_window_size is the same (-1: all). mask, and q_cu_seq_lens for q
    [q_cu_seq_lens[-1], num_qo_heads, head_dim]: as in xqa_batch_decode_with_kv_cache(), with q_seq_len for
    q_len_per_req. pos_encoding_mode, rope_scale, rope_theta: as in BatchPrefillWithPagedKVCacheWrapper.plan(). variant:
    a custom quire.Variant, whose operands are keywords.

    sinks: float32 logits (natural logarithm) [num_kv_heads, group_size] or [num_qo_heads] that are added to the
    denominators; or sink tokens [num_sink_tokens, num_kv_heads, head_dim], floating-point keys without values, which
    every query sees whatever the window and the mask hide: they add exp(q . k * q_scale * kv_scale / sqrt(head_dim)).
    Sink tokens have no position, and are refused beside pos_encoding_mode and variants.

    Optional: workspace_buffer is used for partial results if given, and need not be zeroed; semaphores (uint32) and
    sm_count are checked but not needed. By position, sm_count may come in place of kv_layout, as in older versions.

    k_sf_cache, v_sf_cache: the scales of a cache of 4 bits (NVFP4), whose rows are uint8 [head_dim / 2]: float8_e4m3fn
    in the shape and order of the caches, with head_dim / 16 as the last dimension. kv_scale is their global scale.

    Returns `output`, or a new tensor of q's shape. Raises ValidationError naming the argument, or UnsupportedError with
    each kernel's reason.

    >>> q = torch.randn(2, 8, 64, dtype=torch.bfloat16)
    >>> k_cache, v_cache = torch.randn(2, 6, 16, 2, 64, dtype=torch.bfloat16)
    >>> page_table = torch.tensor([[4, 0], [2, 0]], dtype=torch.int32)
    >>> quire.xqa(q, k_cache, v_cache, page_table, torch.tensor([21, 16], dtype=torch.int32), page_size=16).shape
    torch.Size([2, 8, 64])
    """
    layout = _layout(kv_layout, sm_count)
    rows, q_len = _query_rows(q, q_seq_len, q_cu_seq_lens is not None)
    if head_dim is not None and check_positive(head_dim, "head_dim") != rows.shape[-1]:
        raise ValidationError(f"head_dim: expected {rows.shape[-1]}, q's last dimension, got {head_dim}.")
    cache = _cache(k_cache, v_cache, page_size, num_kv_heads, layout)
    cache = cache._replace(scales=_scales(k_sf_cache, v_sf_cache, cache, layout))
    workspace, most = _workspace(workspace_buffer, semaphores, q.device), _most_tokens(page_table, cache.page_size)
    q_factor, kv_factor = (
        Scale.of(value, name, q.device, positive=True) for value, name in ((q_scale, "q_scale"), (kv_scale, "kv_scale"))
    )
    logits_scale = q_factor.times(kv_factor).times(Scale(1 / math.sqrt(rows.shape[-1])))
    o_scale = kv_factor.times(_output_scale(rcp_out_scale, output))
    logits, tokens = _sinks(sinks, cache, rows)
    call = TableCall(
        rows, cache, workspace, page_table, _lengths(seq_lens), most, logits_scale, o_scale, layout, q_len=q_len,
        q_cu_seq_lens=q_cu_seq_lens, window_left=_window(sliding_win_size, sliding_window_size),
        out=_output_rows(output, q, cache.head_dim_vo), sinks=logits, enable_pdl=enable_pdl, mask=mask,
        backend=backend, pos_encoding=(pos_encoding_mode, rope_scale, rope_theta), variant=variant, operands=operands,
        name="xqa",
    )  # fmt: skip
    if tokens is None:
        result: torch.Tensor = call.attend()
    else:
        _refuse_beside_tokens(pos_encoding_mode, variant)
        result = attend_beside(call, tokens)
    return result.view(*q.shape[:-1], cache.head_dim_vo) if output is None else output


@replayed
def xqa_mla(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor,
    seq_lens: torch.Tensor | None = None, output: torch.Tensor | None = None,
    workspace_buffer: torch.Tensor | None = None, semaphores: torch.Tensor | None = None,
    page_size: int | None = None, q_scale: float | torch.Tensor = 1.0, kv_scale: float | torch.Tensor | None = 1.0,
    sm_count: int | None = None, enable_pdl: bool | None = None, *, head_dim: int | None = None,
    num_kv_heads: int | None = None, backend: str = "auto",
) -> torch.Tensor:  # fmt: skip
    """xqa() for multi-head latent attention (MLA): one query per request, any number of heads, over a cache of latents.

    q: [batch_size, 1, num_heads, 576] or without the beam width 1. k_cache: [num_pages, page_size, 1, 576] or without
    the dimension of 1; v_cache: the same tensor, or its first 512 dims. page_table, seq_lens, output [..., 512],
    workspace_buffer, semaphores, page_size, sm_count: as in xqa(). Logits are q . k * q_scale * kv_scale, without
    further factors, and kv_scale also multiplies the result.

    FlashInfer's manual shows xqa_mla(q, mla_kv_cache, page_table, seq_lens, head_dim=, page_size=, num_kv_heads=) with
    mla_kv_cache [num_pages, page_size, num_kv_heads, 2 * head_dim], keys followed by values. Such calls are passed to
    xqa().

    Returns `output`, or a new tensor. Raises ValidationError naming the argument, or UnsupportedError.

    >>> q, cache = torch.randn(2, 1, 16, 576).bfloat16(), torch.randn(6, 16, 1, 576).bfloat16()
    >>> page_table, seq_lens = torch.tensor([[4, 0], [2, 0]]), torch.tensor([21, 16])
    >>> quire.xqa_mla(q, cache, cache, page_table, seq_lens, page_size=16, q_scale=192**-0.5).shape
    torch.Size([2, 1, 16, 512])
    """
    if seq_lens is None:  # as the page has it: one cache, and then page_table and seq_lens
        return _xqa_of_halves(
            q, k_cache, v_cache, page_table, head_dim, page_size=page_size, num_kv_heads=num_kv_heads, output=output,
            workspace_buffer=workspace_buffer, semaphores=semaphores, q_scale=q_scale, kv_scale=kv_scale,
            sm_count=sm_count, enable_pdl=enable_pdl, backend=backend,
        )  # fmt: skip
    rows, _ = _query_rows(q, 1, False)
    for name, value, expected in (("head_dim", head_dim, q.shape[-1]), ("num_kv_heads", num_kv_heads, 1)):
        if value not in (None, expected):
            raise ValidationError(f"{name}: expected {expected}, got {value}.")
    _layout("NHD", sm_count)
    cache = _latents(k_cache, v_cache, page_size)
    q_factor, kv_factor = (
        Scale.of(value, name, q.device, positive=True) for value, name in ((q_scale, "q_scale"), (kv_scale, "kv_scale"))
    )
    result: torch.Tensor = TableCall.of_latents(
        latent_parts(rows, "q"), latent_parts(cache, "k_cache"), _workspace(workspace_buffer, semaphores, q.device),
        page_table, _lengths(seq_lens), _most_tokens(page_table, cache.shape[1]), q_factor.times(kv_factor), kv_factor,
        out=_output_rows(output, q, LATENT_DIM), enable_pdl=enable_pdl, backend=backend,
    ).attend()  # fmt: skip
    return result.view(*q.shape[:-1], LATENT_DIM) if output is None else output


def _xqa_of_halves(
    q: torch.Tensor, kv_cache: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor, head_dim: Any,
    **options: Any,
) -> torch.Tensor:  # fmt: skip
    """xqa() over a cache [num_pages, page_size, num_kv_heads, 2 * head_dim] of keys and then values."""
    dim = check_positive(head_dim, "head_dim")
    sizes = {"num_pages": None, "page_size": options["page_size"], "num_kv_heads": options["num_kv_heads"]}
    check_shape(check_tensor(kv_cache, "mla_kv_cache"), "mla_kv_cache", {**sizes, "2 * head_dim": 2 * dim})
    keys, values = kv_cache[..., :dim], kv_cache[..., dim:]
    return xqa(q, keys, values, page_table, seq_lens, head_dim=dim, **options)


def _latents(k_cache: Any, v_cache: Any, page_size: Any) -> torch.Tensor:
    """The cache [num_pages, page_size, 576] of keys, whose first dims are the values."""
    cache: torch.Tensor = check_tensor(k_cache, "k_cache")
    cache = cache.squeeze(2) if cache.dim() == 4 and cache.shape[2] == 1 else cache
    size = None if page_size is None else check_positive(page_size, "page_size")
    check_shape(cache, "k_cache", {"num_pages": None, "page_size": size, "head_dim": LATENT_DIM + 64})
    values = check_tensor(v_cache, "v_cache")
    if values.data_ptr() != k_cache.data_ptr() or values.stride() != k_cache.stride():
        raise ValidationError("v_cache: expected k_cache itself, or its first 512 dims: latents are keys and values.")
    return cache


class _Callable(ModuleType):
    """This module, made callable as the function of its name."""

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the function."""
        return inspect.signature(xqa)

    def __call__(self, *args: Any, **options: Any) -> torch.Tensor:
        """xqa() itself."""
        return xqa(*args, **options)


sys.modules[__name__].__class__ = _Callable


def _layout(kv_layout: Any, sm_count: Any) -> KVLayout:
    """kv_layout, in whose position older versions have sm_count."""
    if kv_layout is None or (isinstance(kv_layout, int) and not isinstance(kv_layout, bool)):
        if sm_count is not None:
            raise ValidationError(f"kv_layout: expected 'NHD' or 'HND', got {kv_layout!r} beside sm_count={sm_count}.")
        kv_layout, sm_count = "NHD", kv_layout
    if sm_count is not None:
        check_positive(sm_count, "sm_count")
    return KVLayout.of(kv_layout)


def _most_tokens(page_table: Any, page_size: int) -> int:
    """As many tokens as the pages of a request hold."""
    pages = check_tensor(page_table, "page_table")
    check_shape(pages, "page_table", {"batch_size": None, "pages": None})
    return int(pages.shape[1]) * page_size


def _query_rows(q: Any, q_seq_len: Any, is_ragged: bool) -> tuple[torch.Tensor, int]:
    """q as [rows, num_qo_heads, head_dim], and the rows of a request, or the most of one."""
    q_len, dims = check_positive(q_seq_len, "q_seq_len"), check_tensor(q, "q").dim()
    if dims:
        check_positive(q.shape[-1], "q: head_dim")
    beams: dict[str, int | None] = {"batch_size": None, "beam width": 1}
    sizes: dict[str, int | None] = {"num_qo_heads": None, "head_dim": None}
    if dims == 3:
        check_shape(q, "q", {"rows": None, **sizes})
        if q_len > 1 and not is_ragged:
            raise ValidationError("q_seq_len: expected 1 for q of 3 dimensions without q_cu_seq_lens.")
        return q, q_len
    if is_ragged:
        raise ValidationError(f"q: expected [rows, num_qo_heads, head_dim] with q_cu_seq_lens, got {list(q.shape)}.")
    check_shape(q, "q", {**beams, **({} if dims == 4 and q_len == 1 else {"q_seq_len": q_len}), **sizes})
    return q.flatten(0, -3), q_len


def _output_rows(output: Any, q: torch.Tensor, head_dim_vo: int) -> torch.Tensor | None:
    """`output`, of q's shape, as rows of the same memory."""
    if output is None:
        return None
    dims = {f"q.shape[{i}]": size for i, size in enumerate(q.shape[:-1])}
    check_shape(check_output(output, "output"), "output", {**dims, "head_dim": head_dim_vo})
    if output.dim() > 4 and not output.is_contiguous():
        raise ValidationError(f"output: expected a contiguous tensor, got strides {tuple(output.stride())}.")
    rows: torch.Tensor = output.squeeze(1) if output.dim() > 3 else output
    return rows.flatten(0, -3)


def _cache(k_cache: Any, v_cache: Any, page_size: Any, num_kv_heads: Any, layout: KVLayout) -> PagedKV:
    pages = [
        _pages(t, name, page_size, num_kv_heads, layout) for t, name in ((k_cache, "k_cache"), (v_cache, "v_cache"))
    ]
    if pages[1].dtype is not pages[0].dtype or pages[1].shape[:-1] != pages[0].shape[:-1]:
        raise ValidationError(
            f"v_cache: expected k_cache's {k_cache.dtype} {list(k_cache.shape)}, got {v_cache.dtype} "
            f"{list(v_cache.shape)}."
        )
    cache = PagedKV.of((pages[0], pages[1]), layout)
    given = (("page_size", page_size, cache.page_size), ("num_kv_heads", num_kv_heads, cache.num_kv_heads))
    for name, value, actual in given:
        if value is not None and check_positive(value, name) != actual:
            raise ValidationError(f"{name}: expected {actual}, as k_cache {list(k_cache.shape)} has it, got {value}.")
    return cache


def _scales(k_sf_cache: Any, v_sf_cache: Any, cache: PagedKV, layout: KVLayout) -> tuple[torch.Tensor, ...]:
    if (k_sf_cache is None) != (v_sf_cache is None):
        raise ValidationError("k_sf_cache: expected it and v_sf_cache, or neither, got one of them.")
    if k_sf_cache is None:
        return ()
    named = ((k_sf_cache, "k_sf_cache"), (v_sf_cache, "v_sf_cache"))
    pages = [_pages(scales, name, cache.page_size, cache.num_kv_heads, layout) for scales, name in named]
    return scaled(cache.caller, (pages[0], pages[1]), cache.page_size)[1]


def _pages(cache: Any, name: str, page_size: Any, num_kv_heads: Any, layout: KVLayout) -> torch.Tensor:
    """The cache with a dimension for pages, tokens, heads and head_dim each."""
    dims = check_tensor(cache, name).dim()
    if dims == 4:
        return cache  # type: ignore[no-any-return]
    if dims != 2:
        raise ValidationError(
            f"{name}: expected [num_pages, page_size, num_kv_heads, head_dim] in the order of kv_layout, or its rows "
            f"[num_pages * page_size * num_kv_heads, head_dim], got {list(cache.shape)}."
        )
    page = [check_positive(page_size, "page_size"), check_positive(num_kv_heads, "num_kv_heads")]
    if cache.shape[0] % math.prod(page):
        raise ValidationError(
            f"{name}: expected a multiple of page_size * num_kv_heads={math.prod(page)} rows, got {cache.shape[0]}."
        )
    sizes = (cache.shape[0] // math.prod(page), *(page if layout is KVLayout.NHD else page[::-1]))
    return cache.unflatten(0, sizes)  # type: ignore[no-any-return]


def _workspace(buffer: Any, semaphores: Any, device: torch.device) -> Workspace:
    """Where partial results go: the caller's scratch, or memory of our own. Semaphores are not needed."""
    if semaphores is not None:
        check_same_device(check_tensor(semaphores, "semaphores"), "semaphores", device)
        if semaphores.dtype not in (torch.uint32, torch.int32):
            raise ValidationError(f"semaphores: expected dtype torch.uint32, got {semaphores.dtype}.")
    if buffer is None:
        return OwnWorkspace(device)
    workspace = UserWorkspace(buffer, "workspace_buffer")
    check_same_device(buffer, "workspace_buffer", device)
    return workspace


def _lengths(seq_lens: Any) -> torch.Tensor:
    """seq_lens without a dimension for the beam."""
    if check_tensor(seq_lens, "seq_lens").dim() == 2:
        check_shape(seq_lens, "seq_lens", {"batch_size": None, "beam width": 1})
        return seq_lens.squeeze(1)  # type: ignore[no-any-return]
    return seq_lens  # type: ignore[no-any-return]


def _window(sliding_win_size: Any, sliding_window_size: Any) -> int:
    """window_left of whichever was given: both count the query's own key."""
    sizes = []
    for name, size, least in (
        ("sliding_win_size", sliding_win_size, 0),
        ("sliding_window_size", sliding_window_size, -1),
    ):
        if isinstance(size, bool) or not isinstance(size, int) or not least <= size < 2**31:
            raise ValidationError(f"{name}: expected the number of keys, or {least} for all, got {size!r}.")
        sizes.append(max(0, size))
    if all(sizes):
        raise ValidationError(f"sliding_window_size: expected -1 beside sliding_win_size={sizes[0]}, got {sizes[1]}.")
    return max(sizes) - 1


def _output_scale(rcp_out_scale: Any, output: Any) -> Scale:
    """What a result of 8 bits is multiplied by."""
    scale = scalar(rcp_out_scale, "rcp_out_scale", positive=True)
    if scale != 1.0 and (output is None or output.dtype is not torch.float8_e4m3fn):
        raise ValidationError(f"rcp_out_scale: expected 1 where output is not float8_e4m3fn, got {scale}.")
    return Scale(scale)


def _sinks(sinks: Any, cache: PagedKV, rows: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Logits of query heads, or keys of sink tokens."""
    if sinks is None:
        return None, None
    num_kv_heads, num_qo_heads = cache.num_kv_heads, rows.shape[1]
    shape = tuple(check_tensor(sinks, "sinks").shape)
    if len(shape) == 3:
        return None, check_sink_tokens(sinks, num_kv_heads, rows.shape[2], rows.device)
    if shape not in ((num_qo_heads,), (num_kv_heads, num_qo_heads // num_kv_heads)):
        raise ValidationError(
            f"sinks: expected float32 logits [num_qo_heads={num_qo_heads}] or [num_kv_heads={num_kv_heads}, "
            f"{num_qo_heads // num_kv_heads}], or keys of sink tokens [num_sink_tokens, num_kv_heads={num_kv_heads}, "
            f"head_dim={rows.shape[2]}], got {list(shape)}."
        )
    return sinks, None


def _refuse_beside_tokens(pos_encoding_mode: Any, variant: Variant | None) -> None:
    """Sink tokens have no position, and no variant says what becomes of their logits."""
    for name, is_given in (("pos_encoding_mode", pos_encoding_mode != "NONE"), ("variant", variant is not None)):
        if is_given:
            raise ValidationError(
                f"sinks: expected logits of heads beside {name}, got sink tokens, which have no position; pass the "
                f"logarithm of what they add to each head's denominator, or put the tokens into the cache."
            )


def check_sink_tokens(sinks: torch.Tensor, num_kv_heads: int, head_dim: int, device: torch.device) -> torch.Tensor:
    """`sinks` as keys [num_sink_tokens, num_kv_heads, head_dim] of any floating-point type."""
    expected = {"num_sink_tokens": None, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    check_shape(check_tensor(sinks, "sinks"), "sinks", expected)
    check_same_device(sinks, "sinks", device)
    if not sinks.is_floating_point():
        raise ValidationError(f"sinks: expected floating-point keys, got {sinks.dtype}.")
    return sinks


def attend_beside(call: TableCall, keys: torch.Tensor) -> torch.Tensor:
    """The call, which has no sinks of heads, beside sink tokens; fills and returns its `out`."""
    rows, output = call.query, Output.of(call.out, call.query, call.cache.head_dim_vo, 1.0)
    result, lse = call._replace(v_scale=Scale(1.0), out=output.result, lse_unit=LN2, return_lse=True).attend()
    weight = _weight_of_keys(lse, torch.logsumexp(_logits(rows, keys, call.logits_scale), dim=-1))
    wide = result.float() * _scaled(weight, call.v_scale)[..., None]
    if output.caller.element_size() == 1:
        most = torch.finfo(output.caller.dtype).max
        wide.clamp_(-most, most)
    return output.caller.copy_(wide)


def _logits(rows: torch.Tensor, keys: torch.Tensor, scale: Scale) -> torch.Tensor:
    """float32 [rows, num_qo_heads, num_sink_tokens]."""
    num_kv_heads = keys.shape[1]
    grouped = rows.float().reshape(rows.shape[0], num_kv_heads, rows.shape[1] // num_kv_heads, rows.shape[2])
    return _scaled(torch.einsum("rhgd,nhd->rhgn", grouped, keys.float()).flatten(1, 2), scale)


def _scaled(x: torch.Tensor, scale: Scale) -> torch.Tensor:
    x = x * scale.number
    return x if scale.tensor is None else x * scale.tensor.view(())


def _weight_of_keys(lse: torch.Tensor, of_sinks: torch.Tensor) -> torch.Tensor:
    """What the keys have of the denominators; of a request without keys nothing. Both lse are in base e."""
    return torch.sigmoid(lse - of_sinks).masked_fill(lse.isneginf(), 0.0)
