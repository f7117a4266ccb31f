"""quire.Variant in MLA: scores and masks of latents, beside the same in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import oracle
import quire
from latents import SCALE, LatentPages, Latents
from quire import variants
from quire.kernels import AttentionProblem, decide
from quire.kernels.features import MaskMode, dtype_of
from test_mla import CUDA_BACKENDS, parts, plan

__all__ = ["CUDA_BACKENDS"]  # the fixtures of this module read it

HEADS = 20
#: A variant, what its mask reads and what only its score reads; the operands of HEADS heads and requests of 90 keys.
CASES = {
    "soft cap": (variants.soft_cap, {}, {"cap": 3.0}),
    "alibi": (variants.alibi, {}, {"slopes": torch.linspace(0.02, 0.3, HEADS)}),
    "window": (variants.dilated_window, {"width": 9, "step": 2}, {}),
    "documents": (variants.document_mask, {"documents": torch.arange(90).repeat(3, 1).int() // 17}, {}),
    "tree, and a bias": (
        quire.Variant(
            score=lambda score, kv_idx, head, bias: score + bias[head, kv_idx],
            mask=lambda q_idx, kv_idx, request, qo_len, kv_len, ancestors: (
                (kv_idx < kv_len - qo_len) | (((ancestors[request, q_idx] >> (kv_idx - (kv_len - qo_len))) & 1) != 0)
            ),
            tensors={"bias": "float32", "ancestors": "int32"},
        ),
        {"ancestors": torch.tensor([[1, 3, 5, 11, 21]] * 3, dtype=torch.int32)},
        {"bias": torch.linspace(-2, 2, HEADS * 90).reshape(HEADS, 90)},
    ),
    "nothing is seen": (quire.Variant(mask=lambda kv_idx: kv_idx < 0), {}, {}),
}  # fmt: skip


def on(device: str, operands: dict[str, object]) -> dict[str, object]:
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in operands.items()}


def attend(p: Latents, pages: LatentPages, backend: str, case: str, **more: object) -> tuple[Tensor, Tensor]:
    variant, of_mask, of_score = CASES[case]
    buffer = torch.empty(64 << 20, dtype=torch.uint8, device=p.device)
    wrapper = quire.BatchMLAPagedAttentionWrapper(buffer, backend=backend, variant=variant)
    plan(wrapper, p, pages, **on(p.device, of_mask), **more)
    return wrapper.run(*parts(p), pages.ckv, pages.kpe, return_lse=True, **on(p.device, of_score))


def check(p: Latents, case: str, out: Tensor, lse: Tensor) -> None:
    variant, of_mask, of_score = CASES[case]
    keys, kv_indptr = p.keys.cpu()[:, None], oracle.indptr_of(p.kv_lens)

    def reference(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        q, k = (t.cpu().to(dtype).double() for t in (p.query, keys))
        return variant.reference(
            q, k, k[..., :512], qo_indptr=p.qo_indptr, kv_indptr=kv_indptr, causal=p.causal, sm_scale=SCALE,
            return_lse=True, **of_mask, **of_score,
        )  # fmt: skip

    o, of_o = reference(torch.float64)
    oracle.assert_close(out, o, o.to(p.dtype).double(), p.qo_indptr)
    torch.testing.assert_close(lse.cpu().double(), of_o, rtol=1e-3, atol=2e-2)


@pytest.mark.first(3)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("causal", [False, True])
def test_scores_and_masks(device, backend, dtype, causal, case):
    """Few rows and many, whole row tiles and parts of them, keys of several tiles."""
    for qo_lens in ((1, 1, 1), (5, 1, 4)):
        p = Latents(qo_lens, (90, 7, 71), HEADS, dtype, device, causal=causal)
        check(p, case, *attend(p, p.paged(16), backend, case))


def test_many_heads_and_bits_of_eight(device, backend):
    """Panels of 128 rows; 8-bit latents with a scale."""
    p = Latents((3,), (90,), 128, torch.bfloat16, device, kv_dtype=torch.float8_e4m3fn)
    check(p, "soft cap", *attend(p, p.paged(64), backend, "soft cap"))
    check(p, "window", *attend(p, p.paged(64), backend, "window"))


def test_calls_that_take_none(device):
    p = Latents((1,), (20,), HEADS, torch.bfloat16, device)
    pages = p.paged(16)
    wrapper = quire.BatchMLAPagedAttentionWrapper(
        torch.empty(1 << 20, dtype=torch.uint8, device=device), variant=variants.soft_cap
    )
    lens = torch.tensor([20], dtype=torch.int32, device=device)
    with pytest.raises(quire.UnsupportedError, match="variant: expected none in a call without plan"):
        wrapper.run(*parts(p), pages.ckv, pages.kpe, kv_len=lens, page_table=pages.table(device), cap=3.0)
    plan(wrapper, p, pages)
    with pytest.raises(quire.ValidationError, match="cap"):
        wrapper.run(*parts(p), pages.ckv, pages.kpe)
    plain = quire.BatchMLAPagedAttentionWrapper(torch.empty(1 << 20, dtype=torch.uint8, device=device))
    plan(plain, p, pages)
    with pytest.raises(TypeError, match="unexpected keyword argument 'cap'"):
        plain.run(*parts(p), pages.ckv, pages.kpe, cap=3.0)


def test_kernels_for_hopper_refuse_them_by_name():
    bf16 = dtype_of("bfloat16", "q")
    problem = AttentionProblem(
        "sm90a",
        bf16,
        bf16,
        bf16,
        576,
        512,
        16,
        MaskMode.CAUSAL,
        False,
        False,
        8,
        variant=variants.soft_cap,
        is_mla=True,
    )
    found = decide(problem)
    assert found.kernel.backend == "fa2"
    for backend in ("fa3", "decode"):
        with pytest.raises(quire.UnsupportedError, match="it takes no custom variants of latents; fa2 and cpu do"):
            decide(problem, f"quire:{backend}")
