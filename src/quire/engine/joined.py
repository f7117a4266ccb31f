"""Several batches in one launch: the levels of a cascade, prefixes that requests share, prefill beside decode (POD).

Prefill is limited by the tensor cores, decode by memory bandwidth, which two thirds of a GPU's SMs use up wherever
its CTAs are placed. If they run one after the other, each leaves idle what the other needs. In one launch the decodes
get these SMs, and the prefill the others; SMs that have no more decodes go on with the prefill (kernels/pod.cuh).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import pairwise
from threading import Lock
from typing import NamedTuple, TypeVar

import torch
from torch.autograd import profiler

from quire.engine.attention import Attention
from quire.engine.batch import runs_from
from quire.engine.checks import check_tensor
from quire.engine.device import OwnWorkspace, max_ctas, on_cuda, target_of
from quire.engine.launch import base_of, bind, profiled
from quire.engine.planner import load
from quire.engine.schedule import Indices
from quire.engine.spec import AttentionSpec
from quire.errors import UnsupportedError, ValidationError
from quire.jit import is_obtainable
from quire.kernels import PIN, PodKey, pod_reason
from quire.kernels.features import KVLayout, MaskMode
from quire.kernels.params import PodParams, aligned_copy


def check_kernel_for_levels(device: torch.device, backend: str) -> None:
    """UnsupportedError on GPUs before Hopper, where a launch per level is as fast, unless `backend` forces a kernel."""
    if on_cuda(device) and target_of(device) != "sm90a" and not str(backend).startswith(PIN):
        raise UnsupportedError(
            f"on {target_of(device)} a kernel that merges levels of shared keys has to be pinned, such as "
            f"backend='quire:fa2': a launch a level is as fast."
        )


def join_levels(levels: Sequence[AttentionSpec]) -> AttentionSpec:
    """Joins specs of the same queries over consecutive keys into one; the keys of the last level belong to one request
    each.

    Raises UnsupportedError if one launch is impossible, and ValidationError for some errors in the index arrays of a
    level; the scheduler finds the others.
    """
    parts = [_of_level(level.indices) for level in levels]
    if len({part.nnz_qo for part in parts}) > 1 or not parts[0].nnz_qo:
        raise UnsupportedError(f"levels have {[part.nnz_qo for part in parts]} queries: expected as many, and some.")
    own, devices = parts[-1], {part.pages.device for part in parts}
    device = next((device for device in devices if device.type != "cpu"), parts[-1].pages.device)
    starts = torch.tensor([0, *(part.pages.numel() for part in parts)], dtype=torch.int32, device="cpu").cumsum(0)
    offsets = [part.kv_indptr + start for part, start in zip(parts, starts, strict=False)]
    kv_indptr = torch.cat([*(offset[:-1] for offset in offsets), offsets[-1][-1:]]).to(torch.int32)
    if kv_indptr.numel() > 2**31 - 1 or int(starts[-1]) > 2**31 - 1:
        raise UnsupportedError("levels have more than 2**31 - 1 pages together")
    indices = Indices(
        kv_indptr.numel() - 1, torch.cat([part.rows for part in parts]), 0, kv_indptr,
        torch.cat([part.last_page_len for part in parts]), torch.cat([part.pages.to(device) for part in parts]),
        own.page_size, num_shared_nodes=kv_indptr.numel() - 1 - own.batch_size,
    )  # fmt: skip
    options = levels[-1].options
    causal = options.causal and own.most_rows > 1  # one query sees all of its keys
    return AttentionSpec(indices, options._replace(cascade=True, causal=causal))


def flat_levels(levels: Sequence[AttentionSpec]) -> AttentionSpec:
    """The batch of the last level, whose requests have all of their keys: those of the nodes of earlier levels above
    them, and their own. Bits are then those of attention without levels.

    Raises UnsupportedError if pages of shared levels are not full, or if a request is under several nodes of a level.
    """
    parts = [_of_level(level.indices) for level in levels]
    own, options, pages_before = parts[-1], levels[-1].options, 0
    begin, end = own.rows.view(-1, 2).t().contiguous()
    counts, firsts = [], []  # of each level: pages that are above each request, and the first of them
    for i, part in enumerate(parts):
        node = torch.arange(own.batch_size, device="cpu") if part is own else _nodes_above(part, begin, end, i)
        counts.append(part.kv_indptr.diff()[node].long())
        firsts.append(part.kv_indptr[node] + pages_before)
        pages_before += part.pages.numel()
        if part is not own and bool(((counts[i] > 0) & (part.last_page_len[node] != own.page_size)).any()):
            raise UnsupportedError(f"level {i}: expected last pages of {own.page_size} tokens, as {_FLAT}.")
    own_lens = torch.where(counts[-1] > 0, (counts[-1] - 1) * own.page_size + own.last_page_len, 0)
    if options.causal and bool((own_lens < end - begin - 1).any()):
        raise UnsupportedError(f"level {len(parts) - 1}: expected as many keys as queries, as {_FLAT}.")
    lens, starts, all_pages = torch.stack(counts, 1), torch.stack(firsts, 1).flatten(), torch.stack(counts).sum(0)
    last = torch.where(counts[-1] > 0, own.last_page_len, own.page_size * (all_pages > 0))
    device = next((part.pages.device for part in parts if not part.pages.is_cpu), own.pages.device)
    places = runs_from(starts, lens.flatten())
    pages = torch.cat([part.pages.to(device) for part in parts])[places.to(device)]
    kv_indptr = torch.cat((all_pages.new_zeros(1), all_pages.cumsum(0))).int()
    qo_indptr = torch.cat((begin[:1], end))
    return AttentionSpec(Indices(own.batch_size, qo_indptr, 0, kv_indptr, last.int(), pages, own.page_size), options)


def _nodes_above(level: _Level, begin: torch.Tensor, end: torch.Tensor, number: int) -> torch.Tensor:
    """The node of a level that has rows [begin, end) of each request."""
    first, last = level.rows.view(-1, 2).t().contiguous()
    node = torch.searchsorted(last, begin, right=True).clamp_(max=level.batch_size - 1)
    if bool(((end > begin) & ((first[node] > begin) | (last[node] < end))).any()):
        raise UnsupportedError(f"level {number}: expected the queries of each request under one node, as {_FLAT}.")
    return node


_FLAT = "a deterministic cascade is one attention over all keys of a request"


def check_kernel_for_prefix(spec: AttentionSpec, device: torch.device, backend: str) -> AttentionSpec:
    """`spec` of with_prefix(). UnsupportedError if no kernel takes it, or if its variant is not in a cache and cannot
    be compiled; the variants for two launches may be in the cache.
    """
    check_kernel_for_levels(device, backend)
    variant = spec.decide(device, backend).spec
    if not is_obtainable(variant):
        raise UnsupportedError(f"{variant.slug} is in no cache, and nothing compiles it here.")
    return spec


def with_prefix(own: AttentionSpec, rows: torch.Tensor, prefix_indptr: torch.Tensor) -> AttentionSpec:
    """The batch of `own`, whose rows also attend to a prefix in separate tensors.

    rows: int32 [count, 2], flat: the begin and the end of the rows of q that attend to rows prefix_indptr[i] to
    prefix_indptr[i + 1] of the prefix tensors. Both arrays are on the host.
    """
    indices, options, count = own.indices, own.options, prefix_indptr.numel() - 1
    assert isinstance(indices, Indices)
    qo_indptr, first = _qo_indptr(indices), indices.kv_indptr[:1]
    none = torch.zeros(count, dtype=torch.int32, device="cpu")
    last = indices.kv_last_page_len
    nodes = indices._replace(
        batch_size=count + indices.batch_size, qo_len=0,
        qo_indptr=torch.cat((rows, torch.stack((qo_indptr[:-1], qo_indptr[1:]), 1).view(-1))),
        kv_indptr=torch.cat((first.expand(count), indices.kv_indptr)), seq_lens=None, num_shared_nodes=count,
        kv_last_page_len=None if last is None else torch.cat((none, last)), prefix_indptr=prefix_indptr,
    )  # fmt: skip
    causal = options.causal and int(qo_indptr.diff().max()) > 1  # one query sees all of its keys
    return own._replace(indices=nodes, options=options._replace(cascade=True, prefix=True, causal=causal))


def _qo_indptr(indices: Indices) -> torch.Tensor:
    if indices.qo_indptr is not None:
        return indices.qo_indptr
    return torch.arange(indices.batch_size + 1, dtype=torch.int32, device="cpu") * indices.qo_len


class _Level:
    """The nodes of one level."""

    def __init__(self, indices: Indices) -> None:
        qo_indptr, kv_indptr, last = indices.qo_indptr, indices.kv_indptr, indices.kv_last_page_len
        assert qo_indptr is not None and last is not None and indices.kv_indices is not None
        if not indices.batch_size or int(qo_indptr[0]):
            raise ValidationError("qo_indptr: expected to begin with 0, and a node in each level.")
        self.batch_size, self.page_size, self.last_page_len = indices.batch_size, indices.page_size, last
        lens = qo_indptr.diff()
        if int(lens.min()) < 0:
            raise ValidationError("qo_indptr: expected to ascend.")
        self.nnz_qo, self.most_rows = int(qo_indptr[-1]), int(lens.max())
        self.rows = torch.stack((qo_indptr[:-1], qo_indptr[1:]), 1).view(-1)
        begin, end = int(kv_indptr[0]), int(kv_indptr[-1])
        if not 0 <= begin <= end <= indices.kv_indices.numel():
            raise ValidationError("paged_kv_indptr: expected offsets into paged_kv_indices.")
        self.kv_indptr, self.pages = kv_indptr - begin, indices.kv_indices[begin:end]


def _of_level(indices: object) -> _Level:
    assert isinstance(indices, Indices)
    return _Level(indices)


#: What a cascade costs beside the keys that it reads, in bytes that a GPU would read meanwhile.
_START_BYTES = 48 << 20
#: Rows over which the products with a key take as long as reading it.
_ROWS_PER_READ = 128
#: How much longer a cascade takes than its keys say.
_SLOWDOWN = 1.5


class _SharedPrefix(NamedTuple):
    """Neighbouring requests [begin, end) that begin with the same `pages` pages."""

    begin: int
    end: int
    pages: int


def with_shared_prefixes(spec: AttentionSpec) -> AttentionSpec | None:
    """`spec` of a decode as a cascade over the prefixes that neighbouring requests share; None if there are none, or if
    a cascade is estimated not to be faster. The index arrays are on the host.

    Raises no errors: those in the arrays are reported when the batch is planned without a cascade.
    """
    indices = spec.indices
    assert isinstance(indices, Indices) and indices.kv_indices is not None
    if not indices.kv_indices.is_cpu or indices.batch_size < 2:
        return None
    begins, pages = indices.kv_indptr, indices.kv_indices
    if int(begins[0]) < 0 or int(begins[-1]) > pages.numel() or not _begin_alike(begins, pages):
        return None
    lens = begins.diff()
    if int(lens.min()) < 0 or spec.options.fixed_split_size or _is_wrong(indices, lens):
        return None
    runs = _prefixes(begins, lens, pages, own=1 + (indices.qo_len - 1 + indices.page_size - 1) // indices.page_size)
    if not runs or not _is_faster(spec, lens, runs):
        return None
    return spec._replace(
        indices=_joined(indices, lens, runs), options=spec.options._replace(cascade=True, causal=indices.qo_len > 1)
    )


def _begin_alike(begins: torch.Tensor, pages: torch.Tensor) -> bool:
    """Whether any two neighbours have the same first page: a quick check, which most batches fail."""
    if not pages.numel():
        return False
    first = _first_pages(begins, pages)
    return bool((first[1:] == first[:-1]).any())


def _first_pages(begins: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    return pages.index_select(0, begins[:-1].clamp(0, pages.numel() - 1))


def _is_wrong(indices: Indices, lens: torch.Tensor) -> bool:
    """Whether the arrays are inconsistent, which the scheduler will report."""
    last = indices.kv_last_page_len
    assert last is not None
    if bool(((last < (lens > 0)) | (last > indices.page_size)).any()):
        return True
    kv_lens = torch.where(lens > 0, (lens - 1) * indices.page_size + last, 0)
    return indices.seq_lens is not None and not torch.equal(indices.seq_lens, kv_lens.to(torch.int32))


def _prefixes(begins: torch.Tensor, lens: torch.Tensor, pages: torch.Tensor, own: int) -> list[_SharedPrefix]:
    """All runs of two requests and more. Each request keeps its last `own` pages for itself."""
    sharable = (lens - own).clamp(0)
    alone = -1 - torch.arange(lens.numel(), device="cpu")  # no page of a request that has none to share
    first = torch.where(sharable > 0, _first_pages(begins, pages), alone)
    edges = [0, *((first[1:] != first[:-1]).nonzero().view(-1) + 1).tolist(), lens.numel()]
    runs = []
    for begin, end in pairwise(edges):
        if end - begin > 1:
            most = int(sharable[begin:end].min())
            table = pages[begins[begin:end, None] + torch.arange(most, device="cpu")]
            differs = (table != table[0]).any(0).nonzero()
            runs.append(_SharedPrefix(begin, end, int(differs[0]) if differs.numel() else most))
    return runs


def _is_faster(spec: AttentionSpec, lens: torch.Tensor, runs: list[_SharedPrefix]) -> bool:
    """Whether a cascade saves enough reads of keys and values to be faster."""
    options, indices = spec.options, spec.indices
    page_bytes = options.page_size * (options.head_dim_qk + options.head_dim_vo) * options.types.kv.bits // 8
    page_bytes *= options.num_kv_heads
    rows = indices.qo_len * options.group_size
    plain = int(lens.sum())
    own = plain - sum(run.pages * (run.end - run.begin) for run in runs)
    shared = sum(run.pages * max(1.0, (run.end - run.begin) * rows / _ROWS_PER_READ) for run in runs)
    return (own + shared) * page_bytes * _SLOWDOWN + _START_BYTES < plain * page_bytes


def _joined(indices: Indices, lens: torch.Tensor, runs: list[_SharedPrefix]) -> Indices:
    """The nodes of the runs, followed by the requests with their own pages."""
    begins, pages, last = indices.kv_indptr, indices.kv_indices, indices.kv_last_page_len
    assert pages is not None and last is not None
    numbers, shared = pages[int(begins[0]) : int(begins[-1])], torch.zeros_like(lens)
    for run in runs:
        shared[run.begin : run.end] = run.pages
    place = torch.arange(numbers.numel(), device="cpu") - (begins[:-1] - begins[0]).repeat_interleave(lens)
    of_runs = [pages[int(begins[run.begin]) :][: run.pages] for run in runs]
    requests = torch.arange(lens.numel(), dtype=torch.int32, device="cpu")
    rows = torch.cat((_int32([run[:2] for run in runs]), torch.stack((requests, requests + 1), 1)))
    kv_lens = torch.cat((_int32([run.pages for run in runs]), lens - shared))
    return indices._replace(
        batch_size=len(runs) + lens.numel(), qo_indptr=(rows * indices.qo_len).view(-1),
        kv_indptr=torch.cat((_int32([0]), kv_lens.cumsum(0))).to(torch.int32),
        kv_last_page_len=torch.cat((last.new_full((len(runs),), indices.page_size), last)),
        kv_indices=torch.cat((*of_runs, numbers[place >= shared.repeat_interleave(lens)])),
        seq_lens=None, num_shared_nodes=len(runs),
    )  # fmt: skip


def _int32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cpu")


_First = TypeVar("_First")
_Second = TypeVar("_Second")

#: Products a microsecond of one SM of a Hopper GPU, and bytes a microsecond of its memory.
_FLOPS_OF_SM, _BYTES_OF_MEMORY = 4.8e6, 4.1e6
#: Of shorter work the other hides too little, in microseconds.
_LEAST_US = 20.0


class Work(NamedTuple):
    """The work of a launch."""

    flops: float  #: of both matrix products
    bytes: float  #: of keys and values, each read once

    @classmethod
    def of(cls, spec: AttentionSpec) -> Work:
        """The work of a batch whose lengths the host knows; masks other than causal are ignored."""
        indices, options = spec.indices, spec.options
        assert isinstance(indices, Indices)
        qo, kv = indices.qo_lens().double(), indices.kv_lens().double()
        hidden = (qo - 1) / 2 if spec.mask is MaskMode.CAUSAL else 0.0
        pairs, dims = float((qo * (kv - hidden).clamp(0)).sum()), options.head_dim_qk + options.head_dim_vo
        tokens = float(kv.sum()) * options.num_kv_heads
        return cls(2.0 * pairs * dims * options.num_qo_heads, tokens * dims * options.types.kv.bits / 8)


def sms_of_decode(prefill: Work, decode: Work, device: torch.device) -> int:
    """SMs for decodes beside a prefill; 0: one after the other is as fast, or the GPU is unknown."""
    if not on_cuda(device) or target_of(device) != "sm90a":
        return 0
    sms = max_ctas(device, 1)
    return 0 if min(_computing(prefill, sms), _reading(decode)) < _LEAST_US else sms * 2 // 3


def _computing(prefill: Work, sms: int) -> float:
    return prefill.flops / _FLOPS_OF_SM / sms


def _reading(decode: Work) -> float:
    return decode.bytes / _BYTES_OF_MEMORY


class FusedPod:
    """One launch of a planned prefill and of planned decodes."""

    @classmethod
    def of(cls, spec: AttentionSpec, layout: KVLayout, decodes: Attention) -> FusedPod | None:
        """One launch of the prefill `spec` and of `decodes`; None if one after the other is as fast."""
        device = decodes.device
        if decodes.spec.options.cascade or decodes.spec.options.deterministic or spec.settled().options.deterministic:
            return None
        work, decode_work = Work.of(spec), Work.of(decodes.spec)
        if not (sms := sms_of_decode(work, decode_work, device)):
            return None
        others = max_ctas(device, 1) - sms
        spec = spec._replace(options=spec.options._replace(sms=others))
        prefill = Attention(spec, layout, OwnWorkspace(device), "auto")
        keys = prefill.decision.key, decodes.decision.key
        if pod_reason(*keys) is not None or not is_obtainable(PodKey(*keys).spec()):
            return None
        alone = _computing(work, sms + others) + _reading(decode_work)
        if base_of(prefill.plan.params).partitions is not None and _computing(work, others) > alone:
            return None  # its partitions belong to a third of the SMs
        return cls(prefill, decodes, sms)

    def __init__(self, prefill: Attention, decodes: Attention, sms: int) -> None:
        """`sms`: of decodes, at most."""
        self.prefill, self._decodes, self._lock = prefill, decodes, Lock()
        self._params, device = aligned_copy(PodParams()), decodes.device
        self._module, _ = load(PodKey(prefill.decision.key, decodes.decision.key).spec(), device)
        theirs, mine = base_of(decodes.plan.params), base_of(prefill.plan.params)
        self._params.num_decode_ctas = ctas = min(sms, -(-theirs.num_ctas // self._module.exports["kDecoding"]))
        self._params.decode_counter = decodes.plan.tile_counter
        grid = max_ctas(device, 1) if mine.partitions is None else ctas + mine.num_ctas
        self._launch = bind(self._module, ctypes.addressof(self._params), device, grid, pdl=False)
        note = f"one launch with the decodes: {ctas} CTAs decode first, {grid - ctas} compute prefills at once"
        prefill.plan.note = "; ".join(filter(None, (prefill.plan.note, note)))

    def takes(self, q: torch.Tensor, q_d: torch.Tensor) -> bool:
        """Whether these queries have the heads that were planned: a layer of fewer heads has plans of its own."""
        given = ((q, self.prefill), (q_d, self._decodes))
        return all(check_tensor(t, "q").shape[1:2] == (plan.spec.options.num_qo_heads,) for t, plan in given)

    def run(self, prefill: Callable[[], _First], decode: Callable[[], _Second]) -> tuple[_First, _Second]:
        """The results of prefill() and decode(), which call run() of the two plans."""
        plans = self.prefill.plan, self._decodes.plan
        with self._lock, plans[0].launched_by(lambda _: None), plans[1].launched_by(self._start):
            return prefill(), decode()

    def _start(self, stream: int) -> None:
        self._params.prefill, self._params.decode = self.prefill.plan.params, self._decodes.plan.params
        if profiler._is_profiler_enabled:
            profiled(self._module, self._launch, stream)
        else:
            self._launch(stream)
