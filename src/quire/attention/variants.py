"""Ready-made custom variants, written as a user would write them; and the slopes of ALiBi.

get_alibi_slopes() gives the slopes of ALiBi (Press et al., 2022, https://arxiv.org/abs/2108.12409).

The position of a query is q_idx + kv_len - qo_len, so that a token gets the same result in a prompt, a chunk or a
decode step. Pass a variant as `variant=` to a call or wrapper. Its tensors and numbers are keywords: those that a
mask reads of plan(), those that only a score reads of run().

>>> from quire import variants
>>> q, k, v = torch.randn(3, 8, 64), torch.randn(10, 2, 64), torch.randn(10, 2, 64)
>>> quire.single_prefill_with_kv_cache(q, k, v, variant=variants.soft_cap, cap=30.0).shape
torch.Size([3, 8, 64])
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from quire.engine.checks import check_positive, check_same_device, check_tensor
from quire.engine.operands import SinkText, variant_of
from quire.engine.run import Result, RunOptions
from quire.engine.wrapper import ForwardWrapper
from quire.errors import UnsupportedError, ValidationError
from quire.kernels.expressions import exp, log, maximum, minimum, tanh, to_float, to_int, where
from quire.kernels.expressions.variant import Variant

if TYPE_CHECKING:
    import torch

__all__ = [
    "alibi", "causal_with_ranges", "dilated_window", "document_mask", "get_alibi_slopes", "kerple", "noise",
    "prefix_lm", "relative_bias", "sigmoid", "sigmoid_output", "sink_score", "soft_cap", "strided_window", "t5_bias",
    "temperature", "tree_mask",
]  # fmt: skip


def _distance(q_idx: Any, kv_idx: Any, qo_len: Any, kv_len: Any) -> Any:
    """The position of the key minus that of the query; negative for past keys."""
    return kv_idx - (q_idx + kv_len - qo_len)


# --- scores ----------------------------------------------------------------------------------------------------------


def _soft_cap(score: Any, cap: Any) -> Any:
    return cap * tanh(score / cap)


#: cap * tanh(score / cap), as in Gemma 2. cap: a number.
soft_cap = Variant(_soft_cap, scalars={"cap": "float32"})


def _alibi(score: Any, q_idx: Any, kv_idx: Any, head: Any, qo_len: Any, kv_len: Any, slopes: Any) -> Any:
    return score + slopes[head] * _distance(q_idx, kv_idx, qo_len, kv_len)


#: A slope of the head times the distance (Press et al., 2022). slopes: float32 [num_qo_heads].
alibi = Variant(_alibi, tensors={"slopes": "float32"})


def _t5_bias(score: Any, q_idx: Any, kv_idx: Any, head: Any, qo_len: Any, kv_len: Any, bias: Any, largest: Any) -> Any:
    past = maximum(-_distance(q_idx, kv_idx, qo_len, kv_len), 0)
    exact = bias.shape[0] // 2
    ratio = log(to_float(maximum(past, 1)) / to_float(exact)) / log(to_float(largest) / to_float(exact))
    far = exact + to_int(ratio * to_float(bias.shape[0] - exact))
    return score + bias[where(past < exact, past, minimum(far, bias.shape[0] - 1)), head]


#: The causal relative bias of T5 (Raffel et al., 2020): half of the buckets for the nearest distances, the others for
#: logarithms of them up to `largest`. bias: float32 [num_buckets, num_qo_heads]; largest: an integer, 128 in T5.
t5_bias = Variant(_t5_bias, tensors={"bias": "float32"}, scalars={"largest": "int32"})


def _relative_bias(score: Any, q_idx: Any, kv_idx: Any, head: Any, qo_len: Any, kv_len: Any, bias: Any) -> Any:
    return score + bias[head, _distance(q_idx, kv_idx, qo_len, kv_len) + bias.shape[1] // 2]


#: A bias for each head and distance. bias: float32 [num_qo_heads, 2 n - 1], distance 0 in the middle; distances beyond
#: n - 1 have the bias of n - 1.
relative_bias = Variant(_relative_bias, tensors={"bias": "float32"})


def _kerple(score: Any, q_idx: Any, kv_idx: Any, head: Any, qo_len: Any, kv_len: Any, r: Any) -> Any:
    far = to_float(abs(_distance(q_idx, kv_idx, qo_len, kv_len)))
    return score - r[0, head] * log(1.0 + r[1, head] * far)


#: A bias that falls with the logarithm of the distance (KERPLE, Chi et al., 2022): -r1 log(1 + r2 |distance|), for
#: lengths beyond those of training. r: float32 [2, num_qo_heads], r1 and r2 of each head, both positive.
kerple = Variant(_kerple, tensors={"r": "float32"})


def _temperature(score: Any, q_idx: Any, qo_len: Any, kv_len: Any, scale: Any) -> Any:
    return score * scale[q_idx + kv_len - qo_len]


#: A factor for each position of a query, as in Llama 4. scale: float32 [most tokens of a request].
temperature = Variant(_temperature, tensors={"scale": "float32"})


def _noise(
    score: Any, q_idx: Any, kv_idx: Any, head: Any, request: Any, qo_len: Any, kv_len: Any, seed: Any, amplitude: Any
) -> Any:
    bits = ((request * 8191 + head) * 131071 + q_idx + kv_len - qo_len) * 524287 + kv_idx + seed * 1000003
    for shift, factor in ((16, 0x45D9F3B), (15, 0x2C1B3C6D)):  # a hash of 32 bits
        bits = (bits ^ (bits >> shift)) * factor
    return score + amplitude * (to_float((bits ^ (bits >> 16)) & 0xFFFFFF) * 2.0**-23 - 1.0)


#: Noise between -amplitude and amplitude, the same for the same seed and place. seed: an integer; amplitude: a number.
noise = Variant(_noise, scalars={"seed": "int32", "amplitude": "float32"})


def _sink_score(score: Any, kv_idx: Any, head: Any, num_sinks: Any, bonus: Any) -> Any:
    return where(kv_idx < num_sinks, score + bonus[head], score)


#: The first `num_sinks` keys of a request draw attention: a bonus of the head. num_sinks: an integer; bonus: float32
#: [num_qo_heads]. Sinks without keys are the argument `sinks` of run().
sink_score = Variant(_sink_score, tensors={"bonus": "float32"}, scalars={"num_sinks": "int32"})


def _sigmoid(score: Any, bias: Any) -> Any:
    shifted = score + bias
    return minimum(shifted, 0.0) - log(1.0 + exp(-maximum(shifted, -shifted)))


#: The logarithm of sigmoid(score + bias), for attention without softmax: run(return_lse=True), and sigmoid_output() of
#: what it returns. bias: a number, -log(kv_len) in Ramapuram et al., 2024.
sigmoid = Variant(_sigmoid, scalars={"bias": "float32"})


def sigmoid_output(o: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """The sum of sigmoid(score + bias) * v: multiplies o by the sum of the weights, 2 ** lse, which softmax divided by.

    o [nnz_qo, num_qo_heads, head_dim_vo] and lse [nnz_qo, num_qo_heads]: the results of a run() with `sigmoid`.
    """
    return (o.float() * lse.exp2()[..., None]).to(o.dtype)


# --- masks -----------------------------------------------------------------------------------------------------------


def _document_mask(q_idx: Any, kv_idx: Any, request: Any, qo_len: Any, kv_len: Any, documents: Any) -> Any:
    return documents[request, q_idx + kv_len - qo_len] == documents[request, kv_idx]


#: Tokens of one document do not see those of another. documents: int32 [batch_size, most tokens of a request], the
#: document of each token.
document_mask = Variant(mask=_document_mask, tensors={"documents": "int32"})


def _prefix_lm(q_idx: Any, kv_idx: Any, request: Any, qo_len: Any, kv_len: Any, prefix: Any) -> Any:
    return (kv_idx < prefix[request]) | (_distance(q_idx, kv_idx, qo_len, kv_len) <= 0)


#: All see the prefix of their request, and causally the rest. prefix: int32 [batch_size], its tokens.
prefix_lm = Variant(mask=_prefix_lm, tensors={"prefix": "int32"})


def _causal_with_ranges(
    q_idx: Any, kv_idx: Any, request: Any, qo_len: Any, kv_len: Any, ranges: Any, first_row: Any, causal_window: Any,
    range_window: Any,
) -> Any:  # fmt: skip
    past, row = -_distance(q_idx, kv_idx, qo_len, kv_len), first_row[request] + q_idx
    is_causal = (past >= 0) & ((causal_window < 0) | (past <= causal_window))
    is_in_range = (kv_idx >= ranges[row, 0]) & (kv_idx <= ranges[row, 1])
    return is_causal | (is_in_range & ((range_window <= 0) | (past < range_window)))


#: Causal, and each query also sees a range of keys in both directions, as the tokens of an image do: from ranges[row,
#: 0] to ranges[row, 1], both included; (-1, -1) for none. ranges: int32 [nnz_qo, 2], in keys of the query's request;
#: first_row: int32 [batch_size], qo_indptr without its last entry. causal_window: as window_left, of the causal part,
#: -1 for none. range_window: how many keys of the past remain of a range, the query's own included; 0: all.
causal_with_ranges = Variant(
    mask=_causal_with_ranges, tensors={"ranges": "int32", "first_row": "int32"},
    scalars={"causal_window": "int32", "range_window": "int32"},
)  # fmt: skip


def _dilated_window(q_idx: Any, kv_idx: Any, qo_len: Any, kv_len: Any, width: Any, step: Any) -> Any:
    past = -_distance(q_idx, kv_idx, qo_len, kv_len)
    return (past >= 0) & (past < width * step) & (past % step == 0)


#: Of the past, `width` keys, each `step` further than the one before (Beltagy et al., 2020).
dilated_window = Variant(mask=_dilated_window, scalars={"width": "int32", "step": "int32"})


def _strided_window(q_idx: Any, kv_idx: Any, qo_len: Any, kv_len: Any, width: Any, stride: Any) -> Any:
    past = -_distance(q_idx, kv_idx, qo_len, kv_len)
    return (past >= 0) & ((past < width) | ((kv_idx + 1) % stride == 0))


#: The `width` nearest keys of the past, and each `stride`-th of all (Child et al., 2019).
strided_window = Variant(mask=_strided_window, scalars={"width": "int32", "stride": "int32"})


def _tree_mask(q_idx: Any, kv_idx: Any, request: Any, qo_len: Any, kv_len: Any, ancestors: Any) -> Any:
    number = kv_idx - (kv_len - qo_len)
    return (number < 0) | (((ancestors[request, q_idx] >> number) & 1) != 0)


#: Up to 32 tokens of a tree that is guessed, behind all tokens that are known (Miao et al., 2023). ancestors: int32
#: [batch_size, qo_len], bit j set where a token comes after token j of the tree, itself included.
tree_mask = Variant(mask=_tree_mask, tensors={"ancestors": "int32"})


_MOST_HEADS = 1 << 16  #: their slopes are computed one by one in Python, in float64


def get_alibi_slopes(n_heads: int, device: torch.device | str | None = None) -> torch.Tensor:
    """The slope of each of n_heads query heads: those that kernels compute under pos_encoding_mode="ALIBI".

    The slopes of n heads, n a power of two, are 2^(-8 (head + 1) / n). The heads from the largest such n on take every
    other slope of 2 n heads. A custom variant with other slopes reads a tensor of the same shape: quire.variants.alibi.

    device: where the tensor is made; None: torch's default device. Returns float32 [n_heads]. Raises ValidationError
    if n_heads is not an integer from 1 to 65536.

    >>> quire.get_alibi_slopes(3)
    tensor([0.0625, 0.0039, 0.2500])
    """
    heads = check_positive(n_heads, "n_heads")
    if heads > _MOST_HEADS:
        raise ValidationError(f"n_heads: expected at most {_MOST_HEADS} heads, got {heads}.")
    n = 2 ** math.floor(math.log2(heads))
    powers = [8 / n * (i + 1) for i in range(n)] + [4 / n * (2 * i + 1) for i in range(heads - n)]
    return torch.tensor([2.0**-power for power in powers], dtype=torch.float32, device=device)


# --- FlashInfer's C++ texts ------------------------------------------------------------------------------------------


class Text(NamedTuple):
    """What a wrapper does whose jit_args have a C++ text of FlashInfer's documentation and tests."""

    takes: tuple[str, ...]  #: what run() takes by position: "sinks", "sm_scale" or an operand of the variant
    variant: Variant | None = None  #: in the place of the text; None: what kernels have built in
    scale: float | None = None  #: of logits, where run() does not take it; None: plan()'s
    is_sum: bool = False  #: weights are not divided by their sum
    has_slopes: bool = False  #: those of ALiBi are added before the scale

    def run(
        self, wrapper: ForwardWrapper, q: torch.Tensor, kv: Any, values: tuple[Any, ...], out: torch.Tensor | None,
        lse: torch.Tensor | None, return_lse: bool, options: RunOptions,
    ) -> Result:  # fmt: skip
        """run() of a wrapper, with `values` by position."""
        if len(values) > len(self.takes):
            raise ValidationError(f"args: expected {', '.join(self.takes) or 'none'}, got {len(values)} values.")
        given = dict(zip(self.takes, values, strict=False))
        sinks, scale = given.pop("sinks", options.sinks), given.pop("sm_scale", self.scale)
        if scale is not None:
            wrapper._rescale(scale)
        if sinks is not None:
            check_same_device(check_tensor(sinks, "sink"), "sink", wrapper.device)
        if self.has_slopes:
            given["slopes"] = get_alibi_slopes(q.shape[1], q.device) * (wrapper._sm_scale or 1.0)
        options = options._replace(sinks=sinks, operands={**options.operands, **given})
        runner = wrapper._runner()
        if not self.is_sum:
            return runner.run(q, kv, out, lse, return_lse, options)
        if return_lse or lse is not None:
            raise UnsupportedError("return_lse: expected False, as attention without softmax has no log-sum-exp.")
        result = sigmoid_output(*runner.run(q, kv, None, None, True, options))
        return result if out is None else out.copy_(result)


