"""Random calls of every public function on the CPU, and what each must give: from the arguments that it was really
passed, by tests/oracle.py.

A call is a flat dict of arguments, so that any of them can be changed before it is made. `check` holds results to the
rule of the suite, and raises Nonsense where arguments mean nothing: a call that takes them is wrong as well.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import oracle
import quire
from problems import FORMS, Problem, ints

Args = dict[str, Any]
Results = tuple[Tensor, ...]

CUSTOM_MASK_CHANCE, OPTION_CHANCE = 0.15, 0.2
DTYPES = (torch.float32, torch.float32, torch.float32, torch.float32, torch.bfloat16)
DIMS = ((64, 64), (64, 64), (64, 64), (64, 32))


class Nonsense(Exception):
    """Arguments that have no meaning were taken."""


@dataclass
class Case:
    """One call: its arguments, how it is made, and what its results must be.

    `invoke` may be called several times, on other arguments: a wrapper that it made stays.
    """

    name: str
    args: Args
    invoke: Callable[[Args], Results]
    check: Callable[[Args, Results], None]
    written: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Generators:
    """What calls are drawn from."""

    cases: tuple[Callable[[random.Random], Case], ...]
    good_chance: float  #: of a call that nothing is wrong with
    seconds: float  #: that a call may take

    def named(self, part: str) -> Generators:
        """Those whose name contains `part`."""
        return replace(self, cases=tuple(case for case in self.cases if part in case.__name__))


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Nonsense(what)


def has_memory(value: Any) -> bool:
    """Whether it is a tensor that can be placed: strided, on the host, with its storage, not complex."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.device.type != "cpu":
        return False
    return not value.is_complex() and (not value.numel() or value.untyped_storage().nbytes() > 0)


# What arguments mean


def integers(value: Any) -> list[int]:
    """Index arrays as Python numbers."""
    require(isinstance(value, (Tensor, list, tuple)), "no index array")
    if isinstance(value, Tensor):
        require(not value.is_floating_point() and value.dtype is not torch.bool, f"indices of {value.dtype}")
        require(value.dim() == 1, "indices of other than one dimension")
        value = value.tolist()
    require(all(isinstance(i, int) and not isinstance(i, bool) for i in value), "indices that are no integers")
    return list(value)


def offsets(value: Any, *, of_a_part: bool = False) -> list[int]:
    """Ascending offsets from 0 on; those of keys may be of a part of a batch, and begin further on."""
    ends = integers(value)
    begins = bool(ends) and (ends[0] == 0 or (of_a_part and ends[0] > 0))
    require(begins and ends == sorted(ends), "offsets that do not ascend from 0")
    return ends


def number(value: Any, default: float = 1.0) -> float:
    """A scale as a float."""
    if value is None:
        return default
    require(not isinstance(value, (str, bytes, complex)), "a scale that is no number")
    scale = float(value)
    require(math.isfinite(scale) and abs(scale) < 3.5e38, f"a scale of {scale}")
    return scale


def whole(value: Any) -> int:
    """An integer argument."""
    require(not isinstance(value, (bool, float, str, bytes)), "an integer that is none")
    return int(value)


def same_dtype(*tensors: Tensor) -> None:
    require(len({t.dtype for t in tensors}) == 1, "dtypes that differ")


def logits_of(args: Args) -> dict[str, Any]:
    """What a call says about logits and results, in check_attention()'s words."""
    return {
        "window_left": args["window_left"], "soft_cap": args["logits_soft_cap"], "sm_scale": args["sm_scale"],
        "logits_scale": scale_of(args), "v_scale": args["v_scale"], "sinks": args.get("sinks"),
        "pos_encoding_mode": args.get("pos_encoding_mode", "NONE"), "rope_scale": args.get("rope_scale"),
    }  # fmt: skip


def paged_tokens(args: Args, page_size: int, layout: str) -> tuple[Tensor, Tensor, list[int]]:
    """Keys and values of the requests, ragged, and their offsets."""
    k, v = (args["k_cache"], args["v_cache"]) if "k_cache" in args else args["cache"].unbind(1)
    indptr, indices = offsets(args["kv_indptr"], of_a_part=True), integers(args["kv_indices"])
    last = integers(args["kv_last_page_len"])
    require(len(last) == len(indptr) - 1, "as many last pages as requests")
    require(indptr[-1] <= len(indices), "page numbers that are missing")
    used = indices[: indptr[-1]]
    require(all(0 <= i < min(k.shape[0], v.shape[0]) for i in used), "pages that do not exist")
    counts = oracle.lengths(indptr)
    token = 1 if layout == "NHD" else 2
    if k.dim() == 3:  # pages of one token, without that dimension
        k, v = k.unsqueeze(token), v.unsqueeze(token)
    require(k.shape[token] == v.shape[token] == page_size, "pages of another size")
    require(
        all(0 < e <= page_size for n, e in zip(counts, last, strict=True) if n), "a last page of no possible length"
    )
    lens = [(n - 1) * page_size + e if n else 0 for n, e in zip(counts, last, strict=True)]
    parts = [oracle.gather_pages(t, torch.tensor(used, dtype=torch.int64), indptr, lens, layout) for t in (k, v)]
    return parts[0], parts[1], oracle.indptr_of(lens)


def check_attention(
    results: Results, q: Tensor, k: Tensor, v: Tensor, qo_indptr: Sequence[int], kv_indptr: Sequence[int], *,
    causal: bool = False, mask: Tensor | None = None, window_left: Any = -1, soft_cap: Any = None, sm_scale: Any = None,
    logits_scale: float = 1.0, v_scale: Any = None, sinks: Tensor | None = None, pos_encoding_mode: Any = "NONE",
    rope_scale: Any = None, **more: Any,
) -> None:  # fmt: skip
    """o, and lse if there is one, against the truth; `more` are further options of the oracle."""
    require(q.dim() == k.dim() == v.dim() == 3, "tensors of other than three dimensions")
    require(qo_indptr[-1] == q.shape[0], "as many rows of q as qo_indptr says")
    require(kv_indptr[-1] <= k.shape[0] and kv_indptr[-1] <= v.shape[0], "more keys than there are")
    require(q.shape[2] == k.shape[2] and k.shape[1] == v.shape[1], "heads that do not match")
    require(q.shape[1] % k.shape[1] == 0, "heads that do not divide")
    scale = number(sm_scale, 1.0 / math.sqrt(q.shape[2])) * logits_scale
    require(scale > 0, f"a softmax scale of {scale}")
    options: dict[str, Any] = {
        "causal": causal, "mask": mask, "window_left": whole(window_left), "soft_cap": number(soft_cap, 0.0),
        "sm_scale": scale, "v_scale": number(v_scale), "sinks": sinks, "pos_encoding_mode": pos_encoding_mode,
        "rope_scale": None if rope_scale is None else number(rope_scale), **more,
    }  # fmt: skip
    require(pos_encoding_mode in ("NONE", "ALIBI", "ROPE_LLAMA"), "positions of no known kind")
    require(rope_scale is None or pos_encoding_mode == "ROPE_LLAMA", "a scale of positions that are not rotated")
    q, k, v = (t.detach().resolve_neg() for t in (q, k, v))
    if q.element_size() == 1:  # queries of 8 bits are numbers of the keys' type
        q = q.to(k.dtype if k.element_size() > 1 else results[0].dtype)
    if sinks is not None and q.shape[0]:
        require(sinks.numel() == q.shape[1], "as many sinks as heads")
        options["sinks"] = sinks.reshape(-1)
    truth = oracle.attention(q, k, v, qo_indptr, kv_indptr, **options)
    own = oracle.torch_error(q, k, v, qo_indptr, kv_indptr, **options)
    own = own.where(own.isfinite(), truth.o)  # logits beyond the type
    o = results[0].reshape(truth.o.shape)
    if 0 < abs(options["v_scale"]) < 1e-30:  # numbers of fewer bits, to which no relative error applies
        assert not o.numel() or float((o.double() - truth.o).abs().max()) < 1e-36
    else:
        try:
            oracle.assert_close(o, truth.o, own, qo_indptr)
        except AssertionError:
            oracle.assert_close(o, truth.o, _least_lucky(q, k, v, qo_indptr, kv_indptr, truth.o, options), qo_indptr)
    if len(results) > 1 and results[1] is not None:
        norms = [float(t.double().norm(dim=2).amax()) if t.numel() else 0.0 for t in (q, k)]
        farthest = max(oracle.lengths(kv_indptr), default=0) if pos_encoding_mode == "ALIBI" else 0
        magnitude = max(1.0, (norms[0] * norms[1] * scale + farthest) * math.log2(math.e))
        oracle.assert_lse_close(results[1].reshape(truth.lse.shape), truth.lse, magnitude=magnitude)


