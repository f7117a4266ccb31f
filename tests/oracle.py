"""The specification of every operator, in float64 and without a thought for speed. Imports nothing of Quire.

Shapes are NHD unless said otherwise: q [nnz_qo, num_qo_heads, head_dim_qk], k [nnz_kv, num_kv_heads, head_dim_qk],
v [nnz_kv, num_kv_heads, head_dim_vo]; *_indptr are lists or tensors of batch_size + 1 offsets. All work is done on the
CPU: results are compared there, whatever device the kernel ran on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

Indptr = Sequence[int] | Tensor

#: What the output may differ by beyond twice torch's own error, in units of the dtype's eps times the largest value of
#: the reference: one rounding of the result, and in float32 also another order of summation.
FLOOR_ULPS = {torch.float32: 16.0, torch.float16: 1.0, torch.bfloat16: 1.0}

#: Units of float32's eps that a log-sum-exp may be off by, relative to the largest |lse| or logit.
LSE_ULPS = 32.0

#: Absolute error of a soft cap's tanh on a GPU.
TANH_ERROR = 2e-6


class State(NamedTuple):
    """An attention state: o [nnz_qo, num_qo_heads, head_dim_vo] and its base-2 lse [nnz_qo, num_qo_heads]."""

    o: Tensor
    lse: Tensor


class At(NamedTuple):
    """The places of the logits of one request, [num_qo_heads, qo_len, kv_len] once they are broadcast."""

    request: int
    head: Tensor
    q_idx: Tensor
    kv_idx: Tensor
    qo_len: int
    kv_len: int

    @classmethod
    def of(cls, request: int, heads: int, qo_len: int, kv_len: int) -> At:
        """All places of a request."""
        head, q_idx, kv_idx = torch.arange(heads), torch.arange(qo_len), torch.arange(kv_len)
        return cls(request, head[:, None, None], q_idx[None, :, None], kv_idx[None, None, :], qo_len, kv_len)

    @property
    def distance(self) -> Tensor:
        """How far right of the query's place the key is."""
        return self.kv_idx - (self.q_idx + self.kv_len - self.qo_len)


def _scored(score: Callable[[Tensor, At], Tensor], at: At, logits: Tensor) -> Tensor:
    return score(logits, at)


def lengths(indptr: Indptr) -> list[int]:
    """The lengths between the offsets."""
    ends = [int(i) for i in indptr]
    return [b - a for a, b in itertools.pairwise(ends)]


def indptr_of(lens: Sequence[int]) -> list[int]:
    """Offsets [n + 1] from lengths [n]."""
    out = [0]
    for n in lens:
        out.append(out[-1] + n)
    return out


