"""Attention over several GPUs as torch, diffusers and xDiT call it, computed by quire.distributed.

    with context_parallel(mesh, buffers=[x, positions], buffer_seq_dims=[1, 0]):  # as torch's of this name
        model(x)
    register_diffusers()  # model.set_attention_backend("quire")
    register_xdit()       # --attention_backend FLASH_3

All are for inference, and without dropout. Masks as tensors are refused: a mask over several GPUs is a quire.Variant,
which context_parallel() takes. Exchanges are those of quire.distributed.RingAttention: "ring", "all_gather" or
"peer_memory".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional

from quire.compat.flash_attn_interface import flash_attn_func, flash_attn_varlen_func
from quire.distributed import InOrder, MeshAttention, Zigzag
from quire.distributed.ring import groups_of
from quire.engine.checks import check_flags, check_shape, check_tensor
from quire.engine.device import current_stream
from quire.engine.operands import OperandValue
from quire.engine.tensors import LN2
from quire.errors import UnsupportedError, ValidationError, teach
from quire.kernels.expressions.variant import Variant

__all__ = ["context_parallel", "context_parallel_unshard", "register_diffusers", "register_xdit"]

_WORKSPACE_BYTES = 128 << 20
Counts = tuple[tuple[int, ...], ...]  #: tokens of each sequence on each rank; or its length alone: a zigzag


@lru_cache(maxsize=8)
def _workspace(device: torch.device, _stream: int) -> torch.Tensor:
    return torch.empty(_WORKSPACE_BYTES if device.type == "cuda" else 16 << 20, dtype=torch.uint8, device=device)


class Mesh(NamedTuple):
    """The groups that a call is spread over, and how."""

    ring: Any  #: None: one rank
    ulysses: Any
    exchange: str

    @classmethod
    def of(cls, mesh: Any, exchange: str) -> Mesh:
        groups = groups_of(mesh)
        return cls(groups.get("ring"), groups.get("ulysses"), exchange)

    @property
    def sizes(self) -> tuple[int, int]:
        """Of the ring and of Ulysses."""
        ring, ulysses = (1 if group is None else dist.get_world_size(group) for group in self[:2])
        return ring, ulysses

    @property
    def rank(self) -> int:
        ring, ulysses = (0 if group is None else dist.get_rank(group) for group in self[:2])
        return ring * self.sizes[1] + ulysses

    def counts(self, length: int, batch: int) -> Counts:
        """Of sequences of one length: a zigzag in a ring, else equal parts."""
        ring, ulysses = self.sizes
        if ulysses == 1 < ring:
            return ((length,),) * batch
        size = ring * ulysses
        return (tuple(length // size + (rank < length % size) for rank in range(size)),) * batch

    def layout(self, counts: Counts) -> InOrder | Zigzag:
        ring, ulysses = self.sizes
        if counts and len(counts[0]) < ring * ulysses:
            return Zigzag(torch.tensor([n for (n,) in counts], device="cpu"), ring, 1)
        return InOrder(torch.tensor(counts, device="cpu").view(len(counts), -1))

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, counts: Counts, kv_counts: Counts, *,
        causal: bool = False, scale: float | None = None, variant: Variant | None = None, **operands: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Of q, k and v [tokens of this rank, heads, head_dim]; o, and lse [tokens, heads], a natural logarithm."""
        sizes = q.shape[1], k.shape[1], q.shape[2], v.shape[2]
        place = q.device, current_stream(q.device)
        attention = _planned(self, place, variant, counts, kv_counts, sizes, q.dtype, causal, scale)
        o, lse = attention.run(q, k, v, return_lse=True, **operands)
        return o, lse * LN2


