"""Sampling, norms and activations of the package that stands in for FlashInfer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch

import quire
from quire.compat import flashinfer as compat
from quire.compat.flashinfer import standin

DRAWS = 20000
PROBS = torch.tensor([[0.4, 0.1, 0.3, 0.15, 0.05], [0.0, 0.5, 0.0, 0.25, 0.25]])


@pytest.fixture(autouse=True)
def flashinfer() -> Iterator[Any]:
    compat.activate()
    if not standin.is_active():
        compat.deactivate()
        pytest.skip("FlashInfer is installed")
    yield import_module("flashinfer")
    compat.deactivate()
    for name in [name for name in sys.modules if name.split(".")[0] == "flashinfer"]:
        del sys.modules[name]


def left(*kept: tuple[int, ...]) -> torch.Tensor:
    """Each row of PROBS with these classes alone, summing to 1."""
    rows = torch.zeros_like(PROBS)
    for i, classes in enumerate(kept):
        rows[i, list(classes)] = PROBS[i, list(classes)]
    return rows / rows.sum(-1, keepdim=True)


#: Function, arguments, and the classes that remain of each row.
FILTERS = (
    ("sampling_from_probs", (), (0, 1, 2, 3, 4), (1, 3, 4)),
    ("top_p_sampling_from_probs", (0.7,), (0, 2), (1, 3, 4)),
    ("top_p_sampling_from_probs", (torch.tensor([0.71, 0.5]),), (0, 2, 3), (1,)),
    ("top_p_sampling_from_probs", (0.0,), (0,), (1,)),
    ("top_k_sampling_from_probs", (2,), (0, 2), (1, 3, 4)),
    ("top_k_sampling_from_probs", (torch.tensor([3, 1]),), (0, 2, 3), (1,)),
    ("top_k_sampling_from_probs", (1 << 30,), (0, 1, 2, 3, 4), (1, 3, 4)),
    ("min_p_sampling_from_probs", (torch.tensor([0.3, 0.6]),), (0, 2, 3), (1,)),
    ("top_k_top_p_sampling_from_probs", (torch.tensor([3, 5]), 0.45), (0,), (1,)),
    ("top_k_top_p_sampling_from_probs", (3, 0.5), (0, 2), (1,)),
    ("top_k_top_p_sampling_from_probs", (3, 0.75, None, "joint"), (0, 2, 3), (1, 3, 4)),
    ("top_k_top_p_sampling_from_probs", (3, 0.75, None, "top_k_first"), (0, 2), (1, 3, 4)),
)


@pytest.mark.parametrize(("name", "args", "first", "second"), FILTERS)
@pytest.mark.parametrize("source", ["generator", "seed"])
def test_distributions(flashinfer: Any, name: str, args: Any, first: Any, second: Any, source: str) -> None:
    """Each class is drawn as often as it should be, within five standard deviations; the others never."""
    call, want = getattr(flashinfer.sampling, name), left(first, second)
    rows = torch.arange(2).repeat_interleave(DRAWS)
    args = tuple(x[rows] if isinstance(x, torch.Tensor) else x for x in args)
    given: dict[str, Any] = {"generator": torch.Generator().manual_seed(7)}
    if source == "seed":
        given = {"seed": torch.arange(2 * DRAWS), "offset": torch.tensor([3])}
    samples, valid = call(PROBS[rows], *args, return_valid=True, **given)
    assert samples.dtype == torch.int32 and bool(valid.all())
    found = torch.stack([part.bincount(minlength=5) / DRAWS for part in samples.long().split(DRAWS)])
    assert bool((found[want == 0] == 0).all())
    assert bool(((found - want).abs() <= 5 * (want * (1 - want) / DRAWS).sqrt()).all()), found


def test_rows_by_index_and_randomness(flashinfer: Any) -> None:
    sampling = flashinfer.sampling
    indices = torch.tensor([1, 1, 0], dtype=torch.int64)
    assert sampling.top_k_sampling_from_probs(PROBS, 1, indices).tolist() == [1, 1, 0]
    assert sampling.sampling_from_probs(PROBS, indices).dtype == torch.int64
    many = PROBS[:1].expand(500, 5)
    one, same, other = (sampling.sampling_from_probs(many, seed=seed, offset=0) for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert len(one.unique()) == 5, "rows of one seed differ"
    assert not torch.equal(one, sampling.sampling_from_probs(many, seed=1, offset=4))
    of_rows = sampling.sampling_from_probs(many, seed=torch.full((500,), 2**63 - 1), offset=torch.zeros(1).long())
    assert torch.equal(of_rows, sampling.sampling_from_probs(many, seed=2**63 - 1, offset=0))
    torch.manual_seed(3)
    drawn = sampling.sampling_from_probs(many)
    torch.manual_seed(3)
    assert torch.equal(drawn, sampling.sampling_from_probs(many))
    logits = PROBS.log()
    both = [f(x, seed=5, offset=6) for f, x in ((sampling.sampling_from_logits, logits[indices]),)]
    assert torch.equal(both[0], sampling.sampling_from_probs(PROBS[indices], seed=5, offset=6))
    masked = sampling.top_k_top_p_sampling_from_logits(logits, 3, 0.0)
    assert masked.tolist() == [0, 1]


def test_rows_without_a_choice(flashinfer: Any) -> None:
    rows = torch.stack([torch.zeros(5), torch.full((5,), torch.nan), PROBS[0]])
    samples, valid = flashinfer.sampling.sampling_from_probs(rows, return_valid=True)
    assert valid.tolist() == [False, False, True] and samples[:2].tolist() == [0, 0]
    with pytest.raises(quire.ValidationError, match=r"^probs: expected no NaN"):
        flashinfer.sampling.sampling_from_probs(rows, check_nan=True)
    with pytest.raises(quire.ValidationError, match=r"^filter_apply_order: "):
        flashinfer.sampling.top_k_top_p_sampling_from_probs(PROBS, 2, 0.5, filter_apply_order="none")
    with pytest.raises(quire.ValidationError, match=r"^top_p: expected a number or a tensor \[2\]"):
        flashinfer.sampling.top_p_renorm_probs(PROBS, torch.ones(3))


def test_renormalised(flashinfer: Any) -> None:
    sampling = flashinfer.sampling
    torch.testing.assert_close(sampling.top_p_renorm_prob(PROBS, 0.7), left((0, 2), (1, 3, 4)))
    torch.testing.assert_close(sampling.top_k_renorm_probs(PROBS, torch.tensor([1, 3])), left((0,), (1, 3, 4)))
    assert sampling.top_k_renorm_prob(PROBS.half(), 2).dtype == torch.float16
    masked = sampling.top_k_mask_logits(PROBS, 2)
    assert torch.equal(masked.isinf(), left((0, 2), (1, 3, 4)) == 0) and bool((masked[masked.isinf()] < 0).all())
    logits = torch.randn(3, 9)
    torch.testing.assert_close(sampling.softmax(logits, 0.5), (logits / 0.5).softmax(-1))
    by_row = torch.tensor([0.5, 1.0, 2.0])
    torch.testing.assert_close(sampling.softmax(logits, by_row), (logits / by_row[:, None]).softmax(-1))


@pytest.mark.parametrize("gemma", [False, True])
def test_norms(flashinfer: Any, gemma: bool) -> None:
    prefix = "gemma_" if gemma else ""
    x, y, weight = (torch.randn(n).bfloat16() for n in ((3, 64), (3, 64), (64,)))

    def want(total: torch.Tensor) -> torch.Tensor:
        return total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (weight.double() + gemma)

    def check(got: torch.Tensor, truth: torch.Tensor) -> None:
        torch.testing.assert_close(got.double(), truth, rtol=2**-8, atol=1e-6)

    out = torch.empty_like(x)
    norm = getattr(flashinfer, f"{prefix}rmsnorm")
    assert norm(x, weight, 1e-5, out=out) is out and norm(x, weight, 1e-5).dtype == torch.bfloat16
    check(out, want(x.double()))
    total = x.double() + y.double()
    assert getattr(flashinfer.norm, f"{prefix}fused_add_rmsnorm")(x, y, weight, 1e-5) is None
    check(x, want(total))
    check(y, total)


def test_concatenated_keys(flashinfer: Any) -> None:
    k, nope, rope = torch.empty(5, 4, 192), torch.randn(5, 4, 128), torch.randn(5, 1, 64)
    assert flashinfer.concat_ops.concat_mla_k(k, nope, rope) is None
    assert torch.equal(k, torch.cat([nope, rope.expand(5, 4, 64)], -1))
    with pytest.raises(quire.ValidationError, match=r"^k: expected \[tokens=5, heads=4, dims=192\]"):
        flashinfer.concat_ops.concat_mla_k(k[..., 1:], nope, rope)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh"])
def test_activations(flashinfer: Any, name: str) -> None:
    x = torch.randn(2, 3, 32).bfloat16()
    gate, up = x.double().chunk(2, -1)
    how = {"gelu": "none", "gelu_tanh": "tanh"}
    functional = torch.nn.functional
    want = (functional.silu(gate) if name == "silu" else functional.gelu(gate, approximate=how[name])) * up
    call, out = getattr(flashinfer.activation, f"{name}_and_mul"), torch.empty(2, 3, 16, dtype=torch.bfloat16)
    assert call(x, out=out) is out and call is getattr(flashinfer, f"{name}_and_mul")
    torch.testing.assert_close(out.double(), want, rtol=2**-8, atol=1e-6)