#: By the digest of a text without white space: FlashSigmoid for sm_80 and for sm_90, FlashCustomMask, FlashAlibiDecode.
_TEXTS: Mapping[str, Text] = {
    "814392dab56111546430405bc82ee42b70f24ae82b88a7246ff7230d05aadc51": Text(("sm_scale", "bias"), sigmoid, None, True),
    "1284293e950913632bc77cddb20530bb642826b6085ba7038025981dfd1169ae": Text(("sm_scale", "bias"), sigmoid, None, True),
    "35d44b952b20d7f92200a0506b517d6db912e0f5048d63fc474415c5cff38ab8": Text((), None, 1.0),
    "a59b186f457e4dbaf23f2124bbb4c1b25c3863870c2a094adaa5fc64d110ffaf": Text(("sm_scale",), alibi, None, False, True),
}
_SINKS = Text(("sinks", "sm_scale"))


def text_of(jit_args: Any) -> Text | None:
    """What jit_args mean if they have a text that is known."""
    if not isinstance(jit_args, (list, tuple)):
        return None
    for value in jit_args:
        if isinstance(value, SinkText):
            return _SINKS
        found = _TEXTS.get(
            hashlib.sha256("".join(value.split()).encode()).hexdigest() if isinstance(value, str) else ""
        )
        if found is not None:
            return found
    return None


def variant_in(variant: Any, jit_args: Any, jit_kwargs: Any = None) -> Variant | None:
    """The variant of a wrapper, from any of the arguments that can give it."""
    text = text_of(jit_args)
    if text is None:
        return variant_of(variant, jit_args, jit_kwargs)
    return variant_of(variant, [] if text.variant is None else [text.variant])
