"""Attention over the ranks of a torch.distributed process group: NCCL for GPUs, gloo for CPUs.

    ContextParallelDecode   decode with the cached tokens distributed over ranks (vLLM's decode context parallel)
    merge_over_ranks        its exchange and merge, for results of any wrapper, including MLA
    ZigzagPrefill           causal prefill with the tokens distributed so that all ranks have equal work
    RingAttention           attention of tokens that are distributed in any way, under windows and custom variants
    Ulysses                 exchanges tokens per rank for heads per rank, and back
    MeshAttention           both, along the dimensions of a torch DeviceMesh

Every rank of the group makes the same calls in the same order, as with any collective. A group may
have any size, also 1, and its ranks may be on several hosts. docs/tutorial/ranks.md has examples.
"""

from __future__ import annotations

from quire.distributed.decode import ContextParallelDecode, Interleave, merge_over_ranks
from quire.distributed.prefill import MeshAttention, Ulysses, Zigzag, ZigzagPrefill
from quire.distributed.ring import InOrder, RingAttention

__all__ = [
    "ContextParallelDecode", "InOrder", "Interleave", "MeshAttention", "RingAttention", "Ulysses", "Zigzag",
    "ZigzagPrefill", "merge_over_ranks",
]  # fmt: skip