@lru_cache(maxsize=64)
def _planned(
    mesh: Mesh, place: tuple[torch.device, int], variant: Variant | None, counts: Counts, kv_counts: Counts,
    sizes: tuple[int, int, int, int], dtype: torch.dtype, causal: bool, scale: float | None,
) -> MeshAttention:  # fmt: skip
    """A plan, for all layers. place: a device and a stream, as two runs of a plan must not overlap."""
    groups = {name: group for name, group in zip(("ring", "ulysses"), mesh, strict=False) if group is not None}
    attention = MeshAttention(_workspace(*place), groups, exchange=mesh.exchange, variant=variant)
    *shape, head_dim_vo = sizes
    attention.plan(
        mesh.layout(counts), *shape, kv_layout=None if kv_counts == counts else mesh.layout(kv_counts),
        head_dim_vo=head_dim_vo, causal=causal, sm_scale=scale, q_data_type=dtype,
    )  # fmt: skip
    return attention


def refuse_masks(attn_mask: torch.Tensor | None, dropout_p: float) -> None:
    if dropout_p:
        raise UnsupportedError(f"dropout_p: expected 0, as these calls are for inference, got {dropout_p}.")
    if attn_mask is not None:
        raise UnsupportedError(
            "attn_mask: expected None, as a rank has no rows of the others' masks; write the mask as a quire.Variant "
            "(context_parallel(variant=...)), or leave padding out of the sequences, which may have any lengths."
        )


def sizes_of(size: int, group: Any, device: torch.device) -> list[int]:
    """A number of each rank of a group; waits for them."""
    own = torch.tensor([size], device=device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group=group)
    return [int(each) for each in found]


# --- torch -----------------------------------------------------------------------------------------------------------


@contextmanager
def context_parallel(
    mesh: Any, *, buffers: Sequence[torch.Tensor] = (), buffer_seq_dims: Sequence[int] = (),
    no_restore_buffers: set[torch.Tensor] | None = None, exchange: str = "ring", variant: Variant | None = None,
    **operands: OperandValue,
) -> Iterator[None]:  # fmt: skip
    """Within it torch's scaled_dot_product_attention() attends to the tokens of all ranks, as within
    torch.distributed.tensor.experimental.context_parallel.

    mesh: a DeviceMesh as in quire.distributed.MeshAttention: one dimension for a ring, or "ring" and "ulysses".
    buffers, buffer_seq_dims: tensors, and their dimensions of tokens, which have one length, any one. Inside they hold
        this rank's tokens, in zigzag, so that causal attention is even. They are restored at the end, but for those in
        no_restore_buffers. context_parallel_unshard() puts results of all ranks together.
    exchange: as in RingAttention. variant, operands: a quire.Variant for all calls inside, over whole sequences, and
        what its score reads.

    Raises ValidationError or UnsupportedError naming the argument.

    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from quire.compat.context_parallel import context_parallel
    >>> mesh, x = init_device_mesh("cpu", (1,)), torch.randn(2, 8, 30, 64)  # one rank here
    >>> with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
    ...     torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).shape
    torch.Size([2, 8, 30, 64])
    """
    kept = no_restore_buffers or set()
    if not buffers or len(buffers) != len(buffer_seq_dims):
        raise ValidationError(
            f"buffers: expected at least one, and a dimension for each in buffer_seq_dims, got {len(buffers)} and "
            f"{len(buffer_seq_dims)}."
        )
    if not all(any(each is buffer for buffer in buffers) for each in kept):
        raise ValidationError("no_restore_buffers: expected some of buffers.")
    lengths = {buffer.shape[dim] for buffer, dim in zip(buffers, buffer_seq_dims, strict=True)}
    if len(lengths) != 1:
        raise ValidationError(f"buffers: expected one length in buffer_seq_dims, got {sorted(lengths)}.")
    (total,) = lengths
    on = Mesh.of(mesh, exchange)
    own = on.layout(on.counts(total, 1)).rows(on.rank)
    before, theirs = [buffer.detach() for buffer in buffers], functional.scaled_dot_product_attention
    try:
        for buffer, whole, dim in zip(buffers, before, buffer_seq_dims, strict=True):
            buffer.data = whole.index_select(dim, own.to(whole.device))
        functional.scaled_dot_product_attention = _Sdpa(on, total, len(own), variant, operands)
        yield
    finally:
        functional.scaled_dot_product_attention = theirs
        for buffer, whole in zip(buffers, before, strict=True):
            if not any(buffer is each for each in kept):
                buffer.data = whole


