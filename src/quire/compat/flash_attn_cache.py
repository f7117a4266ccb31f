"""The cache of flash_attn_with_kvcache(): its rows or pages, new tokens that are written to it, and their rotation."""

from __future__ import annotations

from numbers import Integral
from typing import Any, NamedTuple

import torch

from quire.compat.rows import equal_lengths, row_step
from quire.errors import ValidationError
from quire.page import append_paged_kv_cache
from quire.rope import apply_rope_with_cos_sin_cache
from quire.runtime.checks import check_same_device, check_shape, check_tensor, to_int32
from quire.runtime.ops import is_tracing


class Cache(NamedTuple):
    """A cache in pages: those of the block table, or a row of the cache as one page."""

    tensors: tuple[torch.Tensor, torch.Tensor]
    lens: torch.Tensor  #: int32 [batch], tokens
    pages: torch.Tensor  #: int32 [batch, pages]
    leftpad: torch.Tensor | None

    @classmethod
    def of(
        cls, k_cache: Any, v_cache: Any, batch: int, cache_seqlens: Any, cache_batch_idx: Any, cache_leftpad: Any,
        block_table: Any,
    ) -> Cache:  # fmt: skip
        """Checked, with index tensors on the cache's device or the host."""
        for tensor, name in ((k_cache, "k_cache"), (v_cache, "v_cache")):
            tensor_of(tensor, name)
            check_shape(tensor, name, sizes("num_pages", None, "page_size"))
        rows, size = k_cache.shape[:2]
        check_shape(v_cache, "v_cache", sizes("num_pages", rows, "page_size", size, k_cache.shape[2]))
        if block_table is None:
            at = equal_lengths(batch, 0).rows[:, 0] if cache_batch_idx is None else cache_batch_idx
            pages = _index(at, "cache_batch_idx", batch, k_cache.device, rows - 1)[:, None]
        elif cache_batch_idx is not None or cache_leftpad is not None:
            name = "cache_leftpad" if cache_batch_idx is None else "cache_batch_idx"
            raise ValidationError(f"{name}: expected None beside block_table, which says where keys are.")
        else:
            pages = tensor_of(block_table, "block_table")
            check_shape(pages, "block_table", {"batch": batch, "pages": None})
        most = pages.shape[1] * size
        lens = most if cache_seqlens is None else cache_seqlens
        if not isinstance(lens, torch.Tensor):
            if not isinstance(lens, Integral):
                raise ValidationError(f"cache_seqlens: expected a number of tokens or a tensor, got {lens!r}.")
            lens = equal_lengths(batch, int(lens)).lens
        lens = _index(lens, "cache_seqlens", batch, k_cache.device, most)
        if cache_leftpad is not None and not (row_step(k_cache) and row_step(k_cache) == row_step(v_cache)):
            raise ValidationError(f"cache_leftpad: expected rows a multiple of tokens apart, got {k_cache.stride()}.")
        pad = None if cache_leftpad is None else _index(cache_leftpad, "cache_leftpad", batch, k_cache.device, most)
        return cls((k_cache, v_cache), lens, to_int32(pages, "block_table"), pad)

    def append(self, k: torch.Tensor, v: torch.Tensor) -> Cache:
        """Writes new tokens behind those that are there; returns the cache with them."""
        batch, device = self.lens.shape[0], self.tensors[0].device
        for tensor, name in ((k, "k"), (v, "v")):
            check_shape(tensor_of(tensor, name), name, sizes("batch", batch, "seqlen_new"))
        new, most = k.shape[1], self.pages.shape[1] * self.tensors[0].shape[1]
        if self.lens.is_cpu and not is_tracing() and batch and int(self.lens.max()) + new > most:
            raise ValidationError(
                f"cache_seqlens: expected at most {most - new}, as {new} new tokens follow in {most} places, got "
                f"{int(self.lens.max())}."
            )
        lens, pages = self.lens.to(device), self.pages.to(device).contiguous()
        positions = (lens[:, None] + torch.arange(new, dtype=torch.int32, device=device)).view(-1)
        requests = torch.arange(batch, dtype=torch.int32, device=device).repeat_interleave(new)
        indptr = torch.arange(batch + 1, dtype=torch.int32, device=device) * pages.shape[1]
        append_paged_kv_cache(
            k.flatten(0, 1), v.flatten(0, 1), torch.where(lens[requests] < 0, -1, requests), positions, self.tensors,
            pages.view(-1), indptr, torch.ones_like(lens),
        )  # fmt: skip
        return self._replace(lens=torch.where(self.lens < 0, self.lens, self.lens + new))

    def without_padding(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens behind the padding on the left, and the numbers of their pages of one token (token_pages())."""
        assert self.leftpad is not None
        keys, size = self.tensors[0], self.tensors[0].shape[1]
        pad, lens, rows = (t.to(keys.device) for t in (self.leftpad, self.lens, self.pages))
        tokens = pad[:, None] + torch.arange(size, dtype=torch.int32, device=keys.device)
        pages = rows * row_step(keys) + tokens.clamp(max=size - 1)
        lens = (lens - pad).clamp(min=0)
        return lens.to(self.lens.device), pages.to(torch.int32)


def _index(value: Any, name: str, batch: int, device: torch.device, most: int) -> torch.Tensor:
    """An int32 index tensor on the host, where its numbers are checked, or on `device`."""
    tensor = to_int32(tensor_of(value, name), name)
    check_shape(tensor, name, {"batch": batch})
    if tensor.is_cpu and not is_tracing() and tensor.numel() and int(tensor.max()) > most:
        raise ValidationError(f"{name}: expected at most {most}, got {int(tensor.max())}.")
    if not tensor.is_cpu:
        check_same_device(tensor, name, device)
    return tensor


def rotated(
    q: torch.Tensor, k: torch.Tensor, lens: torch.Tensor, cos: Any, sin: Any, interleaved: bool, moves: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k, rotated by where their tokens stand; all of q at the first new token unless it moves."""
    check_shape(tensor_of(cos, "rotary_cos"), "rotary_cos", {"seqlen_rotary": None, "rotary_dim / 2": None})
    sizes_of_cos = dict(zip(("seqlen_rotary", "rotary_dim / 2"), cos.shape, strict=True))
    check_shape(tensor_of(sin, "rotary_sin"), "rotary_sin", sizes_of_cos)
    table = torch.cat([cos, sin], dim=1).float()
    start = lens.to(q.device).clamp(min=0)[:, None]

    def turn(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(x.shape[0] * x.shape[1], -1)
        none = flat.new_zeros(flat.shape[0], 0)
        return apply_rope_with_cos_sin_cache(at, flat, none, x.shape[3], table, not interleaved)[0].view(x.shape)

    steps = [torch.arange(t.shape[1], dtype=torch.int32, device=q.device) for t in (q, k)]
    return turn(q, (start + steps[0] * moves).view(-1)), turn(k, (start + steps[1]).view(-1))


def tensor_of(value: Any, name: str) -> torch.Tensor:
    """check_tensor(), for tensors that have memory."""
    if is_tracing() and isinstance(value, torch.Tensor):
        return value
    return check_tensor(value, name)


def sizes(
    first: str, rows: int | None, second: str, tokens: int | None = None, num_heads: int | None = None
) -> dict[str, int | None]:
    return {first: rows, second: tokens, "num_heads_k": num_heads, "head_dim": None}