def _least_lucky(
    q: Tensor, k: Tensor, v: Tensor, qo_indptr: Sequence[int], kv_indptr: Sequence[int], truth: Tensor, options: Args
) -> Tensor:
    """Torch's own answer that is farthest from the truth, for each request, of sums over the dims in several orders.

    Few rows whose weights are all but 0 and 1 depend on how a few logits are rounded, so that one order may be lucky.
    Torch sums a long row in parts, which are summed then; a kernel may add one product after the other.
    """
    orders = [torch.arange(q.shape[2])]
    if options["pos_encoding_mode"] != "ROPE_LLAMA":  # its dims have an order
        orders += [torch.randperm(q.shape[2], generator=torch.Generator().manual_seed(seed)) for seed in range(8)]
    answers = [
        oracle.torch_error(q[..., i], k[..., i], v, qo_indptr, kv_indptr, in_turn=in_turn, **options)
        for i in orders for in_turn in (False, True)
    ]  # fmt: skip
    answers = [answer.where(answer.isfinite(), truth) for answer in answers]
    farthest = answers[0].clone()
    for begin, end in itertools.pairwise(qo_indptr):
        if end > begin:
            errors = [float((answer - truth)[begin:end].abs().max()) for answer in answers]
            farthest[begin:end] = answers[errors.index(max(errors))][begin:end]
    return farthest


# Problems


def any_problem(rng: random.Random, *, decode: bool = False, queries: int = 1, cache_dtypes: bool = False) -> Problem:
    """A small batch; now and then one with an empty request, with none, or with long ones."""
    batch = rng.choice((0, 1, 1, 2, 3, 4))
    kv_lens = [rng.choice((0, 1, 5, 17, 40, rng.randint(0, 40), 300)) for _ in range(batch)]
    qo_lens = [queries if decode else rng.choice((0, 1, 2, 7, rng.randint(0, 24))) for _ in range(batch)]
    kv_heads, (dim_qk, dim_vo) = rng.choice((1, 2, 3)), (64, 64) if decode else rng.choice(DIMS)
    dtype = rng.choice(DTYPES)
    kv_dtype = torch.float8_e4m3fn if cache_dtypes and dtype is torch.bfloat16 and rng.random() < 0.3 else None
    return Problem(
        qo_lens, kv_lens, kv_heads * rng.choice((1, 2, 4)), kv_heads, dim_qk, dim_vo, dtype, kv_dtype,
        seed=rng.randrange(2**31),
    )  # fmt: skip


def one_request(rng: random.Random) -> Problem:
    p = any_problem(rng)
    kv_len = rng.choice((0, 1, 9, 40, 300))
    return Problem(
        [rng.choice((0, 1, 3, 17))], [kv_len], p.num_qo_heads, p.num_kv_heads, p.head_dim, p.head_dim_vo, p.dtype,
        seed=p.seed,
    )  # fmt: skip


def logits_options(rng: random.Random) -> Args:
    return {
        "window_left": rng.choice((0, 3, 20)) if rng.random() < OPTION_CHANCE else -1,
        "logits_soft_cap": rng.choice((0.0, 5.0, 30.0)) if rng.random() < OPTION_CHANCE else None,
        "sm_scale": rng.choice((0.03, 0.2)) if rng.random() < OPTION_CHANCE else None,
    }


def run_options(rng: random.Random, p: Problem) -> Args:
    """Keywords of run(); `out` and `lse` are full of NaN."""
    out: Args = {"q_scale": None, "k_scale": None, "v_scale": None, "return_lse": rng.random() < 0.6}
    if rng.random() < OPTION_CHANCE:
        out[rng.choice(("q_scale", "k_scale", "v_scale"))] = rng.choice((0.5, 2.0, torch.tensor(0.25)))
    if rng.random() < 0.5:
        out["out"] = torch.full((p.q.shape[0], p.num_qo_heads, p.v.shape[2]), math.nan, dtype=p.dtype)
    if rng.random() < 0.3:
        out["lse"] = torch.full((p.q.shape[0], p.num_qo_heads), math.nan)
    if rng.random() < OPTION_CHANCE:
        out["sinks"] = torch.randn(p.num_qo_heads)
    return out


def workspace() -> Tensor:
    """Memory for partial results, with whatever in it."""
    return torch.full((1 << 22,), 0xFF, dtype=torch.uint8)


def hnd(tensor: Tensor, layout: str) -> Tensor:
    """A ragged tensor in the layout; its numbers in the other one when called again."""
    return tensor if layout == "NHD" else tensor.transpose(0, 1)


def as_results(returned: Any) -> Results:
    return tuple(returned) if isinstance(returned, tuple) else (returned,)


def given(a: Args, *names: str) -> Args:
    """Those arguments that a call has."""
    return {name: a[name] for name in names if name in a}


def cache_of(a: Args, suffix: str = "") -> Any:
    """A cache of one tensor or two, as run() takes it."""
    return a["cache" + suffix] if "cache" + suffix in a else (a["k_cache" + suffix], a["v_cache" + suffix])


def scale_of(args: Args) -> float:
    return number(args.get("q_scale")) * number(args.get("k_scale"))


#: Arguments of constructors, which a wrapper that stays does not look at again.
CONSTRUCTORS = frozenset(
    {
        "backend", "float_workspace_buffer", "indices_buffer", "indptr_buffer", "kv_layout", "last_page_len_buffer",
        "num_levels", "workspace_buffer",
    }
)  # fmt: skip


# The functions


def single_prefill(rng: random.Random) -> Case:
    p, layout = one_request(rng), rng.choice(("NHD", "NHD", "HND"))
    args: Args = {
        "q": p.q, "k": hnd(p.k, layout).contiguous(), "v": hnd(p.v, layout).contiguous(), "kv_layout": layout,
        "causal": rng.random() < 0.4, "return_lse": rng.random() < 0.6, "backend": "auto", "k_scale": None,
        "v_scale": None, "pos_encoding_mode": "NONE", "rope_scale": None, **logits_options(rng),
    }  # fmt: skip
    if rng.random() < CUSTOM_MASK_CHANCE:
        args["custom_mask"] = torch.rand(p.q.shape[0], p.k.shape[0]) < 0.5

    def check(a: Args, results: Results) -> None:
        k, v = (hnd(a[n], a["kv_layout"]) for n in ("k", "v"))
        same_dtype(k, v, *([] if a["q"].element_size() == 1 else [a["q"]]))  # q of 8 bits has any cache's numbers
        mask = a.get("custom_mask")
        require(mask is None or mask.numel() == a["q"].shape[0] * k.shape[0], "a mask of another size")
        check_attention(
            results, a["q"], k, v, [0, a["q"].shape[0]], [0, k.shape[0]], causal=bool(a["causal"]), mask=mask,
            **logits_of(a),
        )  # fmt: skip

    return Case(
        "single_prefill_with_kv_cache", args, lambda a: as_results(quire.single_prefill_with_kv_cache(**a)), check
    )


def single_decode(rng: random.Random) -> Case:
    p, layout = one_request(rng), rng.choice(("NHD", "NHD", "HND"))
    args: Args = {
        "q": torch.randn(p.num_qo_heads, p.head_dim).to(p.dtype), "k": hnd(p.k, layout).contiguous(),
        "v": hnd(p.v, layout).contiguous(), "kv_layout": layout, "return_lse": rng.random() < 0.6, "q_scale": None,
        "k_scale": rng.choice((None, 2.0)), "v_scale": rng.choice((None, 2.0)), "use_tensor_cores": False,
        **logits_options(rng),
    }  # fmt: skip

    def check(a: Args, results: Results) -> None:
        k, v = (hnd(a[n], a["kv_layout"]) for n in ("k", "v"))
        require(a["q"].dim() == 2, "q of other than two dimensions")
        check_attention(results, a["q"][None], k, v, [0, 1], [0, k.shape[0]], **logits_of(a))

    return Case(
        "single_decode_with_kv_cache", args, lambda a: as_results(quire.single_decode_with_kv_cache(**a)), check
    )


_LOGITS = ("window_left", "logits_soft_cap", "sm_scale", "pos_encoding_mode", "rope_scale")
_PLAN = ("head_dim_qk", "head_dim_vo", "causal", "q_data_type", "custom_mask")
_RUN = ("q_scale", "k_scale", "v_scale", "return_lse", "out", "lse", "sinks")
_SIZES = ("num_qo_heads", "num_kv_heads")


