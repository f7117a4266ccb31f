"""Kernels for GPUs without a GPU: their PTX, interpreted, against the oracle; and kernels that are wrong.

Problems are small, and on a few SMs, so that tiles are full, partial, masked and empty, and keys are divided.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask

import nvfp4_cases
import oracle
import quire
from calls import decode, paged_wrapper, plan_paged, prefill_paged, prefill_ragged
from latents import Latents
from problems import Problem
from ptx import simulated as simulation
from ptx.memory import Fault
from ptx.simulated import Edit, simulated, storages
from ptx.threads import Turns
from quire.jit.toolchain import find_toolchain
from test_mla import attend

pytestmark = pytest.mark.skipif(find_toolchain("sm80") is None, reason="neither nvcc nor libnvrtc")

BF16, FP16, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
Check = Callable[[], None]


def paged(backend: str, p: Problem, page_size: int = 16, **run: object) -> Check:
    """Attention over pages."""
    plan = {} if p.kv_dtype is None else {"kv_data_type": p.kv_dtype}
    result = prefill_paged(p, p.paged(page_size), f"quire:{backend}", plan=plan, run=run)
    return lambda: p.check(*result, **run)


def ragged(backend: str, p: Problem) -> Check:
    """Attention over keys and values without pages."""
    result = prefill_ragged(p, f"quire:{backend}")
    return lambda: p.check(*result)


def flex() -> Check:
    """Scores and masks that differ between heads and requests, which are the heads of one request."""
    lens, per_head = 200, torch.rand(2, 8)
    q, k, v = (torch.randn(2, heads, n, 64).to(BF16) for heads, n in ((8, 40), (2, lens), (2, lens)))

    def shown(b: object, h: object, i: object, j: object) -> object:
        return (i + 160 >= j) & (i + 160 - j < (b * 8 + h) * 12 + 1)

    mask = create_block_mask(shown, 2, 8, 40, lens, device="cpu", BLOCK_SIZE=16)
    o = quire.flex_attention(q, k, v, lambda s, b, h, i, j: s * (1 + per_head[b, h]), mask, enable_gqa=True)

    def check() -> None:
        at = torch.meshgrid(*map(torch.arange, (2, 8, 40, lens)), indexing="ij")
        score = q.double() @ k.double().repeat_interleave(4, 1).transpose(2, 3) / 8 * (1 + per_head[..., None, None])
        wanted = torch.softmax(score.masked_fill(~shown(*at), -torch.inf), 3) @ v.double().repeat_interleave(4, 1)
        torch.testing.assert_close(o.double(), wanted, atol=2e-2, rtol=2e-2)

    return check


def of_latents(p: Latents) -> Check:
    result = attend(p, p.paged(), "quire:fa2")
    return lambda: p.check(*result)


def of_4_bits(backend: str, p: Problem) -> Check:
    rows = nvfp4_cases.quantise(p)
    cache = nvfp4_cases.paged(p, rows)
    wrapper = paged_wrapper(p, cache, f"quire:{backend}")
    plan_paged(wrapper, p, cache, plan={"kv_data_type": torch.uint8})
    result = wrapper.run(p.q, cache.kv, kv_cache_sf=cache.sf, return_lse=True)
    return lambda: p.check(*result)


def merged() -> Check:
    v, s = torch.randn(9, 4, 2, 64).half(), torch.randn(9, 4, 2)
    found, wanted = quire.merge_states(v, s), oracle.merge_states(v, s)

    def check() -> None:
        torch.testing.assert_close(found[0].double(), wanted.o, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(found[1].double(), wanted.lse, atol=1e-5, rtol=1e-5)

    return check


def appended() -> Check:
    """Tokens of two requests to pages in any order."""
    key, value = torch.randn(2, 29, 2, 64).half()
    cache = torch.full((6, 2, 8, 2, 64), float("nan"), dtype=torch.float16)
    pages, requests = torch.tensor([5, 0, 3, 4, 1], dtype=torch.int32), torch.tensor([0] * 21 + [1] * 8)
    places = torch.cat([torch.arange(21), torch.arange(3, 11)])
    indptr, last = torch.tensor([0, 3, 5], dtype=torch.int32), torch.tensor([5, 3], dtype=torch.int32)
    quire.append_paged_kv_cache(key, value, requests.int(), places.int(), cache, pages, indptr, last)

    def check() -> None:
        page = pages[indptr[requests] + places // 8].long()
        for half, given in enumerate((key, value)):
            assert torch.equal(cache[page, half, places % 8], given)
        assert int(cache.isnan().sum()) == cache.numel() - key.numel() - value.numel()

    return check


@dataclass(frozen=True)
class Case:
    """A call, what checks its result, and the variant that it runs."""

    run: Callable[[], Check]
    slug: str


LENS = (20, 9), (150, 70)
DECODE = (1, 1), (150, 70)
CASES = {
    "prefill, causal, paged, bf16": Case(
        lambda: paged("fa2", Problem(*LENS, 8, 2, 128, dtype=BF16, causal=True)),
        "attention_fa2.sm80.bf16-bf16-bf16.d128-128.paged.causal.m64",
    ),
    "prefill, window, ragged, fp16": Case(
        lambda: ragged("fa2", Problem((70, 9), (150, 70), 4, 2, 64, dtype=FP16, causal=True, window_left=40)),
        "attention_fa2.sm80.fp16-fp16-fp16.d64-64.ragged.causal-window.m128",
    ),
    "prefill, heads of 256 dims, soft cap, sinks": Case(
        lambda: paged(
            "fa2", Problem((40, 9), (100, 70), 4, 2, 256, dtype=BF16, causal=True, soft_cap=20.0), 5,
            sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]),
        ),
        "attention_fa2.sm80.bf16-bf16-bf16.d256-256.paged.causal-cap.m64",
    ),
    "prefill, custom mask": Case(
        lambda: paged("fa2", Problem(*LENS, 8, 2, 128, dtype=BF16).random_mask()),
        "attention_fa2.sm80.bf16-bf16-bf16.d128-128.paged.custom.m64",
    ),
    "decode, bf16": Case(
        lambda: paged("decode", Problem((1, 1, 1), (290, 0, 70), 8, 2, 128, dtype=BF16)),
        "attention_decode.sm80.bf16-bf16-bf16.d128-128.paged.none.m16",
    ),
    "decode, e4m3": Case(
        lambda: paged("decode", Problem(*DECODE, 8, 2, 128, dtype=BF16, kv_dtype=E4M3)),
        "attention_decode.sm80.bf16-e4m3-bf16.d128-128.paged.none.m16",
    ),
    "decode, 4 bits": Case(
        lambda: of_4_bits("decode", Problem(*DECODE, 8, 2, 128, dtype=BF16)),
        "attention_decode.sm80.bf16-nvfp4-bf16.d128-128.paged.none.m16",
    ),
    "latents": Case(
        lambda: of_latents(Latents((1, 1), (150, 40), 16, BF16)),
        "attention_mla_fa2.sm80.bf16-bf16-bf16.d576-512.paged.none.m16",
    ),
    "heads of 512 dims": Case(
        lambda: paged("wide", Problem((20, 9), (90, 70), 4, 1, 512, dtype=BF16, causal=True)),
        "attention_wide.sm80.bf16-bf16-bf16.d512-512.paged.causal.m64",
    ),
    "flex": Case(flex, "attention_fa2.sm80.bf16-bf16-bf16.d64-64.ragged.causal-expr0741bb3a3676c5cb.m64"),
    "merge": Case(merged, "merge.sm80.fp16.v8"),
    "append": Case(appended, "append.sm80.u16.v8"),
}  # fmt: skip
#: Of whose problems keys are divided, and what is computed of the parts is merged.
DIVIDED = {"prefill, causal, paged, bf16", "prefill, window, ragged, fp16", "decode, bf16", "latents"}
#: More features of the same kernels.
MORE = {
    "prefill, e4m3": Case(
        lambda: paged("fa2", Problem(*LENS, 8, 2, 128, dtype=BF16, kv_dtype=E4M3, causal=True)),
        "attention_fa2.sm80.bf16-e4m3-bf16.d128-128.paged.causal.m64",
    ),
    "prefill, 4 bits": Case(
        lambda: of_4_bits("fa2", Problem(*LENS, 8, 2, 128, dtype=BF16)),
        "attention_fa2.sm80.bf16-nvfp4-bf16.d128-128.paged.none.m64",
    ),
    "prefill, RoPE": Case(
        lambda: paged(
            "fa2", Problem(*LENS, 8, 2, 128, dtype=BF16, causal=True, pos_encoding_mode="ROPE_LLAMA", rope_scale=2.0,
                         rope_theta=1e4),
        ),
        "attention_fa2.sm80.bf16-bf16-bf16.d128-128.paged.causal-rope.m64",
    ),
    "prefill, ALiBi": Case(
        lambda: paged("fa2", Problem(*LENS, 8, 2, 64, dtype=BF16, causal=True, pos_encoding_mode="ALIBI")),
        "attention_fa2.sm80.bf16-bf16-bf16.d64-64.paged.causal-alibi.m64",
    ),
    "prefill, chunks": Case(
        lambda: paged("fa2", Problem(*LENS, 8, 2, 128, dtype=BF16, attention_chunk_size=32)),
        "attention_fa2.sm80.bf16-bf16-bf16.d128-128.paged.chunked-window.m64",
    ),
    "decode, RoPE": Case(
        lambda: paged(
            "decode", Problem(*DECODE, 8, 2, 128, dtype=BF16, pos_encoding_mode="ROPE_LLAMA", rope_scale=2.0,
                            rope_theta=1e4),
        ),
        "attention_decode.sm80.bf16-bf16-bf16.d128-128.paged.none-rope.m16",
    ),
    "decode, e5m2": Case(
        lambda: paged("decode", Problem((4, 4), (150, 70), 8, 2, 128, dtype=FP16, kv_dtype=E5M2, causal=True)),
        "attention_decode.sm80.fp16-e5m2-fp16.d128-128.paged.causal.m16",
    ),
    "decode, drafts": Case(
        lambda: paged("decode", Problem((8, 8), (150, 70), 8, 2, 128, dtype=BF16, causal=True)),
        "attention_decode.sm80.bf16-bf16-bf16.d128-128.paged.causal.m32",
    ),
    "decode, heads of 512 dims": Case(
        lambda: paged("decode", Problem(*DECODE, 4, 1, 512, dtype=BF16)),
        "attention_decode.sm80.bf16-bf16-bf16.d512-512.paged.none.m16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_kernels_are_right(name: str) -> None:
    case = {**CASES, **MORE}[name]
    with simulated() as gpu:
        case.run()()
    assert case.slug in gpu.launched
    if name in DIVIDED:
        assert any(text.startswith("atom") for text in gpu.executed), "no merge"


def test_memory_is_that_of_tensors_that_have_some() -> None:
    """Of other tests' traces there may be fake ones."""
    real = torch.ones(7)
    with FakeTensorMode():
        fake = torch.ones(7)
    found = storages()
    assert fake.is_cpu and found[real.data_ptr()] == 28


