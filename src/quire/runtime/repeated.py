"""Redundant arguments of plan(), which kernels of other libraries need: they must agree with the index arrays."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from quire.errors import ValidationError
from quire.runtime.checks import check_positive, check_shape, check_tensor, host_indices, to_int32
from quire.runtime.schedule import Indices


def host_lens(seq_lens: Any, batch_size: int) -> torch.Tensor | None:
    """seq_lens [batch_size] for the scheduler, which compares them; None if they are on a device, because plan() does
    not wait for it.
    """
    seq_lens = _flat(seq_lens, "seq_lens", batch_size)
    if not seq_lens.is_cpu:
        return None
    lens = seq_lens.view(torch.int32) if seq_lens.dtype is torch.uint32 else seq_lens
    return host_indices(lens, "seq_lens", batch_size)


def _flat(lens: Any, name: str, batch_size: int) -> torch.Tensor:
    """Lengths as [batch_size]; cuDNN's [batch_size, 1, 1, 1] are accepted, too."""
    tensor = check_tensor(lens, name)
    if tuple(tensor.shape) == (batch_size, 1, 1, 1):
        return tensor.reshape(batch_size)
    check_shape(tensor, name, {"batch_size": batch_size})
    return tensor


def check_repeated(
    indices: Indices, seq_lens_q: Any = None, block_tables: Any = None, max_token_per_sequence: Any = None,
    max_sequence_kv: Any = None,
) -> None:  # fmt: skip
    """Compare the given arrays with `indices`, if both are on the host."""
    qo_lens = torch.tensor([indices.qo_len], device="cpu") if indices.qo_indptr is None else indices.qo_indptr.diff()
    if seq_lens_q is not None:
        seq_lens_q = _flat(seq_lens_q, "seq_lens_q", indices.batch_size)
        if seq_lens_q.is_cpu and not torch.equal(to_int32(seq_lens_q, "seq_lens_q"), qo_lens):
            got = seq_lens_q.tolist()
            raise ValidationError(f"seq_lens_q: expected {qo_lens.tolist()}, as qo_indptr says, got {got}.")
    _check_most("max_token_per_sequence", max_token_per_sequence, qo_lens, 0)
    size = indices.page_size
    _check_most("max_sequence_kv", max_sequence_kv, indices.kv_indptr.diff() * size, size - 1)
    if block_tables is not None:
        _check_tables(indices, block_tables)


def _check_most(name: str, given: Any, lens: torch.Tensor, spare: int) -> None:
    """Check that `given` is not less than any of `lens`, each of which may be up to `spare` too large."""
    least = int(lens.max()) - spare if lens.numel() else 0
    if given is not None and check_positive(given, name) < least:
        raise ValidationError(f"{name}: expected at least {least}, which a request has, got {given}.")


def _check_tables(indices: Indices, block_tables: Any) -> None:
    tables = to_int32(check_tensor(block_tables, "block_tables"), "block_tables")
    check_shape(tables, "block_tables", {"batch_size": indices.batch_size, "pages": None})
    pages = indices.kv_indices
    if pages is None or not (pages.is_cpu and tables.is_cpu):
        return
    for request, (begin, end) in enumerate(pairwise(indices.kv_indptr.tolist())):
        if not torch.equal(tables[request, : end - begin], pages[begin:end]):
            got = tables[request].tolist()
            raise ValidationError(
                f"block_tables: expected request {request} to begin with {pages[begin:end].tolist()}, as the page "
                f"numbers say, got {got}."
            )