def visible(
    qo_len: int, kv_len: int, *, causal: bool = False, window_left: int = -1, mask: Tensor | None = None,
    chunk_size: int | None = None,
) -> Tensor:  # fmt: skip
    """Which key each query of one request sees: bool [qo_len, kv_len].

    Query i stands at key i + kv_len - qo_len. Causal hides the keys to its right; a window hides those further left
    than `window_left`; a custom mask takes causal's place and leaves the window. With chunks a query sees the keys of
    its own chunk, from the multiple of chunk_size at or before it up to itself.
    """
    at = torch.arange(qo_len)[:, None] + kv_len - qo_len
    key = torch.arange(kv_len)[None, :]
    seen = torch.ones(qo_len, kv_len, dtype=torch.bool)
    if mask is not None:
        seen = seen & mask.cpu().bool().reshape(qo_len, kv_len)
    elif causal or chunk_size:
        seen = seen & (key <= at)
    if chunk_size:
        seen = seen & (key >= at.clamp(min=0) // chunk_size * chunk_size)
    if window_left >= 0:
        seen = seen & (key >= at - window_left)
    return seen


def item_positions(item_lens: Sequence[int]) -> list[int]:
    """The number of each token in its item, from 1 on, and 0 for the delimiters before, between and behind items."""
    numbers = [0]
    for n in item_lens:
        numbers += [*range(1, n + 1), 0]
    return numbers


def visible_items(qo_len: int, prefix_len: int, item_lens: Sequence[int] | None) -> Tensor:
    """Which key each of the last qo_len queries sees in a request of a prefix and items (None: of the prefix alone).

    The prefix is causal. A token of an item sees the prefix and its item up to itself; a delimiter only the prefix.
    """
    owners = ["prefix"] * prefix_len
    if item_lens is not None:
        owners += ["delimiter"]
        for number, n in enumerate(item_lens):
            owners += [f"item {number}"] * n + ["delimiter"]
    seen = torch.zeros(len(owners), len(owners), dtype=torch.bool)
    for query, owner in enumerate(owners):
        for key in range(query + 1):
            same = owner == owners[key] and owner != "delimiter"
            seen[query, key] = owner == "prefix" or owners[key] == "prefix" or same
    return seen[len(owners) - qo_len :]


def split_mask(mask: Tensor | None, qo_indptr: Indptr, kv_indptr: Indptr) -> list[Tensor | None]:
    """A flat bool mask, cut into one [qo_len, kv_len] matrix per request."""
    shapes = list(zip(lengths(qo_indptr), lengths(kv_indptr), strict=True))
    if mask is None:
        return [None] * len(shapes)
    cuts = indptr_of([a * b for a, b in shapes])
    assert cuts[-1] == mask.numel()
    return [mask.flatten()[cuts[i] : cuts[i + 1]].reshape(shape) for i, shape in enumerate(shapes)]


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    scale: float,
    soft_cap: float,
    sinks: Tensor | None,
    slopes: Tensor | None,
    dtype: torch.dtype,
    score: Callable[[Tensor], Tensor] | None = None,
    in_turn: bool = False,
) -> State:
    """One request, every operation rounded to `dtype` (lse in at least float32)."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (t.cpu().to(dtype) for t in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    logits = (_summed_in_turn(q, k) if in_turn else torch.einsum("qhd,khd->hqk", q, k)) * scale
    if slopes is not None:
        logits = logits + (slopes[:, None, None] * distances(q.shape[0], k.shape[0])).to(dtype)
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    if score is not None:
        logits = score(logits).to(logits.dtype)
    logits = logits.masked_fill(~seen, -math.inf)
    if sinks is not None:  # one more column, which has no value
        column = sinks.cpu().to(logits.dtype)[:, None, None].expand(-1, logits.shape[1], 1)
        logits = torch.cat([logits, column], dim=2)
        v = torch.cat([v, v.new_zeros(1, *v.shape[1:])])
    if logits.shape[2] == 0:
        return State(q.new_zeros(*q.shape[:2], v.shape[2]), torch.full(q.shape[:2], -math.inf, dtype=torch.float64))
    p = torch.softmax(logits, dim=2)
    p = p.masked_fill((logits == -math.inf).all(dim=2, keepdim=True), 0.0)
    o = torch.einsum("hqk,khd->qhd", p, v)
    lse = torch.logsumexp(logits.double(), dim=2).t() / math.log(2.0)
    if slopes is not None and not soft_cap:  # FlashInfer's: of slope * (j - i), i the query's number in its request
        lse = lse + slopes * (k.shape[0] - q.shape[0]) / math.log(2.0)
    return State(o, lse)


def _summed_in_turn(q: Tensor, k: Tensor) -> Tensor:
    """einsum("qhd,khd->hqk"), in at least float32 one dim after the other, as a kernel sums with one accumulator."""
    dtype = q.dtype
    q, k = (t.to(torch.promote_types(dtype, torch.float32)).transpose(0, 1) for t in (q, k))
    total = q.new_zeros(q.shape[0], q.shape[1], k.shape[1])
    for d in range(q.shape[2]):
        total += q[:, :, None, d] * k[:, None, :, d]
    return total.to(dtype)


def distances(qo_len: int, kv_len: int) -> Tensor:
    """How far right of the place of each query each key is: float64 [qo_len, kv_len]."""
    return (torch.arange(kv_len)[None, :] - (torch.arange(qo_len)[:, None] + kv_len - qo_len)).double()


def rotated(x: Tensor, position: int, rope_scale: float, rope_theta: float, dtype: torch.dtype) -> Tensor:
    """Rotary embedding (Su et al., 2021) of x [tokens, heads, dim], whose first token stands at `position`; rounded to
    `dtype` once. Dims d and d + dim / 2 are a pair, which turns by position / scale * theta^(-2 d / dim).
    """
    half = x.shape[2] // 2
    frequencies = rope_theta ** (-torch.arange(half, dtype=torch.float64) / half) / rope_scale
    angles = ((torch.arange(x.shape[0]) + position).double()[:, None] * frequencies)[:, None, :]
    first, second = x.cpu().double().split(half, dim=2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=2).to(dtype)


def alibi_slopes(num_heads: int) -> Tensor:
    """Slopes of ALiBi (Press et al., 2022): float64 [num_heads].

    2^(-8 / n), its square, its cube, ... for a power of two n; otherwise those of the power of two n below, and then
    every other slope of 2 n heads.
    """
    n = 2 ** math.floor(math.log2(num_heads))
    powers = [8 / n * (i + 1) for i in range(n)] + [4 / n * (2 * i + 1) for i in range(num_heads - n)]
    return torch.tensor([2.0**-power for power in powers], dtype=torch.float64)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qo_indptr: Indptr,
    kv_indptr: Indptr,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    window_left: int = -1,
    soft_cap: float | None = None,
    sm_scale: float | None = None,
    sinks: Tensor | None = None,
    v_scale: float = 1.0,
    pos_encoding_mode: str = "NONE",
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    attention_chunk_size: int | None = None,
    dtype: torch.dtype = torch.float64,
    rotated_dtype: torch.dtype | None = None,
    score: Callable[[Tensor, At], Tensor] | None = None,
    sees: Callable[[At], Tensor] | None = None,
    in_turn: bool = False,
) -> State:
    """Attention of each request's queries to its own keys.

    Args:
        mask: flat bool, the concatenation over requests of row-major [qo_len, kv_len].
        window_left: keys further left than this many from the diagonal are hidden; -1: none.
        soft_cap: c > 0 makes each scaled logit x into c * tanh(x / c).
        sinks: [num_qo_heads] natural-log logits that join each denominator and bring no value. They count in the lse.
        pos_encoding_mode: "ALIBI" adds the head's slope times the distance from where the query stands to the key to
            each scaled logit, before the soft cap. "ROPE_LLAMA" rotates q and k by where they stand, see rotated().
        attention_chunk_size: causal, and keys before the query's own chunk of so many are hidden; None: no chunks.
        dtype: what every operation is rounded to; float64 is the truth, the inputs' own dtype is torch's error.
        rotated_dtype: what rotated q and k alone are rounded to, as tensor cores take them; as `dtype` if not said.
        score: what becomes of scaled logits [num_qo_heads, qo_len, kv_len] of one request.
        sees: which keys queries see besides, bool of the same shape.
        in_turn: sum the products of queries and keys over one dim after the other.

    A row that sees nothing is 0 with lse -inf (with a sink: 0 and the sink).
    """
    scale = 1.0 / math.sqrt(q.shape[2]) if sm_scale is None else sm_scale
    slopes = alibi_slopes(q.shape[1]) if pos_encoding_mode == "ALIBI" else None
    qo, kv = [int(i) for i in qo_indptr], [int(i) for i in kv_indptr]
    o = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=dtype)
    lse = torch.full((q.shape[0], q.shape[1]), -math.inf, dtype=torch.float64)
    for b, m in enumerate(split_mask(mask, qo, kv)):
        rows, keys = slice(qo[b], qo[b + 1]), slice(kv[b], kv[b + 1])
        q_b, k_b = q[rows], k[keys]
        if pos_encoding_mode == "ROPE_LLAMA":
            scaling = rope_scale or 1.0, rope_theta or 1e4
            q_b = rotated(q_b, k_b.shape[0] - q_b.shape[0], *scaling, rotated_dtype or dtype)
            k_b = rotated(k_b, 0, *scaling, rotated_dtype or dtype)
        seen = visible(
            qo[b + 1] - qo[b], kv[b + 1] - kv[b],
            causal=causal, window_left=window_left, mask=m, chunk_size=attention_chunk_size,
        )  # fmt: skip
        at = At.of(b, q.shape[1], qo[b + 1] - qo[b], kv[b + 1] - kv[b])
        if sees is not None:
            seen = seen & sees(at)
        own = None if score is None else partial(_scored, score, at)
        one = _attend(q_b, k_b, v[keys], seen, scale, soft_cap or 0.0, sinks, slopes, dtype, own, in_turn)
        o[rows], lse[rows] = one.o * v_scale, one.lse
    return State(o, lse)


def latent_attention(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv: Tensor,
    kpe: Tensor,
    qo_indptr: Indptr,
    kv_indptr: Indptr,
    *,
    causal: bool = False,
    sm_scale: float,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> State:
    """Multi-head latent attention: q_nope [nnz_qo, num_heads, 512], q_pe [nnz_qo, num_heads, 64], ckv [nnz_kv, 512] and
    kpe [nnz_kv, 64]. All heads attend to the keys [ckv, kpe], of which ckv is the value.

    The heads are rows here, so that the keys are there once.
    """
    num_heads, keys = q_nope.shape[1], torch.cat([ckv, kpe], -1)[:, None]
    masks = [
        visible(qo_len, kv_len, causal=causal).repeat_interleave(num_heads, 0).flatten()
        for qo_len, kv_len in zip(lengths(qo_indptr), lengths(kv_indptr), strict=True)
    ]
    rows = torch.cat([q_nope, q_pe], -1).reshape(-1, 1, keys.shape[-1])
    row_indptr = [int(i) * num_heads for i in qo_indptr]
    mask = torch.cat([*masks, torch.zeros(0, dtype=torch.bool)])
    o, lse = attention(
        rows, keys, ckv[:, None], row_indptr, kv_indptr, mask=mask, sm_scale=sm_scale, dtype=dtype
    )  # fmt: skip
    o, lse = o.view(*q_nope.shape[:2], ckv.shape[1]), lse.view(q_nope.shape[:2])
    if sinks is not None:
        total = torch.logaddexp2(lse, sinks.cpu().double() / math.log(2.0))
        o, lse = (o * torch.exp2(lse - total)[..., None]).to(dtype), total
    return State(o, lse)


# Comparing


def latent_rows(rows: Tensor, name: str, *, exact: bool = False) -> Tensor:
    """What FlashMLA's rows uint8 [tokens, bytes] say, float64 [tokens, dims]; products are rounded once, to bfloat16.
    exact: they are not.

    V32: 512 e4m3, 4 float32 scales of 128 dims each, and 64 or no bfloat16. V4: 448 e4m3, 64 bfloat16, and 8 bytes that
    a page has behind its rows: the exponents of the scales of 64 dims each, plus 127, and one of no use.
    """
    if name == "V32":
        numbers, scales, rest = rows[:, :512], rows[:, 512:528].contiguous().view(torch.float32), rows[:, 528:]
    else:
        numbers, rest = rows[:, :448], rows[:, 448:576]
        scales = torch.exp2(rows[:, 576:583].double() - 127)
    tiles = numbers.contiguous().view(torch.float8_e4m3fn).double().unflatten(1, (scales.shape[1], -1))
    latent = (tiles * scales.double()[..., None]).flatten(1)
    latent = latent if exact else latent.float().bfloat16().double()
    return torch.cat((latent, rest.contiguous().view(torch.bfloat16).double()), dim=1)


def indexer_scores(
    q: Tensor, keys: Tensor, scales: Tensor, weights: Tensor, begins: Sequence[int], ends: Sequence[int]
) -> Tensor:
    """The sum over heads of relu(q . k) * weight, times the key's scale, float64 [rows, keys]; -inf where row i does
    not see a key: outside of begins[i] .. ends[i] - 1.
    """
    products = torch.einsum("rhd,kd->rhk", q.double(), keys.double()).relu()
    scores = (products * weights.double()[..., None]).sum(1) * scales.double()
    place = torch.arange(keys.shape[0])
    seen = (place >= torch.tensor(begins)[:, None]) & (place < torch.tensor(ends)[:, None])
    return scores.masked_fill(~seen, -math.inf)


def torch_error(q: Tensor, k: Tensor, v: Tensor, qo_indptr: Indptr, kv_indptr: Indptr, **kwargs: object) -> Tensor:
    """Torch's own answer in q's dtype, each operation rounded to it: its distance from the truth is the yardstick."""
    return attention(q, k, v, qo_indptr, kv_indptr, dtype=q.dtype, **kwargs).o.double()  # type: ignore[arg-type]


def _same_specials(got: Tensor, want: Tensor, what: str) -> None:
    for name, test in (("nan", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = test(got) != test(want)
        where = wrong.nonzero()[:4].tolist()
        assert not wrong.any(), (
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements differ in being {name}, at {where}"
        )


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


def _peak(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def assert_close(out: Tensor, ref: Tensor, own: Tensor, indptr: Indptr | None = None, what: str = "o") -> None:
    """`out` is at most twice as far from `ref` as torch's `own` answer in the same dtype is, plus one rounding.

    Largest and root-mean-square error are both held to the rule, for the rows of each request apart (`indptr`): a
    request with few keys has large values, behind which the errors of one with many keys would hide. Numbers beyond
    the range of the dtype are infinite in it, and those that are beyond it by less than the bound may be.
    """
    assert out.shape == ref.shape, f"{what}: shape {tuple(out.shape)}, expected {tuple(ref.shape)}"
    limit = torch.finfo(out.dtype).max
    unlimited = out.detach().cpu().double()
    got, exact, torchs = (x.clamp(-limit, limit) for x in (unlimited, ref.double(), own.double()))
    _same_specials(got, exact, what)
    ulp = FLOOR_ULPS[out.dtype] * torch.finfo(out.dtype).eps
    cuts = [0, out.shape[0]] if indptr is None else [int(i) for i in indptr]
    for b, (begin, end) in enumerate(itertools.pairwise(cuts)):
        truth = exact[begin:end]
        error, theirs = got[begin:end] - truth, torchs[begin:end] - truth
        for name, norm in (("largest", _peak), ("rms", _rms)):
            bound = 2.0 * norm(theirs) + ulp * norm(truth)
            assert norm(error) <= bound, (
                f"{what}, request {b}: {name} error {norm(error):.3g} > {bound:.3g} "
                f"(torch's own {norm(theirs):.3g}, reference {norm(truth):.3g}), "
                f"worst at row {begin + int(error.abs().flatten(1).amax(1).argmax())}"
            )
        margin = limit + 2.0 * _peak(theirs) + ulp * _peak(truth)
        finite = (ref[begin:end].abs() > margin) & unlimited[begin:end].isfinite()
        assert not finite.any(), (
            f"{what}, request {b}: {int(finite.sum())} numbers are finite that are beyond {limit:.4g}"
        )


def assert_lse_close(
    lse: Tensor, ref: Tensor, *, magnitude: float = 1.0, soft_cap: float | None = None, rounded: Tensor | None = None
) -> None:
    """`lse` is float32 and equals `ref` to float32 rounding of the largest logit; -inf in the same places.

    Args:
        magnitude: the largest |logit * log2(e)| there may be; cancellation is relative to it.
        rounded: the lse of rotated queries and keys that are rounded to 16 bits, from whose distance `lse` may be
            twice as far away.
    """
    assert lse.dtype == torch.float32, f"lse: dtype {lse.dtype}, expected float32"
    assert lse.shape == ref.shape, f"lse: shape {tuple(lse.shape)}, expected {tuple(ref.shape)}"
    got = lse.detach().cpu().double()
    _same_specials(got, ref, "lse")
    finite = torch.isfinite(ref)
    peak = max(magnitude, _peak(ref[finite]))
    tanh_error = soft_cap * math.log2(math.e) * TANH_ERROR if soft_cap and lse.is_cuda else 0.0
    rotation_error = 0.0 if rounded is None else 2.0 * _peak((rounded - ref)[finite])
    bound = peak * LSE_ULPS * torch.finfo(torch.float32).eps + tanh_error + rotation_error
    error = _peak((got - ref)[finite])
    assert error <= bound, f"lse: largest error {error:.3g} > {bound:.3g}"


# Merging


def merge_states(v: Tensor, s: Tensor) -> State:
    """Merges v [n, num_states, heads, head_dim] with base-2 s [n, num_states, heads] over dimension 1."""
    v, s = v.cpu().double(), s.cpu().double()
    if v.shape[1] == 0:
        return State(v.new_zeros(v.shape[0], *v.shape[2:]), s.new_full((s.shape[0], s.shape[2]), -math.inf))
    top = s.amax(dim=1, keepdim=True)
    w = torch.where(s == -math.inf, 0.0, torch.exp2(s - top))
    total = w.sum(dim=1)
    used = torch.where(w[..., None] == 0.0, 0.0, v * w[..., None])  # a state of weight 0 may hold anything
    o = used.sum(dim=1) / torch.where(total == 0.0, 1.0, total)[..., None]
    lse = torch.where(total == 0.0, -math.inf, torch.log2(total) + top[:, 0])
    return State(o, lse)


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> State:
    """Merges two states: v [n, heads, head_dim], s [n, heads]."""
    return merge_states(torch.stack([v_a, v_b], 1), torch.stack([s_a, s_b], 1))


# Pages


def get_seq_lens(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int) -> Tensor:
    """Tokens of each request; a request without pages has none, whatever its last_page_len says."""
    pages = lengths(kv_indptr)
    last = kv_last_page_len.tolist()
    return torch.tensor(
        [(n - 1) * page_size + e if n else 0 for n, e in zip(pages, last, strict=True)], dtype=torch.int32
    )


def gather_pages(pages: Tensor, indices: Tensor, indptr: Indptr, lens: Sequence[int], kv_layout: str) -> Tensor:
    """Pages [num_pages, page_size, heads, head_dim] (HND: heads first) as ragged tokens [nnz, heads, head_dim]."""
    if kv_layout == "HND":
        pages = pages.transpose(1, 2)
    chosen, ends, parts = indices.tolist(), [int(i) for i in indptr], []
    for b, n in enumerate(lens):
        own = [pages[i] for i in chosen[ends[b] : ends[b + 1]]]
        parts.append(torch.cat(own)[:n] if own else pages.new_zeros(0, *pages.shape[2:]))
    return torch.cat(parts) if parts else pages.new_zeros(0, *pages.shape[2:])


def append_paged_kv_cache(
    key: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    pages: Tensor,
    indices: Tensor,
    indptr: Indptr,
    kv_layout: str,
) -> Tensor:
    """A copy of `pages` with key[i] at positions[i] of request batch_indices[i]; skipped where that is < 0."""
    out = pages.clone()
    by_token = out.transpose(1, 2) if kv_layout == "HND" else out
    page_size = by_token.shape[1]
    for i, (b, at) in enumerate(zip(batch_indices.tolist(), positions.tolist(), strict=True)):
        if b >= 0:
            by_token[int(indices[int(indptr[b]) + at // page_size]), at % page_size] = key[i]
    return out


def get_batch_indices_positions(append_indptr: Indptr, seq_lens: Sequence[int]) -> tuple[list[int], list[int]]:
    """For each appended token: its request, and its position in it; a request's last tokens are the new ones."""
    batch, position = [], []
    for b, n in enumerate(lengths(append_indptr)):
        batch += [b] * n
        position += range(int(seq_lens[b]) - n, int(seq_lens[b]))
    return batch, position


