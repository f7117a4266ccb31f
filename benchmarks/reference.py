"""Is a result right? Sampled rows of it against float64, beside what torch itself loses in the row's number type."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from inputs import Inputs

__all__ = ["WRONG", "Accuracy", "Sample", "take_sample"]

#: A relative error of a single row that no rounding explains: the result is of something else, and is not timed.
WRONG = 0.25
#: How much more than torch's own error in the same number type a result may lose.
ALLOWED = 2.0


@dataclass(frozen=True)
class Accuracy:
    """Relative errors (norm of the difference over norm of the row) of the sampled rows."""

    error: float  #: root mean square over the rows
    worst: float  #: of any row; NaN where anything is not finite
    torch_error: float  #: `error` of torch's plain attention in the row's number type

    @property
    def wrong(self) -> bool:
        return not self.worst < WRONG

    @property
    def fine(self) -> bool:
        """Within twice torch's own error."""
        return not self.wrong and self.error <= ALLOWED * self.torch_error


@dataclass(frozen=True)
class _Part:
    """Some rows of one head of one request."""

    rows: torch.Tensor  #: of the output
    head: int
    exact: torch.Tensor  #: [rows, head_dim_vo] float64
    plain: torch.Tensor  #: the same, by torch in the row's number type


class Sample:
    """Rows of a result to look at, and what they must be."""

    def __init__(self, inputs: Inputs, parts: list[_Part]) -> None:
        self._parts = parts
        self._torch_error = self._errors([part.plain for part in parts])[0]
        self._shape = tuple(inputs.out.shape)

    def check(self, out: torch.Tensor) -> Accuracy:
        """How far `out` [nnz_qo, num_qo_heads, head_dim_vo] is off. Raises ValueError if it has another shape."""
        if tuple(out.shape) != self._shape:
            raise ValueError(f"out: expected shape {list(self._shape)}, got {list(out.shape)}.")
        error, worst = self._errors([out[part.rows, part.head] for part in self._parts])
        if not bool(torch.isfinite(out).all()):  # rows outside the sample count here
            worst = float("nan")
        return Accuracy(error, worst, self._torch_error)

    def _errors(self, results: list[torch.Tensor]) -> tuple[float, float]:
        found = [_relative(result, part.exact) for result, part in zip(results, self._parts, strict=True)]
        errors = torch.cat(found)
        return float(errors.square().mean().sqrt()), float(errors.max())


def _relative(result: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Of each row; against an exact zero the absolute error counts."""
    scale = exact.norm(dim=-1)
    return (result.double() - exact).norm(dim=-1) / torch.where(scale > 0, scale, torch.ones_like(scale))


def take_sample(inputs: Inputs, requests: int = 4, heads: int = 4, rows: int = 16) -> Sample:
    """A few rows of a few heads of a few requests, ends and extremes first."""
    chosen = [
        (request, head)
        for request in _requests(inputs, requests)
        for head in _spread(inputs.row.num_qo_heads, heads)
        if inputs.row.qo_lens[request] > 0
    ]
    return Sample(inputs, [_part(inputs, request, head, rows) for request, head in chosen])


def _requests(inputs: Inputs, count: int) -> list[int]:
    """The first and last, the longest and shortest."""
    lengths = inputs.row.kv_lens
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    return sorted(set([0, order[-1], len(lengths) - 1, order[0]][:count]))


def _spread(length: int, count: int) -> list[int]:
    """`count` numbers below `length`, both ends included."""
    if length <= count:
        return list(range(length))
    return sorted({round(i * (length - 1) / (count - 1)) for i in range(count)})


def _part(inputs: Inputs, request: int, head: int, count: int) -> _Part:
    row, device = inputs.row, inputs.q.device
    local = torch.tensor(_spread(row.qo_lens[request], count), device=device)
    rows = local + int(inputs.indices.qo_indptr[request])
    keys, values = inputs.keys_and_values(request)
    kv_head = head // (row.num_qo_heads // row.num_kv_heads)
    operands = (inputs.q[rows, head], keys[:, kv_head], values[:, kv_head])
    visible = _visible(inputs, request, local, keys.shape[0])
    places = local + keys.shape[0] - row.qo_lens[request]
    sink = None if inputs.sinks is None else inputs.sinks[head]
    exact, plain = (
        _attend(*operands, visible, places, head, inputs, sink, dtype) for dtype in (torch.float64, row.q_type)
    )
    return _Part(rows, head, exact, plain)


def _visible(inputs: Inputs, request: int, rows: torch.Tensor, kv_len: int) -> torch.Tensor:
    """[rows, kv_len]: the last query stands under the last key. A custom mask equals causal."""
    row = inputs.row
    diagonal = (rows + kv_len - row.qo_lens[request])[:, None]
    keys = torch.arange(kv_len, device=rows.device)[None, :]
    visible = (keys <= diagonal) if row.mask != "none" else torch.ones_like(keys <= diagonal)
    return visible if row.window_left < 0 else visible & (keys >= diagonal - row.window_left)


def _rotate(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """x [tokens, head_dim] as RoPE rotates tokens at `places`, in float64."""
    half = x.shape[1] // 2
    angles = places.double()[:, None] * 1e4 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    first, second = x.double().split(half, dim=1)
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], 1)


def _slope(head: int, num_heads: int) -> float:
    """ALiBi's slope of a head, of a power of two heads."""
    assert num_heads & num_heads - 1 == 0, num_heads
    return 2.0 ** (-8 * (head + 1) / num_heads)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, places: torch.Tensor, head: int,
            inputs: Inputs, sink: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:  # fmt: skip
    """Attention of q [rows, head_dim] in `dtype`, its sums in float32 or wider as torch does them."""
    row = inputs.row
    keys = torch.arange(k.shape[0], device=k.device)
    if row.pos_encoding == "ROPE_LLAMA":
        q, k = _rotate(q, places), _rotate(k, keys)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    logits = (q * row.sm_scale) @ k.T
    logits = logits.to(torch.promote_types(dtype, torch.float32))
    if row.pos_encoding == "ALIBI":
        logits = logits + _slope(head, row.num_qo_heads) * (keys - places[:, None])
    if row.soft_cap:
        logits = row.soft_cap * torch.tanh(logits / row.soft_cap)
    logits = logits.masked_fill(~visible, -torch.inf)
    if sink is not None:  # one more logit, whose value is zero
        logits = torch.cat([logits, sink.to(logits.dtype).expand(logits.shape[0], 1)], dim=1)
    weights = torch.softmax(logits, dim=-1).nan_to_num(0.0)[:, : k.shape[0]]  # a row that sees nothing is 0
    return weights.to(dtype) @ v
