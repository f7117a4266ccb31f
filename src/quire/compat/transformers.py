"""Quire as an attention implementation of Hugging Face transformers.

    from quire.compat.transformers import register
    register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="quire")

"quire" is for forward() and generate(): static and dynamic caches, padding, sliding windows, soft caps, sinks, grouped
heads, packed sequences, torch.compile. Keys and values are read where the cache has them. Which keys a query sees is
what transformers' own mask for sdpa says, so that every mask of every model holds; there is none where a batch has no
padding. A query that is alone in its request (decode) reads no mask: it reads the keys that it sees.

"quire_flash_2" is transformers' path for FlashAttention over the functions of quire.compat.flash_attn. It makes no
mask, and generate_batch() (continuous batching over a paged cache) takes it:

    model.set_attn_implementation("quire_flash_2")
    model.generate_batch(prompts, generation_config)

On a GPU give generate_batch() a ContinuousBatchingConfig(use_cuda_graph=(False, True)): its batches of several lengths
are planned on the host, which a capture cannot wait for.

Both are for inference: under autograd they raise ValidationError.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import wraps
from typing import Any

import torch
import transformers.modeling_flash_attention_utils as flash_utils
from torch.nn.functional import pad
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import flash_attention_mask, sdpa_mask

from quire.block_tables import indices_of
from quire.compat import flash_attn
from quire.compat.recent_plans import RecentPlans
from quire.compat.rows import equal_lengths, row_step, token_pages
from quire.errors import UnsupportedError, ValidationError
from quire.runtime.attention import AttentionSpec
from quire.runtime.ops import NOT_CAPTURABLE, is_tracing, operator
from quire.runtime.options import PlanOptions, Types, heads, logits_options
from quire.runtime.schedule import Indices, Lengths
from quire.types import KVLayout

__all__ = ["FLASH_NAME", "NAME", "attend", "make_mask", "register"]

NAME, FLASH_NAME = "quire", "quire_flash_2"  #: the second: transformers asks for "flash", and a 2 for paged decode
_recent, _none = RecentPlans(), RecentPlans(most=0)
_packed: MutableMapping[torch.Tensor, torch.Tensor | None] = WeakTensorKeyDictionary()  #: offsets, by position_ids


def register() -> None:
    """Makes "quire" and "quire_flash_2" known to transformers, in this process. May be called again.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from quire.compat.transformers import register
    >>> register()
    >>> small = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
    >>> model = LlamaForCausalLM(LlamaConfig(**small, attn_implementation="quire")).eval()
    >>> model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2, min_new_tokens=2, do_sample=False).shape
    torch.Size([1, 5])
    """
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)
    AttentionInterface.register(FLASH_NAME, flash_attention_forward)
    AttentionMaskInterface.register(FLASH_NAME, flash_attention_mask)
    _serve_flash_functions()


def _serve_flash_functions() -> None:
    """transformers imports the functions of a flash implementation by its name, and knows the names of packages."""
    imports = flash_utils._lazy_imports
    if hasattr(imports, "__wrapped__"):
        return

    @wraps(imports)
    def with_quire(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if implementation != FLASH_NAME:
            return imports(implementation, *args, **kwargs)
        functions = flash_attn.flash_attn_func, flash_attn.flash_attn_varlen_func, flash_attn.flash_attn_with_kvcache
        return *functions, flash_utils._pad_input, flash_utils._unpad_input

    flash_utils._lazy_imports = with_quire


def make_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None, local_size: int | None = None, allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> torch.Tensor | None:  # fmt: skip
    """sdpa's mask, bool [batch_size, 1, q_length, kv_length]; None where the last query sees all keys, the ones before
    it one less each (or all, if attention is not causal).

    The arguments are those of transformers' mask functions. sdpa takes None for top-left too, which attend() does not.
    """
    places = batch_size, q_length, kv_length, q_offset, kv_offset
    is_causal = allow_is_causal_skip and _is_plain(*places[1:], attention_mask, local_size)
    if is_causal:
        return None
    mask: torch.Tensor | None = sdpa_mask(
        *places, attention_mask=attention_mask, local_size=local_size, allow_is_causal_skip=False, **kwargs
    )
    return mask


def _is_plain(
    q_length: int, kv_length: int, q_offset: Any, kv_offset: int, padding: torch.Tensor | None, local_size: int | None
) -> bool:
    """Whether a causal mask, under a window of local_size, hides nothing but what lies right of the diagonal."""
    if is_tracing() or not isinstance(q_offset, int) or q_offset + q_length != kv_offset + kv_length:
        return False
    if local_size is not None and kv_length > local_size:
        return False
    return padding is None or bool(padding[:, kv_offset : kv_offset + kv_length].all())


def attend(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, dropout: float = 0.0, scaling: float | None = None,
    is_causal: bool | None = None, softcap: float | None = None, s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None, cache: Any = None, position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None, cu_seq_lens_k: torch.Tensor | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """What transformers' models call: query [batch, num_heads, q_length, head_dim], key and value [batch,
    num_key_value_heads, kv_length, head_dim]. Returns ([batch, q_length, num_heads, head_dim], None).

    attention_mask: bool [batch, 1, q_length, kv_length], or None as make_mask() has it. Sequences that lie one after
    another in one row are told apart by the mask, by cu_seq_lens_q and cu_seq_lens_k, or by position_ids that begin
    anew. s_aux: sinks. The window of `sliding_window` is in the mask. Raises ValidationError or UnsupportedError.
    """
    _refuse(dropout=dropout or None, position_bias=position_bias, cache=cache)
    _refuse(output_attentions=kwargs.get("output_attentions") or None)
    mask = _checked_mask(attention_mask, query, key)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    causal = query.shape[2] > 1 and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if mask is None and cu_seq_lens_q is None and causal:
        cu_seq_lens_q = cu_seq_lens_k = _packed_offsets(query, key, position_ids)
    head_dim = value.shape[-1]
    query, key, value = (_padded(t) for t in (query, key, value))
    if mask is None and cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        out = _attend_packed(query, key, value, cu_seq_lens_q, cu_seq_lens_k, scale, causal, softcap, s_aux)
    else:
        batch, num_heads, q_length, _ = query.shape
        out = query.new_empty((batch, q_length, num_heads, value.shape[-1]))
        sinks = None if s_aux is None else s_aux.detach().float().contiguous()
        given = query, key, value, out, mask, sinks, scale, causal, softcap or 0.0
        if is_tracing():
            _record(*given)  # a graph may write another mask into the same tensor
        else:
            _attend(*given, plans=_recent)
    return (out if out.shape[-1] == head_dim else out[..., :head_dim].contiguous()), None


def _refuse(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise UnsupportedError(
                f"{name}: not supported by attn_implementation={NAME!r}; got {type(value).__name__}."
            )


def _checked_mask(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    if mask is None:
        return None
    shape = query.shape[0], 1, query.shape[2], key.shape[2]
    fits = (
        isinstance(mask, torch.Tensor)
        and mask.dim() == 4
        and all(size in (1, wanted) for size, wanted in zip(mask.shape, shape, strict=True))
    )
    if not fits or mask.dtype is not torch.bool:
        got = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValidationError(
            f"attention_mask: expected torch.bool {list(shape)} (batch, 1, queries, keys), got {got}."
        )
    return mask if mask.shape == shape else mask.expand(shape)


def _padded(x: torch.Tensor) -> torch.Tensor:
    """With a head_dim that kernels take, and neighbours along it: zeros change no logit and no result."""
    dim = x.shape[-1]
    wanted = max(32, -(-dim // 16) * 16)
    if wanted != dim:
        return pad(x, (0, wanted - dim))
    return x if x.stride(-1) == 1 else x.contiguous()


def _attend_packed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_lens_q: torch.Tensor,
    cu_seq_lens_k: torch.Tensor, scale: float, causal: bool, softcap: float | None, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Sequences one after another in one row."""
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    cu_seqlens = cu_seq_lens_q.to(torch.int32), cu_seq_lens_k.to(torch.int32)
    out: torch.Tensor = flash_attn.flash_attn_varlen_func(
        q, k, v, *cu_seqlens, q.shape[0], k.shape[0], softmax_scale=scale, causal=causal, softcap=softcap or 0.0,
        s_aux=sinks,
    )  # fmt: skip
    return out.view(query.shape[0], -1, *out.shape[1:])