def _sizes(p: Problem) -> Args:
    return {"num_qo_heads": p.num_qo_heads, "num_kv_heads": p.num_kv_heads}


class Kept:
    """A wrapper that outlives a call: what it remembers of one batch must not spoil the next."""

    def __init__(self, make: Callable[[Args], Any]) -> None:
        self._make, self._wrapper = make, None

    def __call__(self, args: Args) -> Any:
        if self._wrapper is None:
            self._wrapper = self._make(args)
        return self._wrapper


def ragged(rng: random.Random) -> Case:
    p, layout = any_problem(rng), rng.choice(("NHD", "NHD", "HND"))
    args: Args = {
        "float_workspace_buffer": workspace(), "kv_layout": layout, "backend": "auto",
        "qo_indptr": ints(p.qo_indptr, "cpu"), "kv_indptr": ints(p.kv_indptr, "cpu"), **_sizes(p),
        "head_dim_qk": p.head_dim, "head_dim_vo": p.v.shape[2], "causal": rng.random() < 0.4, "q_data_type": p.dtype,
        "disable_split_kv": rng.random() < 0.2, "pos_encoding_mode": "NONE", "q": p.q,
        "k": hnd(p.k, layout).contiguous(), "v": hnd(p.v, layout).contiguous(), **logits_options(rng),
        **run_options(rng, p),
    }  # fmt: skip
    if rng.random() < CUSTOM_MASK_CHANCE:
        args["custom_mask"] = p.random_mask().mask
    wrapper = Kept(
        lambda a: quire.BatchPrefillWithRaggedKVCacheWrapper(
            a["float_workspace_buffer"], a["kv_layout"], backend=a["backend"]
        )
    )

    def invoke(a: Args) -> Results:
        w = wrapper(a)
        w.plan(
            a["qo_indptr"], a["kv_indptr"], *(a[n] for n in _SIZES),
            **given(a, *_PLAN, "disable_split_kv", *_LOGITS),
        )  # fmt: skip
        return as_results(w.run(a["q"], a["k"], a["v"], **given(a, *_RUN)))

    def check(a: Args, results: Results) -> None:
        k, v = (hnd(a[n], a["kv_layout"]) for n in ("k", "v"))
        qo, kv = offsets(a["qo_indptr"]), offsets(a["kv_indptr"], of_a_part=True)
        require(len(qo) == len(kv), "as many offsets of queries as of keys")
        check_attention(
            results, a["q"], k, v, qo, kv, causal=bool(a["causal"]), mask=a.get("custom_mask"),
            **logits_of(a),
        )  # fmt: skip

    return Case(
        "BatchPrefillWithRaggedKVCacheWrapper", args, invoke, check,
        frozenset({"out", "lse", "float_workspace_buffer"}),
    )  # fmt: skip


def numbers(pages: Any) -> Any:
    """A cache in which what no request owns is not NaN: changed tables may own it."""
    if isinstance(pages, tuple):
        return tuple(numbers(plane) for plane in pages)
    unused = pages.isnan()
    pages[unused] = torch.randn(int(unused.sum())).to(pages.dtype)
    return pages


def _cache(rng: random.Random, p: Problem, layout: str) -> tuple[Args, int]:
    """The cache and its tables as arguments, and the page size."""
    page_size = rng.choice((1, 4, 8, 16))
    paged = p.paged(page_size, layout, rng.choice(FORMS if p.v.shape[2] == p.head_dim else ("tuple", "sliced")))
    args: Args = {"kv_indptr": paged.indptr, "kv_indices": paged.indices, "kv_last_page_len": paged.last_page_len}
    kv = numbers(paged.kv)
    if isinstance(kv, Tensor):
        return {**args, "cache": kv}, page_size
    return {**args, "k_cache": kv[0], "v_cache": kv[1]}, page_size


def paged(rng: random.Random) -> Case:
    p, layout = any_problem(rng, cache_dtypes=True), rng.choice(("NHD", "NHD", "HND"))
    cache, page_size = _cache(rng, p, layout)
    args: Args = {
        "float_workspace_buffer": workspace(), "kv_layout": layout, "qo_indptr": ints(p.qo_indptr, "cpu"), **cache,
        **_sizes(p), "head_dim_qk": p.head_dim, "page_size": page_size, "head_dim_vo": p.v.shape[2],
        "causal": rng.random() < 0.4, "q_data_type": p.dtype, "kv_data_type": p.kv_dtype or p.dtype,
        "fixed_split_size": rng.choice((None, None, None, 64, 128)), "pos_encoding_mode": "NONE", "q": p.q,
        **logits_options(rng), **run_options(rng, p),
    }  # fmt: skip
    if rng.random() < CUSTOM_MASK_CHANCE:
        args["custom_mask"] = p.random_mask().mask
    wrapper = Kept(lambda a: quire.BatchPrefillWithPagedKVCacheWrapper(a["float_workspace_buffer"], a["kv_layout"]))

    def invoke(a: Args) -> Results:
        w = wrapper(a)
        w.plan(
            a["qo_indptr"], a["kv_indptr"], a["kv_indices"], a["kv_last_page_len"], *(a[n] for n in _SIZES),
            **given(a, *_PLAN, "page_size", "kv_data_type", "fixed_split_size", *_LOGITS),
        )  # fmt: skip
        return as_results(w.run(a["q"], cache_of(a), **given(a, *_RUN)))

    def check(a: Args, results: Results) -> None:
        k, v, kv = paged_tokens(a, whole(a["page_size"]), a["kv_layout"])
        check_attention(
            results, a["q"], k, v, offsets(a["qo_indptr"]), kv, causal=bool(a["causal"]), mask=a.get("custom_mask"),
            **logits_of(a),
        )  # fmt: skip

    return Case(
        "BatchPrefillWithPagedKVCacheWrapper", args, invoke, check, frozenset({"out", "lse", "float_workspace_buffer"})
    )


def decode(rng: random.Random) -> Case:
    queries = rng.choice((1, 1, 1, 3))
    p, layout = any_problem(rng, decode=True, queries=queries, cache_dtypes=True), rng.choice(("NHD", "NHD", "HND"))
    cache, page_size = _cache(rng, p, layout)
    args: Args = {
        "float_workspace_buffer": workspace(), "kv_layout": layout, **cache, **_sizes(p), "head_dim": p.head_dim,
        "page_size": page_size, "q_data_type": p.dtype, "kv_data_type": p.kv_dtype or p.dtype,
        "q_len_per_req": queries, "pos_encoding_mode": "NONE", "q": p.q, **logits_options(rng), **run_options(rng, p),
    }  # fmt: skip
    way = rng.choice(("plan", "plan", "fast_decode_plan", "workspace_size"))
    wrapper = Kept(lambda a: quire.BatchDecodeWithPagedKVCacheWrapper(a["float_workspace_buffer"], a["kv_layout"]))

    def invoke(a: Args) -> Results:
        w = wrapper(a)
        tables = (a["kv_indptr"], a["kv_indices"], a["kv_last_page_len"], *(a[n] for n in _SIZES))
        options = given(a, "head_dim", "page_size", "q_data_type", "kv_data_type", "q_len_per_req", *_LOGITS)
        if way == "workspace_size":
            w.workspace_size(*tables, **options)
        (quire.fast_decode_plan if way == "fast_decode_plan" else type(w).plan)(w, *tables, **options)
        return as_results(w.run(a["q"], cache_of(a), **given(a, *_RUN)))

    def check(a: Args, results: Results) -> None:
        k, v, kv = paged_tokens(a, whole(a["page_size"]), a["kv_layout"])
        rows = whole(a["q_len_per_req"])
        check_attention(
            results, a["q"], k, v, [rows * b for b in range(len(kv))], kv, causal=rows > 1,
            **logits_of(a),
        )  # fmt: skip

    return Case(
        "BatchDecodeWithPagedKVCacheWrapper", args, invoke, check, frozenset({"out", "lse", "float_workspace_buffer"})
    )