@pytest.mark.parametrize(
    ("name", "turns"),
    [
        ("prefill, causal, paged, bf16", Turns.FIRST),
        ("decode, bf16", Turns.LAST),
        pytest.param("latents", Turns.FIRST, marks=pytest.mark.slow),
        pytest.param("latents", Turns.LAST, marks=pytest.mark.slow),
        pytest.param("prefill, custom mask", Turns.LAST, marks=pytest.mark.slow),
        pytest.param("heads of 512 dims", Turns.LAST, marks=pytest.mark.slow),
    ],
)
def test_kernels_are_right_whichever_warp_is_first(name: str, turns: Turns) -> None:
    with simulated(turns=turns):
        CASES[name].run()()


@pytest.mark.parametrize("kv_dtype", [None, E4M3], ids=str)
def test_a_cta_announces_consecutive_parts_of_a_request_at_once(
    kv_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits are those of as many CTAs as there are parts."""
    p = Problem((1, 1, 1), (900, 0, 500), 8, 2, 128, dtype=BF16, kv_dtype=kv_dtype)
    plan = {"fixed_split_size": 128, **({} if kv_dtype is None else {"kv_data_type": kv_dtype})}
    results = []
    for sms in (2, 40):
        monkeypatch.setattr(simulation, "SMS", sms)
        with simulated() as gpu:
            results.append(decode(p, p.paged(16), "quire:decode", plan=plan))
        assert any(text.startswith("atom") for text in gpu.executed)
        p.check(*results[-1])
    assert all(torch.equal(few, many) for few, many in zip(*results, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm86", "sm89", "sm120a"])
def test_kernels_for_other_gpus(target: str) -> None:
    """PTX of the level of each, with the tiles for its shared memory."""
    with simulated(target) as gpu:
        paged("fa2", Problem(*LENS, 8, 2, 256, dtype=BF16, causal=True))()
        paged("decode", Problem(*DECODE, 8, 2, 128, dtype=BF16, kv_dtype=E4M3))()
        of_latents(Latents((1, 1), (150, 40), 16, BF16))()
    assert {slug.split(".")[1] for slug in gpu.launched} == {target}


# --- kernels that are wrong ------------------------------------------------------------------------------------------


def replace(pattern: str, by: str | Callable[[re.Match[str]], str], count: int = 0) -> Edit:
    """An edit of PTX, which must find something."""

    def edit(text: str) -> str:
        edited, found = re.subn(pattern, by, text, count=count)
        assert found or "mma.sync" not in text, f"{pattern}: not in the kernel"
        return edited

    return edit


_OTHER = {"gt": "ge", "ge": "gt", "lt": "le", "le": "lt"}
#: The limit of what a row sees, and the logit that it hides.
_HIDDEN = r"setp\.(gt|ge|lt|le)\.s32(\s+(%p\d+), %r\d+, \d+;\s+selp\.f32\s+%f\d+, %f\d+, 0fFF800000, \3;)"
_PREFILL, _DECODE = "prefill, causal, paged, bf16", "decode, bf16"
WRONG: dict[str, tuple[str, Edit, Turns]] = {
    "two registers of a fragment of A change places": (
        _PREFILL, replace(r"(mma\.[^{]*\{[^}]*\}, \{%r\d+, )(%r\d+), (%r\d+)", r"\1\3, \2", 1), Turns.NONE,
    ),
    "two registers of a fragment of B change places": (
        _DECODE, replace(r"(mma\.[^{]*\{[^}]*\}, \{[^}]*\}, )\{(%r\d+), (%r\d+)\}", r"\1{\3, \2}", 1), Turns.NONE,
    ),
    "values are not transposed": (_PREFILL, replace(r"(ldmatrix\S*)\.trans", r"\1", 1), Turns.NONE),
    "keys are transposed": (_DECODE, replace(r"(ldmatrix\S*\.x4)\.shared", r"\1.trans.shared", 1), Turns.NONE),
    "the mask hides one key more or less": (
        _PREFILL, replace(_HIDDEN, lambda m: f"setp.{_OTHER[m[1]]}.s32{m[2]}"), Turns.NONE,
    ),
    "a row's maximum is taken of other lanes": (
        _PREFILL, replace(r"shfl\.sync\.bfly", "shfl.sync.down"), Turns.NONE,
    ),
    "copies are not waited for": (
        _DECODE, replace(r"cp\.async\.wait_group\s+\d+", "cp.async.wait_group 99"), Turns.NONE,
    ),
    "weights are no exponentials": (
        _PREFILL, replace(r"ex2\.approx\.ftz\.f32(\s+%f\d+), (%f\d+)", r"mul.f32\1, \2, 0f3F800000"), Turns.NONE,
    ),
    "there are no barriers": (_PREFILL, replace(r"\bbar\.sync\s+0", "bar.warp.sync -1"), Turns.FIRST),
    "there are no barriers in decode": (_DECODE, replace(r"\bbar\.sync\s+0", "bar.warp.sync -1"), Turns.LAST),
    "a copy reads a gigabyte further on": (
        _DECODE, replace(r"(cp\.async\.cg\S*\s+\[%r\d+\], \[%rd\d+)\]", r"\1+1073741824]", 1), Turns.NONE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_kernels_that_are_wrong_are_found(name: str) -> None:
    """By the comparison, or because no GPU could do that."""
    case, edit, turns = WRONG[name]
    with simulated(edit=edit, turns=turns), pytest.raises((AssertionError, Fault)) as caught:
        CASES[case].run()()
    assert "not in the kernel" not in str(caught.value) and "not known here" not in str(caught.value)
