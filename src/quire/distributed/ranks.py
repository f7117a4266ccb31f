"""The ranks of a process group, and checks that all were given the same arguments."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from quire.errors import PlanError, UnsupportedError, ValidationError

__all__ = ["Ranks", "all_gather", "check_agreement", "check_divisible", "peer_memory", "ranks_of", "refuse_positions"]

#: Arguments of plan() that count from where a token stands in its request, which a rank's part does not say.
_POSITIONS = {
    "attention_chunk_size": None, "pos_encoding_mode": "NONE", "rope_scale": None, "rope_theta": None, "window_left": -1
}  # fmt: skip
#: Of equally many bytes from each rank, into one tensor: the name that torch gives it from 2.13 on, or the older one.
all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


class Ranks(NamedTuple):
    """A process group as seen by one of its ranks."""

    group: Any
    rank: int
    size: int


def ranks_of(group: Any) -> Ranks:
    """The ranks of `group`; None: of all processes."""
    if not dist.is_available():
        raise UnsupportedError("quire.distributed: expected a torch that was built with torch.distributed.")
    if not dist.is_initialized():
        raise PlanError(
            "quire.distributed: expected a process group; call torch.distributed.init_process_group() first."
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValidationError("group: expected a group that this process is a member of.")
    return Ranks(group if group is not None else dist.group.WORLD, rank, dist.get_world_size(group))


def peer_memory(
    ranks: Ranks, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, Any, list[torch.Tensor]]:
    """Memory of this GPU that the other ranks of the host can read, torch's handle with its barriers, and the memory of
    each rank. A collective. Uses torch's symmetric memory, without multicast.
    """
    from torch.distributed import _symmetric_memory as symmetric_memory

    own = symmetric_memory.empty(*shape, dtype=dtype, device=device)
    handle = symmetric_memory.rendezvous(own, ranks.group)
    return own, handle, [handle.get_buffer(rank, shape, dtype) for rank in range(ranks.size)]


def check_divisible(num_heads: int, ranks: Ranks, name: str, instead: str) -> None:
    """Check that all ranks can have the same number of heads."""
    if num_heads % ranks.size:
        raise ValidationError(
            f"{name}: expected a multiple of {ranks.size}, the size of the group, got {num_heads}; {instead}."
        )


def check_agreement(ranks: Ranks, **values: Any) -> None:
    """Check that all ranks have the same `values`: a collective, after which all ranks raise the same error."""
    told: list[Any] = [None] * ranks.size
    dist.all_gather_object(told, values, group=ranks.group)
    for name, first in told[0].items():
        for rank, others in enumerate(told):
            if others[name] != first:
                raise ValidationError(
                    f"{name}: expected the same on all ranks of the group, got {first} on rank 0 and {others[name]} on "
                    f"rank {rank}."
                )


def refuse_positions(where: str, options: dict[str, Any]) -> None:
    """Refuse options that depend on positions, because the tokens of a rank are not contiguous."""
    for name, default in _POSITIONS.items():
        if options.get(name, default) != default:
            raise UnsupportedError(
                f"{name}: {where} does not take it, since the tokens of a rank do not stand side by side in their "
                f"request; rotate q and k before they are stored, or use Ulysses, which gives a rank whole requests."
            )