# Rotary embeddings


def rope_angles(
    positions: Tensor, rotary_dim: int, scale: float = 1.0, theta: float = 1e4,
    llama31: tuple[float, float, float] | None = None,
) -> Tensor:  # fmt: skip
    """Radians by which each pair turns at each position: [nnz, rotary_dim / 2].

    llama31: low_freq_factor, high_freq_factor and old_context_len of Llama 3.1, which slows down the pairs that turn
    less than low_freq_factor times in old_context_len tokens.
    """
    frequency = theta ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    if llama31 is None:
        frequency = frequency / scale
    else:
        low, high, length = llama31
        kept = ((length * frequency / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        frequency = kept * frequency + (1 - kept) * frequency / scale
    return positions.cpu().double()[:, None] * frequency


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleave: bool, dtype: torch.dtype = torch.float64) -> Tensor:
    """x [nnz, heads, head_dim] with its first pairs turned, by cos and sin [nnz, rotary_dim / 2]; each operation is
    rounded to `dtype`.
    """
    out, dims = x.cpu().to(dtype).clone(), 2 * cos.shape[1]
    first, second = (slice(i, dims, 2) if interleave else slice(i * dims // 2, (i + 1) * dims // 2) for i in (0, 1))
    a, b = out[..., first].clone(), out[..., second].clone()
    c, s = (t.cpu()[:, None].to(dtype) for t in (cos, sin))
    out[..., first], out[..., second] = a * c - b * s, b * c + a * s
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """x [..., dims] divided by its root mean square, times weight [dims]."""
    x = x.cpu().to(dtype)
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight.cpu().to(dtype)


# Bits


def packbits(x: Tensor, bitorder: str) -> Tensor:
    """Eight flags a byte, the last byte filled up with zeros: bool [n] -> uint8 [ceil(n / 8)]."""
    bits = [bool(b) for b in x.tolist()]
    bits += [False] * (-len(bits) % 8)
    weight = [1 << i for i in range(8)]
    if bitorder == "big":
        weight.reverse()
    packed = [sum(w for w, b in zip(weight, bits[i : i + 8], strict=True) if b) for i in range(0, len(bits), 8)]
    return torch.tensor(packed, dtype=torch.uint8)


def segment_packbits(x: Tensor, indptr: Indptr, bitorder: str) -> tuple[Tensor, list[int]]:
    """Each segment packed from its own byte on: the bytes, and the offsets of the segments in them."""
    ends = [int(i) for i in indptr]
    parts = [packbits(x[a:b], bitorder) for a, b in itertools.pairwise(ends)]
    return torch.cat([*parts, torch.empty(0, dtype=torch.uint8)]), indptr_of([p.numel() for p in parts])


#: The numbers of E2M1, by their codes.
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
E2M1 = torch.cat((E2M1, -E2M1))


def nvfp4_numbers(data: Tensor, scales: Tensor) -> Tensor:
    """The numbers of NVFP4 in float64, [..., n], without their global scale: bytes [..., n / 2], of which the low bits
    are the first number, and scales [..., n / 16] in e4m3.
    """
    codes = torch.stack((data.cpu() & 15, data.cpu() >> 4), -1).flatten(-2)
    return E2M1[codes.long()] * scales.cpu().view(torch.float8_e4m3fn).double().repeat_interleave(16, -1)


def nvfp4_quantised(x: Tensor, global_scale: float) -> tuple[Tensor, Tensor]:
    """x [..., n] as bytes [..., n / 2] and scales [..., n / 16] of NVFP4: the nearest numbers, ties to even codes."""
    blocks = x.cpu().double().unflatten(-1, (-1, 16))
    scales = (blocks.abs().amax(-1) / (6.0 * global_scale)).clamp(max=448.0).float().to(torch.float8_e4m3fn)
    unit = scales.double() * global_scale
    sizes = torch.where(unit[..., None] > 0, blocks.abs() / unit[..., None], 0.0)
    sizes = torch.where(torch.isfinite(sizes) | torch.isinf(blocks), sizes, 0.0)
    distance = (sizes.clamp(max=6.0)[..., None] - E2M1[:8]).abs()
    nearest = distance == distance.amin(-1, keepdim=True)
    first, last = nearest.int().argmax(-1), 7 - nearest.flip(-1).int().argmax(-1)
    codes = torch.where(first % 2 == 0, first, last) | ((torch.signbit(blocks) & (unit[..., None] > 0)).long() << 3)
    codes = codes.flatten(-2).unflatten(-1, (-1, 2)).to(torch.uint8)
    return codes[..., 0] | codes[..., 1] << 4, scales
