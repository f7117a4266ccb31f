"""Quire as an attention implementation of Hugging Face transformers.

    from quire.engine.run import RunOptions
from quire.compat.transformers import register
    register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="quire")

"quire" is for forward() and generate(): static and dynamic caches, padding, sliding windows, soft caps, sinks, grouped
heads, packed sequences, torch.compile. Keys and values are read in place, from the cache. Masks are those that
transformers makes for sdpa. A model that computes attention itself (Bloom, GPT-J, ...) is refused when it is built with
UnsupportedError; see quire.compat.transformers_models. A causal batch without padding, or with left
padding, is planned from its lengths and reads no mask. Neither does decode, where a page table lists the keys that each
query sees. The layers of a model share one plan per step.

"quire_flash_2" is transformers' path for FlashAttention, with the functions of quire.compat.flash_attn. It makes no
mask, and generate_batch() (continuous batching over a paged cache) can use it:

    model.set_attn_implementation("quire_flash_2")
    model.generate_batch(prompts, generation_config)

On a GPU pass ContinuousBatchingConfig(use_cuda_graph=(False, True)) to generate_batch(): batches with prompts are
planned on the host, which is impossible in a capture.

Both are for inference: with gradients enabled they raise ValidationError.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import lru_cache, wraps
from typing import Any

import torch
import transformers.modeling_flash_attention_utils as flash_utils
from torch.nn.functional import pad
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import flash_attention_mask, sdpa_mask

from quire.compat import flash_attn
from quire.compat.transformers_models import check_models, may_omit_masks
from quire.engine.checks import check_no_grad
from quire.engine.operators import NOT_CAPTURABLE, is_tracing, operator
from quire.engine.options import PlanOptions, Types, heads, logits_options
from quire.engine.plan_cache import new_plan, plan_of, repeated
from quire.engine.run import RunOptions
from quire.engine.schedule import Indices, Lengths
from quire.engine.spec import AttentionSpec
from quire.errors import UnsupportedError, ValidationError

__all__ = ["FLASH_NAME", "NAME", "attend", "make_mask", "register"]

NAME, FLASH_NAME = "quire", "quire_flash_2"  #: the second: transformers asks for "flash", and a 2 for paged decode
_PADDING = "quire_padding"  #: attribute of masks: their version, and the tokens of padding on the left of each row
_TOKENS = "quire_tokens"  #: attribute of masks: their version, and _seen_tokens() of them
_REFUSED = {"output_attentions", "indices", "block_indices", "sinks"}  #: they change the result; others repeat the mask
_packed: MutableMapping[torch.Tensor, torch.Tensor | None] = WeakTensorKeyDictionary()  #: offsets, by position_ids


def register() -> None:
    """Registers "quire" and "quire_flash_2" with transformers in this process. May be called repeatedly.

    Models that do not call registered functions raise UnsupportedError when they are built with one of the names, or
    changed to it. Parts of composite models run transformers' eager attention instead, and are logged.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from quire.compat.transformers import register
    >>> register()
    >>> small = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
    >>> model = LlamaForCausalLM(LlamaConfig(**small, attn_implementation="quire")).eval()
    >>> model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2, min_new_tokens=2, do_sample=False).shape
    torch.Size([1, 5])
    """
    check_models({NAME: "", FLASH_NAME: "_supports_flash_attn"})
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
    config: Any = None, **kwargs: Any,
) -> torch.Tensor | None:  # fmt: skip
    """sdpa's mask, bool [batch_size, 1, q_length, kv_length]; None if the mask is plain causal, aligned at the last key
    (or, if attention is not causal, if all keys are visible).

    The arguments are those of transformers' mask functions. For sdpa None may also mean a top-left causal mask, for
    attend() it does not.
    """
    if config is not None and not is_tracing() and not may_omit_masks(config, NAME):
        allow_is_causal_skip = kwargs["allow_is_bidirectional_skip"] = False
    places, padding = (q_length, kv_length, q_offset, kv_offset), None
    if allow_is_causal_skip and _is_causal(*places, local_size):
        seen = None if attention_mask is None else attention_mask[:, kv_offset : kv_offset + kv_length]
        padding = _left_padding(seen)
        if padding is not None and not any(padding):
            return None
        if padding is not None and seen is not None and q_length == 1:
            return _with_padding(seen.bool()[:, None, None], padding)
    mask = sdpa_mask(
        batch_size, *places, attention_mask=attention_mask, local_size=local_size, allow_is_causal_skip=False, **kwargs
    )
    return None if mask is None else _with_padding(mask, padding)


def _with_padding(mask: torch.Tensor, padding: tuple[int, ...] | None) -> torch.Tensor:
    """The mask with its padding, for attend(), as a tensor that counts its changes, even in inference mode."""
    if not is_tracing() and mask.is_inference():
        with torch.inference_mode(False):
            mask = mask.clone()
    if padding is not None:
        vars(mask)[_PADDING] = mask._version, padding
    return mask


def _is_causal(q_length: int, kv_length: int, q_offset: Any, kv_offset: int, local_size: int | None) -> bool:
    """Whether a causal mask, under a window of local_size, hides nothing but padding and what is right of the diagonal,
    which ends at the last key.
    """
    if is_tracing() or not isinstance(q_offset, int) or q_offset + q_length != kv_offset + kv_length:
        return False
    return local_size is None or kv_length <= local_size


def _left_padding(seen: torch.Tensor | None) -> tuple[int, ...] | None:
    """The left padding of each row of bool [batch, kv_length]; () without any; None if other tokens are hidden, too."""
    if seen is None or not seen.numel():
        return ()
    first, count = torch.stack([seen.to(torch.uint8).argmax(1), seen.sum(1)]).tolist()  # one wait for a GPU
    is_left = all(pad + tokens == seen.shape[1] for pad, tokens in zip(first, count, strict=True))
    return tuple(first) if is_left else None


def attend(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, dropout: float = 0.0, scaling: float | None = None,
    is_causal: bool | None = None, softcap: float | None = None, s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None, cache: Any = None, position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None, cu_seq_lens_k: torch.Tensor | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """The attention function for transformers' models: query [batch, num_heads, q_length, head_dim], key and value
    [batch, num_key_value_heads, kv_length, head_dim]. Returns ([batch, q_length, num_heads, head_dim], None).

    attention_mask: bool [batch, 1, q_length, kv_length], or None as returned by make_mask(). Sequences packed in one
    row are separated by the mask, by cu_seq_lens_q and cu_seq_lens_k, or by position_ids that start again. s_aux:
    sinks. The mask already contains the window of `sliding_window`. Raises ValidationError or UnsupportedError.
    """
    if dropout or position_bias is not None or cache is not None or not _REFUSED.isdisjoint(kwargs):
        _refuse(dropout=dropout or None, position_bias=position_bias, cache=cache)
        _refuse(**{name: kwargs.get(name) for name in sorted(_REFUSED)})
    mask = None if attention_mask is None else _checked_mask(attention_mask, query, key)
    padding = None if mask is None or is_tracing() else _known_padding(mask)
    q_length, head_dim = query.shape[2], value.shape[-1]
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    causal = q_length > 1 and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if mask is None and cu_seq_lens_q is None and causal:
        cu_seq_lens_q = cu_seq_lens_k = _packed_offsets(query, key, position_ids)
    query, key, value = _padded(query), _padded(key), _padded(value)
    if mask is None and cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        out = _attend_packed(query, key, value, cu_seq_lens_q, cu_seq_lens_k, scale, causal, softcap, s_aux)
    else:
        if s_aux is not None:
            check_no_grad((s_aux,), "s_aux")
        sinks = None if s_aux is None else s_aux.float().contiguous()
        out = _attend_rows(query, key, value, mask, sinks, scale, causal, softcap or 0.0, padding)
    return (out if out.shape[-1] == head_dim else out[..., :head_dim].contiguous()), None


def _refuse(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise UnsupportedError(
                f"{name}: not supported by attn_implementation={NAME!r}; got {type(value).__name__}."
            )


def _checked_mask(mask: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """bool [batch, 1, q_length, kv_length]."""
    shape = query.shape[0], 1, query.shape[2], key.shape[2]
    if isinstance(mask, torch.Tensor) and mask.dtype is torch.bool:
        if mask.shape == shape:
            return mask
        if mask.dim() == 4 and all(size in (1, wanted) for size, wanted in zip(mask.shape, shape, strict=True)):
            return mask.expand(shape)
    got = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, torch.Tensor) else type(mask).__name__
    raise ValidationError(f"attention_mask: expected torch.bool {list(shape)} (batch, 1, queries, keys), got {got}.")


def _known_padding(mask: torch.Tensor) -> tuple[int, ...] | None:
    """The padding that make_mask() found, if the mask has not changed since."""
    version, padding = getattr(mask, _PADDING, (None, None))
    return padding if version is not None and version == mask._version else None


def _padded(x: torch.Tensor) -> torch.Tensor:
    """Padded with zeros to a head_dim that kernels support, and contiguous; this changes no logit and no result."""
    dim = x.shape[-1]
    if dim % 16 or dim < 32:
        return pad(x, (0, max(32, -(-dim // 16) * 16) - dim))
    return x if x.stride(-1) == 1 else x.contiguous()


def _attend_packed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_lens_q: torch.Tensor,
    cu_seq_lens_k: torch.Tensor, scale: float, causal: bool, softcap: float | None, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Attention of sequences packed in one row."""
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    cu_seqlens = cu_seq_lens_q.to(torch.int32), cu_seq_lens_k.to(torch.int32)
    out: torch.Tensor = flash_attn.flash_attn_varlen_func(
        q, k, v, *cu_seqlens, q.shape[0], k.shape[0], softmax_scale=scale, causal=causal, softcap=softcap or 0.0,
        s_aux=sinks,
    )  # fmt: skip
    return out.view(query.shape[0], -1, *out.shape[1:])