def graph_decode(rng: random.Random) -> Case:
    p = any_problem(rng, decode=True)
    p = p if p.qo_lens else Problem([1], [9], 4, 2, 64, dtype=torch.float32)
    cache, page_size = _cache(rng, p, "NHD")
    batch, pages = len(p.qo_lens), cache["kv_indices"].numel()
    args: Args = {
        "workspace_buffer": workspace(), "indptr_buffer": ints([0] * (batch + 1), "cpu"),
        "indices_buffer": ints([0] * (pages + rng.choice((0, 3, 9))), "cpu"),
        "last_page_len_buffer": ints([0] * batch, "cpu"), **cache, **_sizes(p), "head_dim": p.head_dim,
        "page_size": page_size, "q_data_type": p.dtype, "q": p.q,
    }  # fmt: skip
    buffers = ("workspace_buffer", "indptr_buffer", "indices_buffer", "last_page_len_buffer")
    wrapper = Kept(lambda a: quire.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(*(a[n] for n in buffers)))

    def invoke(a: Args) -> Results:
        w = wrapper(a)
        tables = (a["kv_indptr"], a["kv_indices"], a["kv_last_page_len"], *(a[n] for n in _SIZES))
        w.plan(*tables, a["head_dim"], a["page_size"], q_data_type=a["q_data_type"])
        return as_results(w.run_return_lse(a["q"], cache_of(a)))

    def check(a: Args, results: Results) -> None:
        k, v, kv = paged_tokens(a, whole(a["page_size"]), "NHD")
        rows = list(range(len(kv)))
        check_attention(tuple(r[: rows[-1]] for r in results), a["q"][: rows[-1]], k, v, rows, kv)

    return Case("CUDAGraphBatchDecodeWithPagedKVCacheWrapper", args, invoke, check, frozenset(buffers))


def block_table(pages: Any, batch_size: int, rng: random.Random) -> Tensor:
    """[batch_size, pages] of a cache, now and then wider than any request needs."""
    counts = oracle.lengths(pages.indptr)
    table = torch.zeros(batch_size, max([*counts, 0]) + rng.choice((0, 2)), dtype=torch.int32)
    for row, begin, count in zip(table, pages.indptr.tolist(), counts, strict=False):
        row[:count] = pages.indices[begin : begin + count]
    return table


