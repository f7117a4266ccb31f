"""FlashInfer's flashinfer.parallel_attention: Ulysses and rings, of sequences that are padded or packed.

The API is that of https://github.com/flashinfer-ai/flashinfer (flashinfer/parallel_attention). Unlike there, attention
may be causal. quire.distributed.MeshAttention computes it, which has no need of padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from quire.compat.context_parallel import Counts, Mesh, refuse_masks, sizes_of
from quire.engine.checks import check_flags
from quire.errors import UnsupportedError, ValidationError, teach

__all__ = [
    "ParallelAttention", "UnevenCPConfig", "VarlenCPConfig", "get_parallel_groups", "ring_varlen_config",
    "split_varlen_input", "ulysses_varlen_config", "uneven_cp_config",
]  # fmt: skip


@dataclass
class UnevenCPConfig:
    """A sequence of seq_len tokens that was padded to seq_len_padded, which the number of ranks divides. Rank r has the
    r-th part, whose padding is left out. seq_len_cur_ring_group: what uneven_cp_config() returns; redundant.
    """

    seq_len: int | None = None
    seq_len_padded: int | None = None
    seq_len_cur_ring_group: torch.Tensor | None = None

    def reset(self) -> None:
        """As it was made."""
        self.__init__()  # type: ignore[misc]


@dataclass
class VarlenCPConfig:
    """Packed sequences. With Ulysses a rank has consecutive tokens of all of them; in a ring, a part of each one."""

    cu_seqlens_q_cur_ulysses_group: torch.Tensor | None = None
    cu_seqlens_kv_cur_ulysses_group: torch.Tensor | None = None
    max_seq_len_q_cur_ulysses_group: int | None = None
    max_seq_len_kv_cur_ulysses_group: int | None = None
    cu_seqlens_q_cur_ring_group: torch.Tensor | None = None
    cu_seqlens_kv_cur_ring_group: torch.Tensor | None = None
    max_seq_len_q_cur_ring_group: int | None = None
    max_seq_len_kv_cur_ring_group: int | None = None

    def set_varlen_cp_config(
        self, cu_seqlens_q_all_ranks: torch.Tensor, cu_seqlens_kv_all_ranks: torch.Tensor, max_seq_len_q: int,
        max_seq_len_kv: int, ulysses_group: Any, ring_group: Any,
    ) -> None:  # fmt: skip
        """Takes what ulysses_varlen_config() or ring_varlen_config() returned."""
        ring, ulysses = Mesh(ring_group, ulysses_group, "ring").sizes
        if ring > 1 and ulysses > 1:
            raise UnsupportedError(
                "ring_group: expected None beside a group of Ulysses for packed sequences, as in FlashInfer; use "
                "quire.distributed.MeshAttention."
            )
        kind = "ulysses" if ring == 1 else "ring"
        values = cu_seqlens_q_all_ranks, cu_seqlens_kv_all_ranks, max_seq_len_q, max_seq_len_kv
        names = "cu_seqlens_q", "cu_seqlens_kv", "max_seq_len_q", "max_seq_len_kv"
        for name, given in zip(names, values, strict=True):
            setattr(self, f"{name}_cur_{kind}_group", given)

    def reset(self) -> None:
        """As it was made."""
        self.__init__()  # type: ignore[misc]

    def counts(self, name: str, size: int, own: int) -> Counts | None:
        """Of the queries ("q") or keys ("kv"), which tokens of each sequence each rank has; None: nothing was set.

        own: tokens of each rank, with padding.
        """
        ends = getattr(self, f"cu_seqlens_{name}_cur_ring_group")
        if ends is not None:
            return tuple(map(tuple, ends.cpu().diff().t().tolist()))
        ends = getattr(self, f"cu_seqlens_{name}_cur_ulysses_group")
        if ends is None:
            return None
        cuts, begins = torch.arange(size + 1, device="cpu") * own, ends.cpu()[:, None].clamp(min=0)
        _check_padded(own, size, int(begins[-1]), f"cu_seqlens_{name}_cur_ulysses_group")
        inside = torch.minimum(cuts[None], begins[1:]).maximum(begins[:-1]) - begins[:-1]
        return tuple(map(tuple, inside.diff().tolist()))


class ParallelAttention:
    """FlashInfer's flashinfer.parallel_attention.ParallelAttention: attention under Ulysses, a ring or both.

    attn_type: a name of FlashInfer's; one implementation computes all. ulysses_group, ring_group: process groups, or
    None. uneven_cp_config, varlen_cp_config: of sequences that were padded, or packed. fuse_qkv: permits what is always
    done: one message for q, k and v.
    """

    def __init__(
        self, attn_type: str, ulysses_group: Any, ring_group: Any, uneven_cp_config: UnevenCPConfig | None = None,
        varlen_cp_config: VarlenCPConfig | None = None, fuse_qkv: bool = False,
    ) -> None:  # fmt: skip
        if attn_type not in ("flash-attn3", "cutlass"):
            raise ValidationError(f"attn_type: expected 'flash-attn3' or 'cutlass', got {attn_type!r}.")
        check_flags(fuse_qkv=fuse_qkv)
        self._mesh = Mesh(ring_group, ulysses_group, "ring")
        self._uneven, self._varlen = uneven_cp_config or UnevenCPConfig(), varlen_cp_config or VarlenCPConfig()

    def run(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tensor_layout: str,
        attn_mask: torch.Tensor | None = None, is_causal: bool = False, return_lse: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of this rank's query [heads, tokens, head_dim] ("HND") or [tokens, heads, head_dim] ("NHD") to the
        keys of all ranks; padding of the result is 0. is_causal: of whole sequences, which FlashInfer refuses.

        Raises ValidationError or UnsupportedError naming the argument.
        """
        if tensor_layout not in ("HND", "NHD"):
            raise ValidationError(f"tensor_layout: expected 'HND' or 'NHD', got {tensor_layout!r}.")
        check_flags(is_causal=is_causal, return_lse=return_lse)
        refuse_masks(attn_mask, 0.0)
        if return_lse:
            raise UnsupportedError("return_lse: expected False, as in FlashInfer; use quire.distributed.MeshAttention.")
        tensors = query, key, value
        q, k, v = tensors if tensor_layout == "NHD" else (x.transpose(0, 1) for x in tensors)
        half = q.dtype if q.dtype.itemsize == 2 or not q.is_cuda else torch.float16  # as FlashInfer does
        padded = len(q)
        counts, kv_counts = self._counts("q", padded), self._counts("kv", len(k))
        rows, keys = (sum(each[self._mesh.rank] for each in found) for found in (counts, kv_counts))
        q, k, v = q[:rows].to(half), k[:keys].to(half), v[:keys].to(half)
        o, _ = self._mesh.attend(q, k, v, counts, kv_counts, causal=is_causal)
        found = functional.pad(o.to(query.dtype), (0, 0, 0, 0, 0, padded - rows))
        return found if tensor_layout == "NHD" else found.transpose(0, 1)

    def _counts(self, name: str, own: int) -> Counts:
        """The tokens of each sequence on each rank; own: of this rank, with padding."""
        ring, ulysses = self._mesh.sizes
        size = ring * ulysses
        packed = self._varlen.counts(name, size, own)
        if packed is not None:
            return packed
        total = self._uneven.seq_len
        if total is None:
            return ((own,) * size,)
        _check_padded(own, size, total, "seq_len")
        return (tuple(min(own, max(0, total - rank * own)) for rank in range(size)),)