def _packed_offsets(query: torch.Tensor, key: torch.Tensor, position_ids: Any) -> torch.Tensor | None:
    """Where sequences begin in one row, which is where position_ids [1, q_length] restart; None for one sequence."""
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


def _attend_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, sinks: torch.Tensor | None,
    scale: float, causal: bool, softcap: float, padding: tuple[int, ...] | None,
) -> torch.Tensor:  # fmt: skip
    """Attention of rows of a batch. `padding` describes the mask, if it is not None."""

    def attended() -> torch.Tensor:
        out = query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[-1]))
        if is_tracing():
            _record(query, key, value, out, mask, sinks, scale, causal, softcap)
        elif out.numel():
            _attend(query, key, value, out, mask, sinks, scale, causal, softcap, padding or ())
        return out

    if is_tracing():
        return attended()
    if padding is not None:
        mask, causal = None, query.shape[2] > 1
    tensors = (query, key, value) if sinks is None else (query, key, value, sinks)
    asked = "transformers", scale, causal, softcap, padding, sinks is None, mask is None
    if mask is None or query.shape[2] > 1:
        return repeated(asked, tensors, attended, sources=() if mask is None else (mask,))  # type: ignore[no-any-return]
    tokens = _tokens_of(mask, _token_line(key.shape, key.stride())[0])
    if isinstance(tokens, Indices) or tokens.kv_lens is None or tokens.page_table is None:
        return attended()
    return repeated(asked, (*tensors, tokens.kv_lens, tokens.page_table), attended)  # type: ignore[no-any-return]


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor, mask: torch.Tensor | None,
    sinks: torch.Tensor | None, scale: float, causal: bool, softcap: float, padding: tuple[int, ...] = (),
) -> None:  # fmt: skip
    """Writes out [batch, q_length, num_heads, head_dim]. Keys are ragged: each row of the cache is a request, and so is
    what lies between two rows, with no queries. Under a mask that one query has for itself each token is a page, and
    the page table names the tokens that the query sees.

    padding: tokens ahead in each row that no query sees and whose own queries give zeros; (): none.
    """
    step, k_size, k_stride = _token_line(key.shape, key.stride())
    v_step, v_size, v_stride = _token_line(value.shape, value.stride())
    if not step == v_step > 0:
        _attend(query, key.contiguous(), value.contiguous(), out, mask, sinks, scale, causal, softcap, padding)
        return
    has_pages = mask is not None and query.shape[2] == 1
    options = _options(query, key, value, scale, causal and mask is None, softcap, page_size=int(has_pages))

    tokens = _tokens_of(mask, step) if mask is not None and has_pages else None

    def spec() -> AttentionSpec:
        if tokens is not None:
            return AttentionSpec(tokens, options)
        rows = _rows(padding or (0,) * query.shape[0], query.shape[2], key.shape[2], step)
        return AttentionSpec(rows, options, None if mask is None else mask.reshape(-1))

    if is_tracing() or isinstance(tokens, Lengths):  # the GPU plans in each call
        attention = new_plan(spec(), query.device)
    else:
        asked = "transformers", options, query.shape, key.shape, step, padding
        attention = plan_of(asked, () if mask is None else (mask,), query.device, spec)
    k, v = key.as_strided(k_size, k_stride), value.as_strided(v_size, v_stride)
    attention.run(
        query.squeeze(2) if query.shape[2] == 1 else query.transpose(1, 2).flatten(0, 1),
        (k.unsqueeze(1), v.unsqueeze(1)) if has_pages else (k, v), out.flatten(0, 1), options=RunOptions(sinks),
    )  # fmt: skip