def tabled_tokens(args: Args, lens: Sequence[int], most: Any, layout: str) -> tuple[Tensor, Tensor, list[int]]:
    """Keys and values of the requests whose pages a block table names, ragged, and their offsets."""
    size, table = args["k_cache"].shape[1 if layout == "NHD" else 2], args["block_tables"]
    require(table.dim() == 2 and table.shape[0] == len(lens), "a table of another batch")
    require(all(0 <= n <= whole(most) for n in lens), "lengths that cannot be")
    counts = [-(-n // size) for n in lens]
    require(all(c <= table.shape[1] for c in counts), "pages that are missing")
    tables = {
        "kv_indptr": oracle.indptr_of(counts), "k_cache": args["k_cache"], "v_cache": args["v_cache"],
        "kv_indices": [int(i) for row, c in zip(table.tolist(), counts, strict=True) for i in row[:c]],
        "kv_last_page_len": [(n - 1) % size + 1 if n else 0 for n in lens],
    }  # fmt: skip
    return paged_tokens(tables, size, layout)


def xqa(rng: random.Random) -> Case:
    queries, layout = rng.choice((1, 1, 2)), rng.choice(("NHD", "HND"))
    p = any_problem(rng, decode=True, queries=queries)
    page_size = rng.choice((1, 4, 16))
    pages = p.paged(page_size, layout, "tuple")
    k_cache, v_cache = numbers(pages.kv)
    args: Args = {
        "query": p.q, "k_cache": k_cache, "v_cache": v_cache, "workspace_buffer": workspace(),
        "block_tables": block_table(pages, len(p.qo_lens), rng), "seq_lens": ints(list(p.kv_lens), "cpu"),
        "max_seq_len": max([1, *p.kv_lens]),
        "bmm1_scale": 0.125, "bmm2_scale": rng.choice((1.0, 2.0)), "kv_layout": layout, "q_len_per_req": queries,
        "window_left": logits_options(rng)["window_left"], "enable_pdl": None, "o_scale": 1.0,
    }  # fmt: skip
    if rng.random() < 0.4:
        args["out"] = torch.full((p.q.shape[0], p.num_qo_heads, 64), math.nan, dtype=p.dtype)
    if rng.random() < OPTION_CHANCE:
        args["sinks"] = torch.randn(p.num_qo_heads)

    def invoke(a: Args) -> Results:
        rest = {n: value for n, value in a.items() if n not in ("k_cache", "v_cache")}
        return as_results(quire.xqa_batch_decode_with_kv_cache(kv_cache=(a["k_cache"], a["v_cache"]), **rest))

    def check(a: Args, results: Results) -> None:
        k, v, kv = tabled_tokens(a, integers(a["seq_lens"]), a["max_seq_len"], a["kv_layout"])
        rows = 1 if a["q_len_per_req"] is None else whole(a["q_len_per_req"])
        o = results[0]
        if o.dtype is torch.float8_e4m3fn:
            o = o.to(a["query"].dtype)
            require(False, "a result of 8 bits, which this check does not know")
        check_attention(
            (o,), a["query"], k, v, [rows * b for b in range(len(kv))], kv, causal=rows > 1,
            window_left=a["window_left"], sm_scale=number(a["bmm1_scale"]), v_scale=a["bmm2_scale"],
            sinks=a.get("sinks"),
        )  # fmt: skip

    return Case("xqa_batch_decode_with_kv_cache", args, invoke, check, frozenset({"out", "workspace_buffer"}))


def cudnn_decode(rng: random.Random) -> Case:
    queries = rng.choice((1, 1, 2))
    p = any_problem(rng, decode=True, queries=queries)
    pages = p.paged(rng.choice((1, 4, 16)), "HND", "tuple")
    k_cache, v_cache = numbers(pages.kv)
    args: Args = {
        "q": p.q, "k_cache": k_cache, "v_cache": v_cache, "scale": 0.125, "workspace_buffer": workspace(),
        "max_sequence_kv": max([1, *p.kv_lens]), "actual_seq_lens_kv": ints(list(p.kv_lens), "cpu"),
        "block_tables": block_table(pages, len(p.qo_lens), rng), "q_len_per_req": queries,
        "window_left": logits_options(rng)["window_left"], "return_lse": rng.random() < 0.5, "backend": "auto",
    }  # fmt: skip
    if rng.random() < OPTION_CHANCE:
        args["batch_offsets_q"] = torch.arange(len(p.qo_lens)) * queries * p.num_qo_heads * 64
    if rng.random() < OPTION_CHANCE:
        args["sinks"] = torch.randn(p.num_qo_heads)

    def check(a: Args, results: Results) -> None:
        k, v, kv = tabled_tokens(a, integers(a["actual_seq_lens_kv"].reshape(-1)), a["max_sequence_kv"], "HND")
        rows = whole(a["q_len_per_req"])
        check_attention(
            results, a["q"], k, v, [rows * b for b in range(len(kv))], kv, causal=rows > 1,
            window_left=a["window_left"], sm_scale=number(a["scale"]), sinks=a.get("sinks"),
        )  # fmt: skip

    return Case(
        "cudnn_batch_decode_with_kv_cache", args,
        lambda a: as_results(quire.cudnn_batch_decode_with_kv_cache(**a)), check, frozenset({"workspace_buffer"}),
    )  # fmt: skip


def cudnn_prefill(rng: random.Random) -> Case:
    p, is_paged = any_problem(rng), rng.random() < 0.5
    args: Args = {
        "q": p.q, "k_cache": p.k, "v_cache": p.v, "scale": 0.125, "workspace_buffer": workspace(),
        "max_token_per_sequence": max([1, *p.qo_lens]), "max_sequence_kv": max([1, *p.kv_lens]),
        "actual_seq_lens_q": ints(list(p.qo_lens), "cpu"), "actual_seq_lens_kv": ints(list(p.kv_lens), "cpu"),
        "causal": rng.random() < 0.5, "return_lse": rng.random() < 0.5,
    }  # fmt: skip
    if is_paged:
        pages = p.paged(rng.choice((1, 4, 16)), "HND", "tuple")
        args["k_cache"], args["v_cache"] = numbers(pages.kv)
        args["block_tables"] = block_table(pages, len(p.qo_lens), rng)

    def check(a: Args, results: Results) -> None:
        qo_lens, kv_lens = (integers(a[f"actual_seq_lens_{of}"].reshape(-1)) for of in ("q", "kv"))
        require(len(qo_lens) == len(kv_lens), "as many lengths of queries as of keys")
        require(all(0 <= n <= whole(a["max_token_per_sequence"]) for n in qo_lens), "lengths that cannot be")
        if is_paged:
            k, v, kv = tabled_tokens(a, kv_lens, a["max_sequence_kv"], "HND")
        else:
            require(all(0 <= n <= whole(a["max_sequence_kv"]) for n in kv_lens), "lengths that cannot be")
            k, v, kv = a["k_cache"], a["v_cache"], oracle.indptr_of(kv_lens)
        o, *lse = results
        if lse:
            rows = [x[:n] for x, n in zip(lse[0], qo_lens, strict=True)]
            lse = [torch.cat([torch.empty(0, a["q"].shape[1]), *rows])]
        check_attention(
            (o, *lse), a["q"], k, v, oracle.indptr_of(qo_lens), kv, causal=bool(a["causal"]),
            sm_scale=number(a["scale"]),
        )  # fmt: skip

    return Case(
        "cudnn_batch_prefill_with_kv_cache", args,
        lambda a: tuple(x for x in quire.cudnn.cudnn_batch_prefill_with_kv_cache(**a) if x is not None), check,
        frozenset({"workspace_buffer"}),
    )  # fmt: skip


def cascade(rng: random.Random) -> Case:
    """Two levels in one cache: `shared_len` whole pages for all, then the rest of each request."""
    page_size, batch = rng.choice((1, 4, 8)), rng.randint(1, 3)
    own = Problem(
        [rng.choice((1, 1, 3)) for _ in range(batch)], [rng.choice((0, 3, 20)) for _ in range(batch)],
        rng.choice((2, 4)), 2, 64, dtype=rng.choice(DTYPES), seed=rng.randrange(2**31),
    )  # fmt: skip
    pages = own.paged(page_size, "NHD", "tuple", spare=2)
    shared = [i for i in range(pages.kv[0].shape[0]) if i not in pages.indices.tolist()]
    k_cache, v_cache = numbers(pages.kv)
    args: Args = {
        "float_workspace_buffer": workspace(), "num_levels": 2, "k_cache": k_cache, "v_cache": v_cache,
        "qo_indptr_shared": ints([0, sum(own.qo_lens)], "cpu"), "kv_indptr_shared": ints([0, len(shared)], "cpu"),
        "kv_indices_shared": ints(shared, "cpu"), "kv_last_page_len_shared": ints([page_size], "cpu"),
        "qo_indptr": ints(own.qo_indptr, "cpu"), "kv_indptr": pages.indptr, "kv_indices": pages.indices,
        "kv_last_page_len": pages.last_page_len, **_sizes(own), "head_dim": 64, "page_size": page_size,
        "causal": rng.random() < 0.5, "q_data_type": own.dtype, "logits_soft_cap": None, "sm_scale": None, "q": own.q,
    }  # fmt: skip
    wrapper = Kept(lambda a: quire.MultiLevelCascadeAttentionWrapper(a["num_levels"], a["float_workspace_buffer"]))
    names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len")

    def invoke(a: Args) -> Results:
        w = wrapper(a)
        w.plan(
            *([a[n + "_shared"], a[n]] for n in names), *(a[n] for n in _SIZES),
            **given(a, "head_dim", "page_size", "causal", "q_data_type", "logits_soft_cap", "sm_scale"),
        )  # fmt: skip
        return (w.run(a["q"], (a["k_cache"], a["v_cache"])),)

    def check(a: Args, results: Results) -> None:
        size = whole(a["page_size"])
        caches = {"k_cache": a["k_cache"], "v_cache": a["v_cache"]}
        levels = [
            (
                offsets(a["qo_indptr" + end]),
                *paged_tokens({**caches, **{n: a[n + end] for n in names[1:]}}, size, "NHD"),
            )
            for end in ("_shared", "")
        ]
        q, qo = a["q"], levels[1][0]
        require(levels[0][0] == [0, qo[-1]] and qo[-1] == q.shape[0], "levels of other rows")
        (_, k0, v0, kv0), (_, k1, v1, kv1) = levels
        require(k1.shape[1] == k0.shape[1] and q.shape[2] == k0.shape[2], "sizes that do not match")
        options = {"soft_cap": number(a["logits_soft_cap"], 0.0), "sm_scale": a["sm_scale"] and number(a["sm_scale"])}
        for dtype in (torch.float64, q.dtype):
            first = oracle.attention(q, k0, v0, [0, qo[-1]], kv0, dtype=dtype, **options)
            second = oracle.attention(q, k1, v1, qo, kv1, causal=bool(a["causal"]), dtype=dtype, **options)
            merged = oracle.merge_state(first.o.to(dtype), first.lse, second.o.to(dtype), second.lse).o
            truth, theirs = (merged, None) if dtype is torch.float64 else (truth, merged)  # noqa: F821
        oracle.assert_close(results[0], truth, theirs.to(q.dtype), qo)

    return Case("MultiLevelCascadeAttentionWrapper", args, invoke, check, frozenset({"float_workspace_buffer"}))


def _shared_prefix(rng: random.Random, prefill: bool) -> Case:
    p = any_problem(rng, decode=not prefill)
    p = Problem(p.qo_lens, p.kv_lens, p.num_qo_heads, p.num_kv_heads, 64, dtype=p.dtype, seed=p.seed)
    cache, page_size = _cache(rng, p, "NHD")
    shared = (rng.choice((0, 1, 9, 40)), p.num_kv_heads, 64)
    args: Args = {
        "float_workspace_buffer": workspace(), **cache, **_sizes(p), "head_dim": 64, "page_size": page_size,
        "data_type": p.dtype, "q": p.q, "k_shared": torch.randn(shared).to(p.dtype),
        "v_shared": torch.randn(shared).to(p.dtype), "sm_scale": rng.choice((None, 0.2)), "rope_scale": None,
    }  # fmt: skip
    if prefill:
        args |= {"qo_indptr": ints(p.qo_indptr, "cpu"), "causal": rng.random() < 0.5}
    kind = (
        quire.BatchPrefillWithSharedPrefixPagedKVCacheWrapper
        if prefill
        else quire.BatchDecodeWithSharedPrefixPagedKVCacheWrapper
    )
    wrapper = Kept(lambda a: kind(a["float_workspace_buffer"]))

    def invoke(a: Args) -> Results:
        w = wrapper(a)
        tables = (*given(a, "qo_indptr").values(), a["kv_indptr"], a["kv_indices"], a["kv_last_page_len"])
        sizes = (*(a[n] for n in _SIZES), a["head_dim"], a["page_size"])
        w.begin_forward(*tables, *sizes, **{"q_data_type" if prefill else "data_type": a["data_type"]})
        options = given(a, "causal", "sm_scale", "rope_scale")
        return (w.forward(a["q"], a["k_shared"], a["v_shared"], cache_of(a), **options),)

    def check(a: Args, results: Results) -> None:
        keys = a["k_cache"] if "k_cache" in a else a["cache"][:, 0]
        own_size = keys.shape[1] if keys.dim() == 4 else 1  # which prefill takes where no page_size is given
        k, v, kv = paged_tokens(a, own_size if a["page_size"] is None else whole(a["page_size"]), "NHD")
        qo = offsets(a["qo_indptr"]) if prefill else list(range(len(kv)))
        check_shared(
            results[0], a["q"], a["k_shared"], a["v_shared"], k, v, qo, kv, bool(a.get("causal", False)), a["sm_scale"]
        )

    return Case(kind.__name__, args, invoke, check, frozenset({"float_workspace_buffer"}))


def check_shared(
    o: Tensor, q: Tensor, k_shared: Tensor, v_shared: Tensor, k: Tensor, v: Tensor, qo: list[int], kv: list[int],
    causal: bool, sm_scale: Any,
) -> None:  # fmt: skip
    """A prefix that all rows see, and each request's own keys: all in one row of keys, under one mask."""
    require(qo[-1] == q.shape[0], "as many rows of q as qo_indptr says")
    require(k_shared.dim() == 3 and k_shared.shape[1:] == k.shape[1:], "a prefix of other heads")
    require(v_shared.shape[0] == k_shared.shape[0] and v_shared.shape[1:] == v.shape[1:], "a prefix of other values")
    n, ks, vs, masks = k_shared.shape[0], [], [], []
    for b, (rows, keys) in enumerate(zip(oracle.lengths(qo), oracle.lengths(kv), strict=True)):
        ks += [k_shared, k[kv[b] : kv[b + 1]]]
        vs += [v_shared, v[kv[b] : kv[b + 1]]]
        masks.append(torch.cat([torch.ones(rows, n, dtype=torch.bool), oracle.visible(rows, keys, causal=causal)], 1))
    ends = [kv[b] + n * b for b in range(len(kv))]
    mask = torch.cat([m.flatten() for m in masks]) if masks else None
    k, v = (torch.cat(parts) if parts else like for parts, like in ((ks, k), (vs, v)))
    # Two results and their sums are rounded to the dtype before they are merged: as far from the truth as twice that.
    options = {"mask": mask, "sm_scale": None if sm_scale is None else number(sm_scale)}
    truth = oracle.attention(q, k, v, qo, ends, **options).o
    own = oracle.torch_error(q, k, v, qo, ends, **options)
    slack = (own.double() - truth) * 2 + truth.abs().amax() * torch.finfo(o.dtype).eps if truth.numel() else truth
    oracle.assert_close(o, truth, truth + slack, qo)


def decode_shared(rng: random.Random) -> Case:
    return _shared_prefix(rng, prefill=False)


def prefill_shared(rng: random.Random) -> Case:
    return _shared_prefix(rng, prefill=True)


def padded(rng: random.Random) -> Case:
    batch, heads, layout = rng.choice((0, 1, 3)), rng.choice((1, 2)), rng.choice(("NHD", "HND"))
    shared, unique, dtype = rng.choice((0, 1, 9)), rng.choice((0, 1, 7)), rng.choice(DTYPES)

    def draw(*shape: int) -> Tensor:
        tensor = torch.randn(shape).to(dtype)
        return tensor if layout == "NHD" else tensor.transpose(-3, -2).contiguous()

    args: Args = {
        "q": torch.randn(batch, heads * rng.choice((1, 2)), 64).to(dtype), "k_shared": draw(shared, heads, 64),
        "v_shared": draw(shared, heads, 64), "k_unique": draw(batch, unique, heads, 64),
        "v_unique": draw(batch, unique, heads, 64), "kv_layout": layout, "sm_scale": None,
        "allow_fp16_qk_reduction": False,
    }  # fmt: skip

    def check(a: Args, results: Results) -> None:
        swap = a["kv_layout"] == "HND"
        ks, vs, k, v = (
            t.transpose(-3, -2) if swap else t for t in (a[n] for n in ("k_shared", "v_shared", "k_unique", "v_unique"))
        )
        require(k.dim() == v.dim() == 4 and k.shape[:3] == v.shape[:3], "suffixes that do not match")
        kv = [k.shape[1] * b for b in range(k.shape[0] + 1)]
        qo = list(range(k.shape[0] + 1))
        check_shared(results[0], a["q"], ks, vs, k.flatten(0, 1), v.flatten(0, 1), qo, kv, False, a["sm_scale"])

    return Case(
        "batch_decode_with_shared_prefix_padded_kv_cache", args,
        lambda a: as_results(quire.batch_decode_with_shared_prefix_padded_kv_cache(**a)), check,
    )  # fmt: skip


def _states(rng: random.Random, *names: str) -> Args:
    n, heads, dim = rng.choice((0, 1, 3, 40)), rng.choice((1, 3)), rng.choice((64, 64, 8, 7))
    dtype, args = rng.choice((torch.float32, torch.float16, torch.bfloat16)), {}
    for v, s in zip(names[::2], names[1::2], strict=True):
        args[v], args[s] = torch.randn(n, heads, dim).to(dtype), torch.randn(n, heads) * 10
        if rng.random() < 0.2:
            args[s][:1] = -math.inf
    return args


def _check_merged(v: Tensor, s: Tensor, results: Results) -> None:
    """Merged states [n, states, ...] against the truth: v rounded once, s in float32."""
    require(not v.is_complex() and v.dim() == 4 and s.shape == v.shape[:3], "states that do not match")
    truth = oracle.merge_states(v.detach().resolve_neg(), s.detach().resolve_neg())
    require(results[0].dtype is v.dtype, "another dtype than that of the states")
    eps = torch.finfo(v.dtype).eps
    oracle.assert_close(results[0], truth.o, truth.o + 8 * eps * v.double().abs().amax(1) if v.numel() else truth.o)
    oracle.assert_lse_close(results[1], truth.lse)


def merge_state(rng: random.Random) -> Case:
    args = _states(rng, "v_a", "s_a", "v_b", "s_b")

    def check(a: Args, results: Results) -> None:
        require(a["v_a"].shape == a["v_b"].shape, "states that do not match")
        v, s = torch.stack([a["v_a"], a["v_b"]], 1), torch.stack([a["s_a"], a["s_b"]], 1)
        _check_merged(v, s, results)

    return Case("merge_state", args, lambda a: quire.merge_state(*(a[n] for n in ("v_a", "s_a", "v_b", "s_b"))), check)


def merge_state_in_place(rng: random.Random) -> Case:
    args = _states(rng, "v", "s", "v_other", "s_other")
    if rng.random() < 0.4:
        args["mask"] = torch.rand(args["v"].shape[0]) < 0.5

    def invoke(a: Args) -> Results:
        quire.merge_state_in_place(**a)
        return a["v"], a["s"]

    def check(a: Args, results: Results) -> None:
        require(a["v"].shape == a["v_other"].shape, "states that do not match")
        mask = a.get("mask")
        keep = torch.zeros(a["v"].shape[0], dtype=torch.bool) if mask is None else mask == 0
        require(keep.shape == a["v"].shape[:1], "a mask of another length")
        assert torch.equal(results[0][keep], a["v"][keep]) and torch.equal(results[1][keep], a["s"][keep])
        v, s = torch.stack([a["v"], a["v_other"]], 1)[~keep], torch.stack([a["s"], a["s_other"]], 1)[~keep]
        _check_merged(v, s, (results[0][~keep], results[1][~keep]))

    return Case("merge_state_in_place", args, invoke, check, frozenset({"v", "s"}))


def merge_states(rng: random.Random) -> Case:
    n, states, heads, dim = rng.choice((0, 1, 7)), rng.choice((0, 1, 2, 5)), rng.choice((1, 3)), rng.choice((64, 7))
    args: Args = {
        "v": torch.randn(n, states, heads, dim).to(rng.choice((torch.float32, torch.bfloat16))),
        "s": torch.randn(n, states, heads) * 10,
    }
    return Case(
        "merge_states", args, lambda a: quire.merge_states(a["v"], a["s"]),
        lambda a, results: _check_merged(a["v"], a["s"], results),
    )  # fmt: skip


def append(rng: random.Random) -> Case:
    p, layout = any_problem(rng, decode=True, queries=0), rng.choice(("NHD", "HND"))
    page_size = rng.choice((1, 4, 8))
    pages = p.paged(page_size, layout, rng.choice(("tuple", "tensor", "sliced")))
    tokens = [(b, at) for b, n in enumerate(p.kv_lens) for at in range(max(0, n - rng.choice((0, 1, 6))), n)]
    key, value = (torch.randn(len(tokens), p.num_kv_heads, 64).to(p.dtype) for _ in range(2))
    args: Args = {
        "append_key": key, "append_value": value, "batch_indices": ints([b for b, _ in tokens], "cpu"),
        "positions": ints([at for _, at in tokens], "cpu"), "kv_indices": pages.indices, "kv_indptr": pages.indptr,
        "kv_last_page_len": pages.last_page_len, "kv_layout": layout,
    }  # fmt: skip
    if isinstance(pages.kv, Tensor):
        args["cache"] = pages.kv
    else:
        args["k_cache"], args["v_cache"] = pages.kv

    def invoke(a: Args) -> Results:
        others = {n: value for n, value in a.items() if n not in ("cache", "k_cache", "v_cache")}
        quire.append_paged_kv_cache(paged_kv_cache=cache_of(a), **others)
        return a["cache"].unbind(1) if "cache" in a else (a["k_cache"], a["v_cache"])

    def check(a: Args, results: Results) -> None:
        before = a["cache"].unbind(1) if "cache" in a else (a["k_cache"], a["v_cache"])
        batch, at = integers(a["batch_indices"]), integers(a["positions"])
        indptr, indices = offsets(a["kv_indptr"]), integers(a["kv_indices"])
        require(len(batch) == len(at) == a["append_key"].shape[0], "tables of other lengths")
        require(len(indices) >= indptr[-1], "page numbers that are missing")
        token = 1 if a["kv_layout"] == "NHD" else 2
        for new, old, got in zip((a["append_key"], a["append_value"]), before, results, strict=True):
            if old.dim() == 3:
                old, got = old.unsqueeze(token), got.unsqueeze(token)
            require(new.dtype is old.dtype, "tokens of another dtype")
            size, num_pages = old.shape[token], old.shape[0]
            ours = [
                b if 0 <= b < len(indptr) - 1 and 0 <= i < (indptr[b + 1] - indptr[b]) * size else -1
                for b, i in zip(batch, at, strict=True)
            ]
            used = [indices[indptr[b] + i // size] for b, i in zip(ours, at, strict=True) if b >= 0]
            require(all(0 <= i < num_pages for i in used), "pages that do not exist")

            def append(requests: list[int], new: Tensor = new, old: Tensor = old) -> Tensor:
                tables = torch.tensor(requests), torch.tensor(at)
                return oracle.append_paged_kv_cache(new, *tables, old, indices, indptr, a["kv_layout"])

            want = append(ours)
            places = [
                (indices[indptr[b] + n // size], n % size) if b >= 0 else b for b, n in zip(ours, at, strict=True)
            ]
            for i, place in enumerate(places):  # tokens that go to one place: the numbers of any of them
                if place in places[:i]:
                    earlier = append([-1 if n >= i and places[n] == place else b for n, b in enumerate(ours)])
                    want = torch.where(got == earlier, earlier, want)
            assert torch.equal(got.float().nan_to_num(7.0), want.float().nan_to_num(7.0)), (
                "the cache is not as it should be"
            )

    return Case("append_paged_kv_cache", args, invoke, check, frozenset({"cache", "k_cache", "v_cache"}))


def positions_of(value: Any, nnz: int) -> Tensor:
    at = integers(value)
    require(len(at) == nnz and all(-(2**31) <= i < 2**31 for i in at), "positions that are none")
    return torch.tensor(at, dtype=torch.int64)


def check_rotated(
    got: Tensor, x: Tensor, at: Tensor, args: Args, weight: Tensor | None = None, llama31: Any = None
) -> None:
    """Heads that were normalised, if `weight` is given, and rotated."""
    exact, own = (turned(x, at, args, dtype, weight, llama31) for dtype in (torch.float64, x.dtype))
    require(got.dtype is x.dtype and got.shape == x.shape, "a result of another shape or dtype")
    oracle.assert_close(got, exact, own)


def turned(x: Tensor, at: Tensor, args: Args, dtype: torch.dtype, weight: Tensor | None, llama31: Any) -> Tensor:
    require(isinstance(args["interleave"], bool), "a flag that is none")
    dim = x.shape[2] if args["rotary_dim"] is None else whole(args["rotary_dim"])
    require(0 < dim <= x.shape[2] and dim % 2 == 0, f"{dim} dims that turn")
    scale, theta = number(args["rope_scale"]), number(args["rope_theta"])
    require(scale > 0 and theta >= 1, f"a scale of {scale} and a theta of {theta}")
    x = x.detach().resolve_neg()
    if weight is not None:
        require(weight.shape == x.shape[2:], "a weight of another length")
        x = oracle.rms_norm(x, weight.detach().resolve_neg(), number(args["eps"]), dtype)
    angles = oracle.rope_angles(at, dim, scale, theta, llama31)
    return oracle.rotate(x, angles.cos(), angles.sin(), args["interleave"], dtype)


def _rotation_options(rng: random.Random, head_dim: int) -> Args:
    return {
        "rotary_dim": rng.choice((None, None, 2, head_dim // 2)), "interleave": rng.random() < 0.5,
        "rope_scale": rng.choice((1, 1.0, 8.0)), "rope_theta": rng.choice((1e4, 5e5, 100)),
    }  # fmt: skip


def rope(rng: random.Random) -> Case:
    nnz, head_dim, dtype = rng.choice((0, 1, 3, 40)), rng.choice((64, 64, 80, 12)), rng.choice(DTYPES)
    in_place, is_llama31 = rng.random() < 0.5, rng.random() < 0.3
    at = [rng.choice((0, 1, 77, 131072)) for _ in range(nnz)]
    args: Args = {n: torch.randn(nnz, rng.choice((1, 2, 5)), head_dim).to(dtype) for n in ("q", "k")}
    args |= {
        "pos_ids": torch.tensor(at, dtype=rng.choice((torch.int32, torch.int64))),
        **_rotation_options(rng, head_dim),
    }
    if is_llama31:
        args |= {"low_freq_factor": 1, "high_freq_factor": rng.choice((4, 2.5)), "old_context_len": 8192}
    name = f"apply_{'llama31_' * is_llama31}rope_pos_ids{'_inplace' * in_place}"

    def invoke(a: Args) -> Results:
        result = getattr(quire, name)(**a)
        return (a["q"], a["k"]) if in_place else result

    def check(a: Args, results: Results) -> None:
        q, k = a["q"], a["k"]
        require(q.dim() == k.dim() == 3 and q.shape[0] == k.shape[0] and q.shape[2] == k.shape[2], "heads of two kinds")
        same_dtype(q, k)
        factors = ("low_freq_factor", "high_freq_factor", "old_context_len")
        llama31 = tuple(number(a[n]) for n in factors) if is_llama31 else None
        require(llama31 is None or (llama31[0] < llama31[1] and llama31[2] > 0), "factors that are none")
        for got, x in zip(results, (q, k), strict=True):
            check_rotated(got, x, positions_of(a["pos_ids"], q.shape[0]), a, llama31=llama31)

    return Case(name, args, invoke, check, frozenset({"q", "k"} if in_place else ()))


def rope_requests(rng: random.Random) -> Case:
    lens, dtype = [rng.choice((0, 1, 5)) for _ in range(rng.choice((0, 1, 3)))], rng.choice(DTYPES)
    args: Args = {n: torch.randn(sum(lens), rng.choice((1, 3)), 64).to(dtype) for n in ("q", "k")}
    args |= {
        "indptr": ints(oracle.indptr_of(lens), "cpu"),
        "offsets": ints([rng.choice((0, 9, 131072)) for _ in lens], "cpu"), **_rotation_options(rng, 64),
    }  # fmt: skip

    def check(a: Args, results: Results) -> None:
        ends, starts = offsets(a["indptr"]), integers(a["offsets"])
        require(len(starts) == len(ends) - 1 and ends[-1] == a["q"].shape[0], "requests of other tokens")
        at = [start + i for start, n in zip(starts, oracle.lengths(ends), strict=True) for i in range(n)]
        same_dtype(a["q"], a["k"])
        require(a["k"].shape[0] == a["q"].shape[0] and a["k"].shape[2] == a["q"].shape[2], "heads of two kinds")
        for got, x in zip(results, (a["q"], a["k"]), strict=True):
            check_rotated(got, x, positions_of(at, a["q"].shape[0]), a)

    return Case("apply_rope", args, lambda a: quire.apply_rope(**a), check)


def rope_table(rng: random.Random) -> Case:
    nnz, dim, dtype = rng.choice((0, 1, 9)), rng.choice((64, 32)), rng.choice(DTYPES)
    args: Args = {
        "positions": ints([rng.choice((0, 5, 9)) for _ in range(nnz)], "cpu"), "head_size": 64,
        "query": torch.randn(nnz, 64 * rng.choice((1, 4))).to(dtype), "key": torch.randn(nnz, 64).to(dtype),
        "cos_sin_cache": torch.randn(10, dim), "is_neox": rng.random() < 0.5,
    }  # fmt: skip

    def check(a: Args, results: Results) -> None:
        at, (cos, sin) = integers(a["positions"]), a["cos_sin_cache"].chunk(2, 1)
        require(isinstance(a["is_neox"], bool) and cos.shape == sin.shape, "a table of no angles")
        require(len(at) == a["query"].shape[0] == a["key"].shape[0], "positions of other tokens")
        require(all(0 <= i < cos.shape[0] for i in at), "positions beyond the table")
        same_dtype(a["query"], a["key"])
        cos, sin = (t.detach().resolve_neg()[at] for t in (cos, sin))
        for got, x in zip(results, (a["query"], a["key"]), strict=True):
            heads = x.detach().resolve_neg().reshape(len(at), -1, whole(a["head_size"])) if at else x[:, None]
            if at:
                exact, own = (oracle.rotate(heads, cos, sin, not a["is_neox"], t) for t in (torch.float64, x.dtype))
                oracle.assert_close(got.reshape(exact.shape), exact, own)

    return Case(
        "apply_rope_with_cos_sin_cache", args, lambda a: quire.apply_rope_with_cos_sin_cache(**a), check
    )  # fmt: skip


def rope_append(rng: random.Random) -> Case:
    base = append(rng)
    args = {n: value for n, value in base.args.items() if n not in ("append_key", "append_value", "kv_last_page_len")}
    key, value = base.args["append_key"], base.args["append_value"]
    args |= {
        "q": torch.randn(key.shape[0], key.shape[1] * rng.choice((1, 3)), 64).to(key.dtype), "k": key, "v": value,
        "eps": 1e-6, **_rotation_options(rng, 64),
    }  # fmt: skip
    if rng.random() < 0.4:
        args |= {n: torch.rand(64).to(key.dtype) + 0.5 for n in ("q_weight", "k_weight")}
    if rng.random() < 0.4:
        args["out"] = torch.full(args["q"].shape, math.nan, dtype=key.dtype)

    def invoke(a: Args) -> Results:
        others = {n: value for n, value in a.items() if n not in ("cache", "k_cache", "v_cache")}
        out = quire.rope_append_paged_kv_cache(paged_kv_cache=cache_of(a), **others)
        return (out, *(a["cache"].unbind(1) if "cache" in a else (a["k_cache"], a["v_cache"])))

    def check(a: Args, results: Results) -> None:
        same_dtype(a["q"], a["k"], a["v"])
        at = positions_of(a["positions"], a["q"].shape[0])
        require(number(a["eps"]) >= 0, "a negative eps")
        check_rotated(results[0], a["q"], at, a, a.get("q_weight"))
        both = tuple(turned(a["k"], at, a, t, a.get("k_weight"), None) for t in (torch.float64, a["k"].dtype))
        check_appended(a, results[1:], (both, (a["v"], a["v"])))

    return Case(
        "rope_append_paged_kv_cache", args, invoke, check, frozenset({"cache", "k_cache", "v_cache", "out"})
    )  # fmt: skip


def check_appended(a: Args, results: Results, tokens: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Pages of keys and values with the tokens in them: what is exact, and torch's own."""
    before = a["cache"].unbind(1) if "cache" in a else (a["k_cache"], a["v_cache"])
    batch, at = integers(a["batch_indices"]), integers(a["positions"])
    indptr, indices = offsets(a["kv_indptr"]), integers(a["kv_indices"])
    require(len(batch) == len(at), "tables of other lengths")
    require(len(indices) >= indptr[-1], "page numbers that are missing")
    token = 1 if a["kv_layout"] == "NHD" else 2
    for (exact, own), old, got in zip(tokens, before, results, strict=True):
        if old.dim() == 3:
            old, got = old.unsqueeze(token), got.unsqueeze(token)
        size = old.shape[token]
        ours = [
            b if 0 <= b < len(indptr) - 1 and 0 <= i < (indptr[b + 1] - indptr[b]) * size else -1
            for b, i in zip(batch, at, strict=True)
        ]
        places = [(indices[indptr[b] + i // size], i % size) for b, i in zip(ours, at, strict=True) if b >= 0]
        require(all(0 <= page < old.shape[0] for page, _ in places), "pages that do not exist")
        tables = torch.tensor(ours), torch.tensor(at)
        want, theirs = (
            oracle.append_paged_kv_cache(x, *tables, old.to(x.dtype), indices, indptr, a["kv_layout"])
            for x in (exact, own)
        )
        got, want, theirs = got.clone(), want.double(), theirs.clone()
        for page, i in {place for place in places if places.count(place) > 1}:  # any of the tokens that go there
            for pages in (got, want, theirs):
                pages.select(0, page).select(token - 1, i).zero_()
        assert torch.equal(got.isnan(), want.isnan()), "not the tokens that were to be written"
        if got.element_size() == 1:
            _assert_rounded(got, want)
        else:
            oracle.assert_close(*(t.nan_to_num(0.0) for t in (got, want, theirs)))


def _assert_rounded(got: Tensor, want: Tensor) -> None:
    """Numbers of 8 bits are the truth, rounded and no larger than the largest of them."""
    info = torch.finfo(got.dtype)
    error = (got.double() - want.clamp(info.min, info.max)).abs().nan_to_num(0.0)
    allowed = info.eps * (want.nan_to_num(0.0).abs() + info.smallest_normal)
    assert bool((error <= allowed).all()), f"numbers of 8 bits are off by up to {float((error - allowed).max()):.3g}"


def seq_lens(rng: random.Random) -> Case:
    counts = [rng.choice((0, 1, 2, 9, 1000)) for _ in range(rng.choice((0, 1, 3)))]
    args: Args = {
        "kv_indptr": ints(oracle.indptr_of(counts), "cpu"), "page_size": rng.choice((1, 16)),
        "kv_last_page_len": ints([1] * len(counts), "cpu"),
    }  # fmt: skip

    def check(a: Args, results: Results) -> None:
        ends, last = integers(a["kv_indptr"]), integers(a["kv_last_page_len"])
        require(len(last) == len(ends) - 1, "as many last pages as requests")
        size = whole(a["page_size"])
        want = [(n - 1) * size + e if n > 0 else 0 for n, e in zip(oracle.lengths(ends), last, strict=True)]
        assert results[0].tolist() == want, f"{results[0].tolist()[:4]}, expected {want[:4]}"

    return Case("get_seq_lens", args, lambda a: (quire.get_seq_lens(**a),), check)


def batch_positions(rng: random.Random) -> Case:
    new = [rng.choice((0, 1, 5)) for _ in range(rng.choice((0, 1, 3)))]
    nnz = sum(new) + rng.choice((0, 0, 3))
    args: Args = {
        "append_indptr": ints(oracle.indptr_of(new), "cpu"), "nnz": nnz,
        "seq_lens": ints([n + rng.choice((0, 7, 1000)) for n in new], "cpu"),
    }  # fmt: skip
    if rng.random() < 0.5:
        args |= {n: torch.full((nnz,), -7, dtype=torch.int32) for n in ("batch_indices", "positions")}

    def check(a: Args, results: Results) -> None:
        ends, lens, nnz = offsets(a["append_indptr"]), integers(a["seq_lens"]), whole(a["nnz"])
        require(len(lens) == len(ends) - 1, "as many lengths as requests")
        batch, position = oracle.get_batch_indices_positions(ends, lens)
        batch, position = (x[:nnz] + [x_fill] * (nnz - len(x)) for x, x_fill in ((batch, -1), (position, 0)))
        assert results[0].tolist() == batch, f"{results[0].tolist()[:9]}, expected {batch[:9]}"
        got = [at for b, at in zip(batch, results[1].tolist(), strict=True) if b >= 0]
        assert got == [at for b, at in zip(batch, position, strict=True) if b >= 0], f"positions {got[:9]}"

    return Case(
        "get_batch_indices_positions", args, lambda a: quire.get_batch_indices_positions(**a), check,
        frozenset({"batch_indices", "positions"}),
    )  # fmt: skip


def packbits(rng: random.Random) -> Case:
    args: Args = {"x": torch.rand(rng.choice((0, 1, 8, 9, 100, 5000))) < 0.5, "bitorder": rng.choice(("big", "little"))}
    if rng.random() < 0.3:
        args["x"] = args["x"].to(torch.uint8) * 3

    def check(a: Args, results: Results) -> None:
        require(a["x"].dim() == 1 and a["bitorder"] in ("big", "little"), "no bits")
        assert torch.equal(results[0], oracle.packbits(a["x"], a["bitorder"]))

    return Case("packbits", args, lambda a: (quire.packbits(**a),), check)


def segment_packbits(rng: random.Random) -> Case:
    counts = [rng.choice((0, 1, 8, 13)) for _ in range(rng.choice((0, 1, 4)))]
    args: Args = {
        "x": torch.rand(sum(counts) + rng.choice((0, 2))) < 0.5, "indptr": ints(oracle.indptr_of(counts), "cpu"),
        "bitorder": rng.choice(("big", "little")),
    }  # fmt: skip

    def check(a: Args, results: Results) -> None:
        ends = offsets(a["indptr"])
        require(a["x"].dim() == 1 and ends[-1] <= a["x"].shape[0], "segments beyond the bits")
        packed, indptr = oracle.segment_packbits(a["x"], ends, a["bitorder"])
        assert torch.equal(results[0], packed) and results[1].tolist() == indptr

    return Case("segment_packbits", args, lambda a: quire.segment_packbits(**a), check)


GENERATORS: tuple[Callable[[random.Random], Case], ...] = (
    single_prefill, single_decode, ragged, paged, paged, decode, decode, graph_decode, xqa, cudnn_decode,
    cudnn_prefill, cascade, decode_shared,
    prefill_shared, padded, merge_state, merge_state_in_place, merge_states, append, append, rope, rope,
    rope_requests, rope_table, rope_append, rope_append, seq_lens, batch_positions,
    packbits, segment_packbits,
)  # fmt: skip