def _check_padded(own: int, size: int, total: int, name: str) -> None:
    if own * size < total:
        raise ValidationError(f"{name}: expected at most {size} ranks * {own} tokens of this one, got {total}.")


def get_parallel_groups(ulysses_size: int, ring_size: int, device_type: str = "cuda") -> tuple[Any, Any]:
    """The groups of the ring and of Ulysses, of a mesh of all processes; None for a size of 1."""
    size = dist.get_world_size()
    if size % (ulysses_size * ring_size):
        raise ValidationError(
            f"ulysses_size, ring_size: expected a product that divides {size} processes, got {ulysses_size} and "
            f"{ring_size}."
        )
    names = "redundant", "ring", "ulysses"
    shape = size // (ulysses_size * ring_size), ring_size, ulysses_size
    mesh = dist.device_mesh.init_device_mesh(device_type, shape, mesh_dim_names=names)
    ring, ulysses = (mesh.get_group(name) if mesh[name].size() > 1 else None for name in names[1:])
    return ring, ulysses


def uneven_cp_config(
    seq_len: int, seq_len_padded: int, seq_len_cur_rank: int, ulysses_group: Any = None, ring_group: Any = None
) -> torch.Tensor | None:
    """The tokens of each rank of the ring, int32 [ring]; None without a ring. A collective of all groups."""
    if seq_len > seq_len_padded:
        raise ValidationError(f"seq_len: expected at most seq_len_padded={seq_len_padded}, got {seq_len}.")
    if ring_group is None:
        return None
    nccl = dist.get_backend(ring_group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    own = seq_len_cur_rank if ulysses_group is None else sum(sizes_of(seq_len_cur_rank, ulysses_group, device))
    return torch.tensor(sizes_of(own, ring_group, device), dtype=torch.int32, device="cpu")


def ulysses_varlen_config(
    seq_lens_q: Sequence[int], seq_lens_kv: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Offsets of packed queries and keys, int32 [sequences + 1], and the longest lengths."""
    lens = [torch.as_tensor(each, dtype=torch.int32, device="cpu") for each in (seq_lens_q, seq_lens_kv)]
    queries, keys = (functional.pad(each.cumsum(0), (1, 0)).int() for each in lens)
    return queries, keys, int(lens[0].max()), int(lens[1].max())


def ring_varlen_config(
    seq_lens_q: Sequence[int], seq_lens_kv: Sequence[int], ring_group: Any
) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Offsets of each rank's parts of the sequences, int32 [ring, sequences + 1], and the longest parts."""
    size = 1 if ring_group is None else dist.get_world_size(ring_group)
    found = []
    for lens in (seq_lens_q, seq_lens_kv):
        parts = torch.tensor([[_span(int(n), size, rank)[1] for n in lens] for rank in range(size)], device="cpu")
        found.append((functional.pad(parts.cumsum(1), (1, 0)).int(), int(parts.max())))
    (queries, longest), (keys, longest_keys) = found
    return queries, keys, longest, longest_keys


def _span(length: int, size: int, rank: int) -> tuple[int, int]:
    """Where a rank's part of a sequence begins, and its length: all ranks but the last ones have the same."""
    part = -(-length // size)
    begin = min(length, part * rank)
    return begin, min(part, length - begin)


def split_varlen_input(
    tensor: torch.Tensor, seq_len_list: Sequence[int], world_size: int, rank: int, tensor_layout: str = "HND"
) -> torch.Tensor:
    """A rank's part of each of the packed sequences, padded with zeros so that all ranks have as many tokens."""
    dim = {"NHD": 0, "HND": 1}.get(tensor_layout)
    if dim is None:
        raise ValidationError(f"tensor_layout: expected 'HND' or 'NHD', got {tensor_layout!r}.")
    lens = [int(n) for n in seq_len_list]
    first, parts = 0, []
    for n in lens:
        begin, length = _span(n, world_size, rank)
        parts.append(tensor.narrow(dim, first + begin, length))
        first += n
    found = torch.cat(parts, dim)
    missing = sum(_span(n, world_size, 0)[1] for n in lens) - found.shape[dim]
    return functional.pad(found, (0, 0) * (2 - dim) + (0, missing))


teach(globals(), __all__)