def _tokens_of(mask: torch.Tensor, step: int) -> Indices | Lengths:
    """_seen_tokens() of a mask that one query has for itself, made once for all layers."""
    if is_tracing() or mask.is_inference():
        return _seen_tokens(mask[:, 0, 0], step)
    state = mask._version, step
    known, tokens = getattr(mask, _TOKENS, (None, None))
    if known != state or tokens is None:
        tokens = _seen_tokens(mask[:, 0, 0], step)
        vars(mask)[_TOKENS] = state, tokens
    return tokens


@lru_cache(maxsize=64)
def _token_line(
    shape: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[int, tuple[int, int, int], tuple[int, int, int]]:
    """Tokens from a row of a cache [rows, heads, tokens, dim] to the next, or 0 if they are no whole number; and the
    shape and strides of all tokens in one line [tokens, heads, dim], where those of neighbouring heads overlap.
    """
    (rows, num_heads, tokens, dim), (row, head, token, one) = shape, strides
    if rows == 1 or tokens == 1:
        token, step = (row if tokens == 1 else token), tokens
    else:
        step = row // token if token and row % token == 0 else 0
    return step, ((rows - 1) * step + tokens, num_heads, dim), (token, head, one)


def _options(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, causal: bool, softcap: float,
    page_size: int,
) -> PlanOptions:  # fmt: skip
    head_dim = query.shape[3]
    logits = logits_options(head_dim, scale, -1, softcap, "NONE")
    types = Types.of(query.dtype, key.dtype, None)
    return PlanOptions(*heads(query.shape[1], key.shape[1]), head_dim, value.shape[3], types, logits, causal, page_size)


def _rows(padding: tuple[int, ...], q_length: int, kv_length: int, step: int) -> Indices:
    """Requests of the rows of a cache, which begin `step` tokens after one another: keys behind the padding. What lies
    ahead of them is a request without queries; queries that are padding are one without keys.
    """
    qo_indptr, kv_indptr = [0], [0]

    def add(num_queries: int, kv_end: int) -> None:
        if num_queries or kv_end > kv_indptr[-1]:
            qo_indptr.append(qo_indptr[-1] + num_queries)
            kv_indptr.append(kv_end)

    for row, hidden in enumerate(padding):
        begin, hidden_queries = row * step, max(0, hidden - (kv_length - q_length))
        add(0, begin + hidden)
        add(hidden_queries, begin + hidden)
        add(q_length - hidden_queries, begin + kv_length)
    offsets = (torch.tensor(offsets, dtype=torch.int32, device="cpu") for offsets in (qo_indptr, kv_indptr))
    return Indices(len(qo_indptr) - 1, next(offsets), 0, next(offsets), None, None, 1)


def _seen_tokens(seen: torch.Tensor, step: int) -> Indices | Lengths:
    """A page table of the keys that single queries see, from bool [batch, kv_length], without a synchronisation."""
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
