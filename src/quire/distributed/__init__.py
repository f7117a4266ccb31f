"""Attention over the ranks of a torch.distributed process group: NCCL between GPUs, gloo between hosts' processors.

    ContextParallelDecode   decode whose cached tokens are spread over ranks (vLLM's decode context parallel)
    merge_over_ranks        the merge behind it, for results of any wrapper, those of MLA too
    ZigzagPrefill           causal prefill whose tokens are spread over ranks, evenly in work
    Ulysses                 tokens spread over ranks become heads spread over ranks, and back

Every rank of the group makes the same calls in the same order, as with any collective. Nothing here knows of hosts: a
group of any size will do, and one of one rank too. docs/distributed.md shows how they go together.
"""

from __future__ import annotations

from quire.distributed.decode import ContextParallelDecode
from quire.distributed.exchange import merge_over_ranks
from quire.distributed.interleave import Interleave
from quire.distributed.prefill import ZigzagPrefill
from quire.distributed.ulysses import Ulysses
from quire.distributed.zigzag import Zigzag

__all__ = ["ContextParallelDecode", "Interleave", "Ulysses", "Zigzag", "ZigzagPrefill", "merge_over_ranks"]
