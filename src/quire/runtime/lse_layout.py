"""Converts the lse of run(), which has base 2 and a row for each query, to base e or to a row for each head."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from quire.errors import ValidationError
from quire.runtime.checks import check_output, check_shape

LN2 = math.log(2)  #: an lse in base 2 times this is in base e


def to_base_e(lse: torch.Tensor) -> torch.Tensor:
    """Converts an lse of base 2 to base e, in place."""
    return lse.mul_(LN2)


def converted(run: Callable[..., Any], lse: torch.Tensor | None, return_lse: bool, base: Any, layout: Any) -> Any:
    """run(lse=, return_lse=), which returns or writes an lse [rows, heads] in base 2, with the lse converted.

    base: "log2" or "ln". layout: "NH", or "HN" for a contiguous lse [heads, rows].
    """
    for name, value, words in (("lse_base", base, ("log2", "ln")), ("lse_layout", layout, ("NH", "HN"))):
        if value not in words:
            raise ValidationError(f"{name}: expected {words[0]!r} or {words[1]!r}, got {value!r}.")
    if lse is None and not return_lse:
        return run(lse=None, return_lse=False)
    o, found = run(lse=lse if layout == "NH" else None, return_lse=True)
    if base == "ln":
        to_base_e(found)
    if layout == "HN":
        found = found.t()
        if lse is not None:
            check_shape(check_output(lse, "lse"), "lse", {"num_qo_heads": found.shape[0], "nnz_qo": found.shape[1]})
        found = found.contiguous() if lse is None else lse.copy_(found)
    return (o, found) if return_lse else o
