"""Chooses the tokens that each query of sparse MLA attends to: those with the largest scores of an indexer.

This is the choice in DeepSeek's sparse attention (https://github.com/deepseek-ai/DeepSeek-V3.2-Exp).

The choice is exact and the same each time. It runs on the device of the scores without a synchronisation, so the call
may be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch

from quire.errors import ValidationError
from quire.runtime.checks import check_positive, check_same_device, check_shape, check_tensor, to_int32
from quire.runtime.indices import check_range

__all__ = ["select_tokens"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  #: of scores
_MOST = 1 << 16  #: tokens of a row that has fewer: the rest of the result is -1
_NOTHING = -(2**63)  #: less than what any score sorts as


def select_tokens(
    scores: torch.Tensor, top_k: int, lens: torch.Tensor | None = None, block_tables: torch.Tensor | None = None,
    page_size: int = 1,
) -> torch.Tensor:  # fmt: skip
    """The top_k tokens with the largest scores of each row, in ascending order, followed by -1 where a row has fewer.

    scores: [rows, num_tokens] in float32, float16 or bfloat16. lens: integers [rows], how many tokens each row has;
    scores beyond them may be anything. None: all. Of equal scores the earlier one is taken; NaN counts as -inf.
    block_tables: int32 [rows, pages]; the result is then page number * page_size + index in the page, as sparse MLA
    takes it (trtllm_batch_decode_with_kv_cache_mla(), flash_mla_with_kvcache()), instead of the number in the row.

    Returns int32 [rows, top_k]. Raises ValidationError naming the argument.

    >>> scores = torch.tensor([[0.5, 2.0, 2.0, -1.0], [3.0, 1.0, 0.0, 9.0]])
    >>> quire.select_tokens(scores, 2, lens=torch.tensor([4, 1])).tolist()
    [[1, 2], [0, -1]]
    """
    check_shape(check_tensor(scores, "scores"), "scores", {"rows": None, "num_tokens": None})
    if scores.dtype not in _DTYPES:
        raise ValidationError(f"scores: expected dtype {', '.join(map(str, _DTYPES))}, got {scores.dtype}.")
    (rows, num_tokens), most = scores.shape, check_positive(top_k, "top_k")
    if most > max(num_tokens, _MOST):
        raise ValidationError(f"top_k: expected at most {max(num_tokens, _MOST)}, got {top_k}.")
    size = check_positive(page_size, "page_size")
    keys = _keys(scores)
    if lens is not None:
        ends = _checked(lens, "lens", {"rows": rows}, scores.device)[:, None]
        keys = keys.where(torch.arange(num_tokens, device=scores.device) < ends, _NOTHING)
    best = torch.topk(keys, min(most, num_tokens), dim=1, sorted=False)
    tokens = best.indices.where(best.values != _NOTHING, num_tokens).sort(dim=1).values
    is_one = tokens < num_tokens
    if block_tables is not None:
        pages = _checked(block_tables, "block_tables", {"rows": rows, "pages": None}, scores.device)
        if pages.shape[1] * size < num_tokens:
            raise ValidationError(
                f"block_tables: expected pages of {size} tokens for {num_tokens} scores, got {list(pages.shape)}."
            )
        numbers = pages.long().gather(1, tokens.clamp(max=max(0, num_tokens - 1)) // size)
        tokens = numbers * size + tokens % size
        if tokens.is_cpu:
            check_range(tokens[is_one], "block_tables", -(2**31), 2**31 - 1, "tokens whose numbers fit 32 bits")
        is_one &= tokens < 2**31
    found = tokens.where(is_one, -1).to(torch.int32)
    return torch.nn.functional.pad(found, (0, most - found.shape[1]), value=-1)


def _keys(scores: torch.Tensor) -> torch.Tensor:
    """What ascends with the scores, and of equal ones descends with their numbers: int64, each another number."""
    bits = (scores.float().nan_to_num(-torch.inf, torch.inf, -torch.inf) + 0.0).view(torch.int32).long()  # no -0.0
    ascending = bits.where(bits >= 0, bits ^ 0x7FFFFFFF)
    return (ascending << 32) - torch.arange(scores.shape[1], device=scores.device)


def _checked(value: Any, name: str, shape: dict[str, int | None], device: torch.device) -> torch.Tensor:
    check_shape(check_tensor(value, name), name, shape)
    check_same_device(value, name, device)
    return to_int32(value, name)
