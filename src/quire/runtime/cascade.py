"""Joins levels of shared keys to one batch, whose requests are the nodes of a tree."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.errors import UnsupportedError, ValidationError
from quire.jit import is_obtainable
from quire.kernels import PIN
from quire.runtime.attention import AttentionSpec
from quire.runtime.schedule import Indices
from quire.runtime.target import on_cuda, target_of


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
