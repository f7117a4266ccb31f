"""Sink tokens: keys without values, which each query sees before its own keys.

They add exp(logit) to the denominators of their KV head's queries, and nothing to the sums. No kernel reads them:
attention over the other keys is multiplied by the part of the denominator that these have, in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quire.errors import ValidationError
from quire.runtime.block_tables import Scale, Target
from quire.runtime.checks import check_same_device, check_shape, check_tensor
from quire.runtime.lse_layout import LN2


def check_sink_tokens(sinks: torch.Tensor, num_kv_heads: int, head_dim: int, device: torch.device) -> torch.Tensor:
    """`sinks` as keys [num_sink_tokens, num_kv_heads, head_dim] of any floating-point type."""
    expected = {"num_sink_tokens": None, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    check_shape(check_tensor(sinks, "sinks"), "sinks", expected)
    check_same_device(sinks, "sinks", device)
    if not sinks.is_floating_point():
        raise ValidationError(f"sinks: expected floating-point keys, got {sinks.dtype}.")
    return sinks


def attend_beside(
    attend: Callable[..., Any], rows: torch.Tensor, keys: torch.Tensor, logits_scale: Scale, o_scale: Scale,
    target: Target,
) -> torch.Tensor:  # fmt: skip
    """`attend` of queries [rows, num_qo_heads, head_dim], times o_scale, beside sink tokens; fills `target`.

    attend: the call without sinks, which takes `v_scale`, `out`, `lse_unit` and `return_lse`.
    """
    result, lse = attend(v_scale=Scale(1.0), out=target.result, lse_unit=LN2, return_lse=True)
    weight = _weight_of_keys(lse, torch.logsumexp(_logits(rows, keys, logits_scale), dim=-1))
    wide = result.float() * _scaled(weight, o_scale)[..., None]
    if target.caller.element_size() == 1:
        most = torch.finfo(target.caller.dtype).max
        wide.clamp_(-most, most)
    return target.caller.copy_(wide)


def _logits(rows: torch.Tensor, keys: torch.Tensor, scale: Scale) -> torch.Tensor:
    """float32 [rows, num_qo_heads, num_sink_tokens]."""
    num_kv_heads = keys.shape[1]
    grouped = rows.float().reshape(rows.shape[0], num_kv_heads, rows.shape[1] // num_kv_heads, rows.shape[2])
    return _scaled(torch.einsum("rhgd,nhd->rhgn", grouped, keys.float()).flatten(1, 2), scale)


def _scaled(x: torch.Tensor, scale: Scale) -> torch.Tensor:
    x = x * scale.number
    return x if scale.tensor is None else x * scale.tensor.view(())


def _weight_of_keys(lse: torch.Tensor, of_sinks: torch.Tensor) -> torch.Tensor:
    """What the keys have of the denominators; of a request without keys nothing. Both lse are in base e."""
    return torch.sigmoid(lse - of_sinks).masked_fill(lse.isneginf(), 0.0)