def _packed_offsets(query: torch.Tensor, key: torch.Tensor, position_ids: Any) -> torch.Tensor | None:
    """Where sequences begin in one row, whose position_ids [1, q_length] do not go on there; None if it is one."""
    length = query.shape[2]
    if query.shape[0] != 1 or key.shape[2] != length or is_tracing():
        return None
    if not isinstance(position_ids, torch.Tensor) or position_ids.shape != (1, length):
        return None
    if position_ids not in _packed:
        starts = (position_ids[0].diff() != 1).nonzero().view(-1).cpu() + 1
        whole = torch.cat([starts.new_zeros(1), starts, starts.new_full((1,), length)]).to(torch.int32)
        _packed[position_ids] = whole if len(starts) else None
    return _packed[position_ids]


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor, mask: torch.Tensor | None,
    sinks: torch.Tensor | None, scale: float, causal: bool, softcap: float, plans: RecentPlans = _none,
) -> None:  # fmt: skip
    """Writes out [batch, q_length, num_heads, head_dim]. Each row of the cache is a page (one row alone: ragged keys);
    under a mask that one query has for itself each token is, and its page table names the tokens that it sees.
    """
    if not out.numel():
        return
    batch, num_heads, q_length, head_dim = query.shape
    kv_length, step = key.shape[2], 0 if mask is None or q_length > 1 else _token_step(key, value)
    options = PlanOptions(
        *heads(num_heads, key.shape[1]), head_dim, value.shape[-1], Types.of(query.dtype, key.dtype, None),
        logits_options(head_dim, scale, -1, softcap, "NONE"), causal and mask is None,
        1 if step else kv_length if batch > 1 else 0,
    )  # fmt: skip

    shape = batch, q_length, kv_length

    def spec() -> AttentionSpec:
        if mask is not None and step:
            return AttentionSpec(_seen_tokens(mask[:, 0, 0], step), options)
        rows = equal_lengths(batch, kv_length)
        indices = Indices(1, None, q_length, rows.offsets, None, None, 1)
        if batch > 1:
            indices = indices_of(rows.rows, rows.lens, None, q_length, kv_length)
        return AttentionSpec(indices, options, None if mask is None else mask.reshape(-1))

    attention = plans.get((options, *shape, step), (mask,), KVLayout.HND, query.device, spec)
    k, v = (token_pages(t.transpose(1, 2)).transpose(1, 2) if step else t for t in (key, value))
    attention.run(
        query.transpose(1, 2).reshape(batch * q_length, num_heads, head_dim),
        (k, v) if options.page_size else (k[0], v[0]),
        out=out.flatten(0, 1), lse=None, return_lse=False, sinks=sinks, q_scale=None, k_scale=None, v_scale=None,
        window_left=None, enable_pdl=None,
    )  # fmt: skip


def _token_step(key: torch.Tensor, value: torch.Tensor) -> int:
    """Pages of one token from a row of the cache to the next; 0 if keys and values do not lie alike."""
    step = row_step(key.transpose(1, 2))
    return step if step == row_step(value.transpose(1, 2)) else 0


def _seen_tokens(seen: torch.Tensor, step: int) -> Indices | Lengths:
    """The page table of single queries that see bool [batch, kv_length]; on a GPU nobody waits for it."""
    batch = seen.shape[0]
    lens = seen.sum(1, dtype=torch.int32)
    if not seen.is_cpu:
        tokens = (~seen).to(torch.uint8).argsort(dim=1, stable=True)
        first = torch.arange(batch, device=seen.device)[:, None] * step
        return Lengths(lens, (tokens + first).to(torch.int32), 1, 1)
    row, token = seen.nonzero(as_tuple=True)
    indptr = pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
    pages = (row * step + token).to(torch.int32)
    return Indices(batch, None, 1, indptr, lens.clamp(max=1), pages, 1)


_record = operator(
    """transformers_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) out, Tensor? mask, Tensor? sinks,
       float scale, bool causal, float softcap) -> ()""",
    tags=NOT_CAPTURABLE,
)(_attend)