@dataclass(frozen=True)
class _Sdpa:
    """In the place of torch's function: of sequences of `total` tokens, of which this rank has `own`."""

    mesh: Mesh
    total: int
    own: int
    variant: Variant | None
    operands: Mapping[str, OperandValue]

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        refuse_masks(attn_mask, dropout_p)
        check_flags(is_causal=is_causal, enable_gqa=enable_gqa)
        for tensor, name in ((query, "query"), (key, "key"), (value, "value")):
            sizes = {"batch": query.shape[0], "num_heads": None, "tokens of this rank": self.own, "head_dim": None}
            check_shape(check_tensor(tensor, name), name, sizes)
        if not enable_gqa and query.shape[1] != key.shape[1]:
            raise ValidationError(
                f"enable_gqa: expected True for {query.shape[1]} heads of query and {key.shape[1]} of key, got False."
            )
        counts = self.mesh.counts(self.total, query.shape[0])
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        o, _ = self.mesh.attend(
            q, k, v, counts, counts, causal=is_causal, scale=scale, variant=self.variant, **self.operands
        )
        return o.view(query.shape[0], self.own, *o.shape[1:]).transpose(1, 2)


def context_parallel_unshard(
    mesh: Any, buffers: Sequence[torch.Tensor], seq_dims: Sequence[int]
) -> list[torch.Tensor]:  # fmt: skip
    """Tensors of this rank's tokens, as inside context_parallel(), as tensors of all tokens in their order.

    mesh, seq_dims: as in context_parallel(). A collective; it waits for the other ranks, whose lengths may differ.
    buffers: tensors of any shape. Raises ValidationError for other meshes.
    """
    on, found = Mesh.of(mesh, "ring"), []
    for buffer, dim in zip(buffers, seq_dims, strict=True):
        whole = buffer.movedim(dim, 0)
        for group in (on.ulysses, on.ring):
            is_zigzag = group is on.ring and on.sizes[1] == 1
            whole = whole if group is None else _gathered(whole, group, on if is_zigzag else None)
        found.append(whole.movedim(0, dim))
    return found


def _gathered(x: torch.Tensor, group: Any, zigzag: Mesh | None) -> torch.Tensor:
    """The rows of all ranks, one rank after the other, or in the order of a zigzag."""
    sizes = sizes_of(len(x), group, x.device)
    padded = x.new_zeros(max(sizes), *x.shape[1:])
    padded[: len(x)] = x
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    whole = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
    if zigzag is None or len(sizes) == 1:
        return whole
    layout = zigzag.layout(zigzag.counts(len(whole), 1))
    places = torch.cat([layout.rows(rank) for rank in range(len(sizes))])
    return whole[places.argsort().to(x.device)]


# --- diffusers and xDiT ----------------------------------------------------------------------------------------------


def register_diffusers(exchange: str = "ring") -> None:
    """Registers the backend "quire" with diffusers' attention dispatch in this process, also under context parallelism:
    model.set_attention_backend("quire"), model.enable_parallelism(config=ContextParallelConfig(...)).

    exchange: as in quire.distributed.RingAttention. Ring and Ulysses together may be used, sequences have any lengths
    with ring_anything or ulysses_anything, and convert_to_fp32 has no effect: partial results are merged in float32.
    Raises UnsupportedError for masks and dropout when it is called, ValidationError for gradients.
    """
    dispatch = import_module("diffusers.models.attention_dispatch")
    names, registry = dispatch.AttentionBackendName, dispatch._AttentionBackendRegistry
    if "QUIRE" not in names.__members__:  # an Enum that knows no other way to have one name more
        member = str.__new__(names, "quire")
        member._name_, member._value_ = "QUIRE", "quire"
        names._member_map_["QUIRE"] = names._value2member_map_["quire"] = member
    name = names("quire")

    def quire_attention(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
        return_lse: bool = False, _parallel_config: Any = None,
    ) -> Any:  # fmt: skip
        refuse_masks(attn_mask, dropout_p)
        check_flags(is_causal=is_causal, enable_gqa=enable_gqa, return_lse=return_lse)
        config = None if _parallel_config is None else _parallel_config.context_parallel_config
        o, lse = _of_diffusers(query, key, value, is_causal, scale, config, exchange)
        return (o, lse) if return_lse else o

    registry.register(name, supports_context_parallel=True)(quire_attention)


def _of_diffusers(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None, config: Any, exchange: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of tensors [batch, tokens, heads, head_dim]; o and lse [batch, tokens, heads]."""
    if config is None:
        o, lse = flash_attn_func(q, k, v, softmax_scale=scale, causal=causal, return_attn_probs=True)
        return o, lse.transpose(1, 2)
    around, across = (
        mesh.get_group() if degree > 1 else None
        for mesh, degree in ((config._ring_mesh, config.ring_degree), (config._ulysses_mesh, config.ulysses_degree))
    )
    mesh, batch, heads = Mesh(around, across, exchange), q.shape[0], q.shape[2]
    ring, ulysses = mesh.sizes
    any_lengths = config.ring_anything or config.ulysses_anything
    group = mesh.ulysses if ring == 1 else mesh.ring
    counts, kv_counts = (
        (tuple(sizes_of(n, group, q.device) if any_lengths else [n] * (ring * ulysses)),) * batch
        for n in (q.shape[1], k.shape[1])
    )
    missing = -heads % ulysses if k.shape[2] == heads else 0  # heads of zeros make them a multiple
    flat_q, flat_k, flat_v = (
        functional.pad(x.flatten(0, 1), (0, 0, 0, missing)) if missing else x.flatten(0, 1) for x in (q, k, v)
    )
    o, lse = mesh.attend(flat_q, flat_k, flat_v, counts, kv_counts, causal=causal, scale=scale)
    o, lse = (x[:, :heads].reshape(batch, q.shape[1], heads, *x.shape[2:]) for x in (o, lse))
    return o, lse


def register_xdit(backend: str = "FLASH_3") -> None:
    """Computes one of the attention backends of xDiT (xfuser) by Quire in this process, in its rings and Ulysses.

    backend: a name of xfuser's AttentionBackendType whose function is replaced. Raises UnsupportedError for masks as
    tensors and for dropout when it is called; keys that are packed by indices_k are attended to as they are.
    """
    module = import_module("xfuser.core.distributed.attention_backend")
    known = [each.name for each in module.AttentionBackendType]
    if backend not in known:
        raise ValidationError(f"backend: expected one of {', '.join(known)}, got {backend!r}.")
    module.register_attention_function(module.AttentionBackendType[backend])(_of_xdit)


def _of_xdit(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    attention_kwargs: Mapping[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Of tensors [batch, heads, tokens, head_dim]; o like query, and lse [batch, heads, tokens], base e."""
    given = attention_kwargs or {}
    refuse_masks(given.get("attn_mask"), dropout_p)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if given.get("indices_k") is None:
        o, lse = flash_attn_func(q, k, v, causal=is_causal, return_attn_probs=True)
        return o.transpose(1, 2), lse
    batch, length = q.shape[:2]
    k, v = (x.flatten(0, 1).index_select(0, given["indices_k"]) for x in (k, v))
    ends = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * length
    o, lse = flash_attn_varlen_func(
        q.flatten(0, 1), k, v, ends, given["cu_seqlens_k"], length, given["max_seqlen_k"], causal=is_causal,
        return_attn_probs=True,
    )  # fmt: skip
    return o.view(batch, length, *o.shape[1:]).transpose(1, 2), lse.view(-1, batch, length).transpose(0, 1)


teach(globals(), __all__)
