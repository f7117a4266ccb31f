"""Mistakes of newcomers, and of those who come from another library: each message says what to write instead.

A message of grade 3 has the cure, of grade 2 what was expected and what was passed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import quire
from problems import ints
from quire.cli import main
from quire.compat import flash_attn, flash_attn_interface


def i32(*values: int) -> Tensor:
    return ints(values, "cpu")


WORKSPACE = torch.empty(1 << 20, dtype=torch.uint8)
Q, K, V = torch.randn(10, 8, 64), torch.randn(30, 2, 64), torch.randn(30, 2, 64)
CACHE = torch.randn(8, 2, 16, 2, 64)
TABLES = i32(0, 3, 4), i32(4, 2, 0, 7), i32(5, 16)  #: two requests of 37 and 16 tokens
ROWS = torch.randn(2, 8, 64)
BATCH = Q[None], K[None], V[None]
HEADS_FIRST = torch.randn(1, 8, 10, 64), torch.randn(1, 2, 30, 64), torch.randn(1, 2, 30, 64)


def decode(tables: Any = TABLES, dtype: Any = torch.float32, layout: str = "NHD", **options: Any) -> Any:
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, layout)
    wrapper.plan(*tables, 8, 2, 64, 16, q_data_type=dtype, **options)
    return wrapper


def prefill(**options: Any) -> Any:
    wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(i32(0, 3, 7), *TABLES, 8, 2, 64, 16, q_data_type=torch.float32, **options)
    return wrapper


def single(q: Any = Q, k: Any = K, v: Any = V, **options: Any) -> Any:
    return quire.single_prefill_with_kv_cache(q, k, v, **options)


def scored(**functions: Any) -> Any:
    return single(variant=quire.Variant(**functions))


class Mistake(NamedTuple):
    name: str
    call: Callable[[], Any]
    cure: str  #: what the message says to do; "" where it says what was expected and what was passed
    error: type[Exception] = quire.errors.ValidationError
    says: tuple[str, ...] = ()  #: what else is in it


Unsupported, Plan = quire.errors.UnsupportedError, quire.errors.PlanError
MISTAKES = [
    # words of other libraries
    Mistake("is_causal", lambda: single(is_causal=True), "write causal=... here", TypeError),
    Mistake("attn_mask", lambda: single(attn_mask=torch.ones(10, 30).bool()), "write custom_mask=...", TypeError),
    Mistake("scale", lambda: single(scale=0.1), "write sm_scale=... here", TypeError),
    Mistake("softmax_scale", lambda: single(softmax_scale=0.1), "write sm_scale=... here", TypeError),
    Mistake("score_mod", lambda: single(score_mod=abs), "quire.flex_attention() takes it", TypeError),
    Mistake("dropout", lambda: single(dropout_p=0.1), "leave it out: Quire is for inference only", TypeError),
    Mistake("window_size", lambda: single(window_size=(5, 0)), "write window_left=... here", TypeError),
    Mistake("kv_dtype of plan()", lambda: decode(kv_dtype=torch.float32), "write kv_data_type=... here", TypeError),
    Mistake("a misspelt keyword", lambda: prefill(causl=True), "did you mean causal?", TypeError),
    Mistake(
        "causal of run()", lambda: prefill().run(Q[:7], CACHE, causal=True), "it is causal=... of plan()", TypeError
    ),
    Mistake(
        "layout",
        lambda: quire.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, layout="NHD"),
        "write kv_layout=",
        TypeError,
    ),
    Mistake(
        "lse of FlashAttention",
        lambda: decode().run(ROWS, CACHE, return_softmax_lse=True),
        "write return_lse=",
        TypeError,
    ),
    Mistake(
        "sm_scale of flash_attn_func()",
        lambda: flash_attn.flash_attn_func(*BATCH, sm_scale=0.1),
        "write softmax_scale=",
        TypeError,
    ),
    Mistake(
        "sm_scale of FlashAttention-3",
        lambda: flash_attn_interface.flash_attn_func(*BATCH, sm_scale=1.0),
        "write softmax_scale=",
        TypeError,
    ),
    # names that are not there
    Mistake("quire.sampling", lambda: quire.sampling, "flashinfer.sampling", AttributeError),  # type: ignore[attr-defined]
    Mistake(
        "from quire import sampling", lambda: exec("from quire import sampling"), "flashinfer.sampling", ImportError
    ),
    Mistake(
        "a misspelt class",
        lambda: quire.BatchDecodeWithPagedKvCacheWrapper,
        "Did you mean quire.BatchDecodeWithPagedKVCache",
        AttributeError,
    ),  # type: ignore[attr-defined]
    # shapes
    Mistake("queries of a batch", lambda: single(*BATCH), "flash_attn_func takes"),
    Mistake("queries of a batch in run()", lambda: decode().run(ROWS[:, None], CACHE), "flatten(0, 1)"),
    Mistake("heads first", lambda: single(*(t.transpose(0, 1) for t in (Q, K, V))), "q.transpose(0, 1)"),
    Mistake(
        "a cache in the other layout", lambda: decode().run(ROWS, CACHE.transpose(2, 3)), "make the wrapper with 'HND'"
    ),
    Mistake(
        "rows that were not planned",
        lambda: prefill().run(Q[:9], CACHE),
        "qo_indptr[-1]",
        says=("7 rows", "[9, 8, 64]"),
    ),
    Mistake("two rows a request", lambda: decode().run(Q[:4], CACHE), "q_len_per_req=n", says=("2 rows",)),
    Mistake(
        "heads that were not planned",
        lambda: decode().run(torch.randn(2, 16, 64), CACHE),
        "plan() was told num_qo_heads=8",
    ),
    Mistake("keys and values of other lengths", lambda: single(v=V[:20]), "a row for each of the same tokens"),
    Mistake("one request for flash_attn_func()", lambda: flash_attn.flash_attn_func(Q, K, V), "unsqueeze(0)"),
    Mistake("fewer KV heads in flex_attention()", lambda: quire.flex_attention(*HEADS_FIRST), "enable_gqa=True"),
    Mistake(
        "a head dim of 100",
        lambda: single(*(t[..., :1].expand(-1, -1, 100).contiguous() for t in (Q, K, V))),
        "pad with zeros to 104",
        Unsupported,
    ),
    Mistake("every second number", lambda: single(torch.randn(10, 8, 128)[..., ::2]), ".contiguous()"),
    # types
    Mistake(
        "the default type",
        lambda: decode(dtype=torch.float16).run(ROWS.bfloat16(), CACHE.bfloat16()),
        "q_data_type=torch.bfloat16",
    ),
    Mistake(
        "an 8-bit cache", lambda: decode().run(ROWS, CACHE.to(torch.float8_e4m3fn)), "kv_data_type=torch.float8_e4m3fn"
    ),
    Mistake("keys of another type", lambda: single(k=K.half(), v=V.half()), ".to() converts", Unsupported),
    Mistake("a float mask", lambda: single(custom_mask=torch.zeros(10, 30)), "quire.Variant(score=...)"),
    Mistake("a numpy array", lambda: single(np.zeros((10, 8, 64), np.float32)), "torch.from_numpy(q)"),
    Mistake(
        "page numbers in a list",
        lambda: decode((TABLES[0], [4, 2, 0, 7], TABLES[2])),
        "torch.tensor(paged_kv_indices, dtype=torch.int32)",
    ),
    Mistake("offsets that are floats", lambda: decode((TABLES[0].float(), *TABLES[1:])), ".to(torch.int32)"),
    Mistake(
        "the size of a workspace",
        lambda: quire.BatchDecodeWithPagedKVCacheWrapper(128 << 20),
        "torch.empty(128 * 1024 * 1024",
    ),  # type: ignore[arg-type]
    Mistake("a gradient", lambda: single(Q.clone().requires_grad_()), "torch.no_grad()"),
    # page tables
    Mistake(
        "run() before plan()",
        lambda: quire.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE).run(ROWS, CACHE),
        "call plan() first",
        Plan,
    ),
    Mistake(
        "a page that the cache has not",
        lambda: decode((TABLES[0], i32(4, 2, 99, 7), TABLES[2])).run(ROWS, CACHE),
        "",
        says=("below num_pages=8", "99 (page 2 of request 0)"),
    ),
    Mistake(
        "17 tokens in a page of 16",
        lambda: decode((*TABLES[:2], i32(5, 17))),
        "",
        says=("1..page_size=16", "17 at request 1"),
    ),
    Mistake("counts in place of offsets", lambda: decode((i32(3, 1), *TABLES[1:])), "0 first, then the sums"),
    Mistake(
        "a block table",
        lambda: decode((TABLES[0], i32(4, 2, 0, 7).view(2, 2), TABLES[2])),
        "trtllm_batch_decode_with_kv_cache",
    ),
    # choices
    Mistake(
        "a backend that is not there",
        lambda: single(backend="quire:fa3"),
        "expected auto or one of quire:cpu",
        Unsupported,
    ),
    Mistake("a negative window", lambda: single(window_left=-7), "-1 (none)"),
    # custom variants
    Mistake(
        "FlexAttention's arguments",
        lambda: scored(score=lambda score, b, h, q_idx, kv_idx: score),
        "b is request, and h is head",
    ),
    Mistake(
        "Python's if",
        lambda: scored(score=lambda score, q_idx: score if q_idx > 3 else -score),
        "use where(condition, a, b)",
    ),
    Mistake("a tensor of a closure", lambda: scored(score=lambda score: score + Q), "declare it in tensors="),
    Mistake(
        "an operand that is left out",
        lambda: scored(score=lambda score, cap: score * cap, scalars={"cap": float}),
        "as a keyword of single_prefill",
    ),
    Mistake("a mask of numbers", lambda: scored(mask=lambda q_idx, kv_idx: kv_idx - q_idx), "return a comparison"),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake.name for mistake in MISTAKES])
def test_what_to_do_is_said(mistake: Mistake) -> None:
    with pytest.raises(mistake.error) as caught:
        mistake.call()
    text = str(caught.value)
    assert mistake.cure in text
    assert all(word in text for word in mistake.says)
    assert mistake.cure or "got" in text


def test_most_messages_have_the_cure() -> None:
    assert len(MISTAKES) >= 45
    assert sum(bool(mistake.cure) for mistake in MISTAKES) >= 45
    assert all(mistake.cure or len(mistake.says) >= 2 for mistake in MISTAKES)


def test_errors_within_a_call_are_not_taken_for_those_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(**_: Any) -> None:
        (lambda: None)(is_causal=True)  # type: ignore[call-arg]

    monkeypatch.setattr("quire.engine.attention.AttentionCall.attend", wrong)
    with pytest.raises(TypeError) as caught:
        single()
    assert "write" not in str(caught.value)


# --- what is seen only if asked for ----------------------------------------------------------------------------------


def append(*positions: int) -> None:
    tokens = torch.ones(2, 2, 64)
    quire.append_paged_kv_cache(
        tokens, tokens, i32(0, 1), i32(*positions), CACHE.clone(), TABLES[1], TABLES[0], TABLES[2]
    )


def test_tokens_beyond_their_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    append(2, 60)  # skipped
    monkeypatch.setenv("QUIRE_CHECK_PAGES", "1")
    append(2, 15)
    with pytest.raises(
        quire.errors.ValidationError, match="below 16, as the pages of request 1 reach, for token 1, got 60; add"
    ):
        append(2, 60)
    monkeypatch.setenv("QUIRE_CHECK_PAGES", "yes")
    with pytest.raises(quire.errors.ValidationError, match="QUIRE_CHECK_PAGES"):
        append(2, 15)


@pytest.mark.parametrize("page", [99, -1])
def test_tables_name_the_request_and_the_page(page: int) -> None:
    tables = i32(0, 1, 2, page).view(2, 2)
    q = torch.randn(2, 8, 64)
    with pytest.raises(quire.errors.ValidationError, match=rf"{page} \(page 1 of request 1\)"):
        flash_attn.flash_attn_with_kvcache(
            q[:, None], CACHE[:, 0], CACHE[:, 1], cache_seqlens=i32(20, 20), block_table=tables
        )
    with pytest.raises(quire.errors.ValidationError, match=rf"{page} \(page 1 of request 1\)"):
        quire.trtllm_batch_decode_with_kv_cache(q, CACHE, WORKSPACE, tables, i32(20, 20), 20, kv_layout="NHD")
    with pytest.raises(
        quire.errors.ValidationError, match=rf"{page} \(page 3 of request 1\)|{page} \(page 0 of request 1\)"
    ):
        quire.append_paged_kv_cache(
            torch.ones(1, 2, 64), torch.ones(1, 2, 64), i32(0), i32(3), CACHE.clone(), i32(4, 2, 0, page), TABLES[0],
            TABLES[2],
        )  # fmt: skip


@pytest.mark.gpu
def test_page_numbers_on_a_gpu_are_checked_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    monkeypatch.setenv("QUIRE_CHECK_PAGES", "1")
    cache, q = CACHE.half().cuda(), ROWS.half().cuda()
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE.cuda())
    wrapper.plan(TABLES[0], i32(4, 2, 99, 7).cuda(), TABLES[2], 8, 2, 64, 16)
    with pytest.raises(quire.errors.ValidationError, match=r"99 \(page 2 of request 0\)"):
        wrapper.run(q, cache)
    tables = i32(0, 1, 2, 99).view(2, 2).cuda()
    with pytest.raises(quire.errors.ValidationError, match=r"99 \(page 1 of request 1\)"):
        quire.trtllm_batch_decode_with_kv_cache(
            q, cache, WORKSPACE.cuda(), tables, i32(20, 20).cuda(), 20, kv_layout="NHD"
        )
    with pytest.raises(quire.errors.ValidationError, match="for token 1, got 60"):
        quire.append_paged_kv_cache(
            cache[0, 0, :2], cache[0, 0, :2], i32(0, 1).cuda(), i32(2, 60).cuda(), cache.clone(),
            *(t.cuda() for t in (TABLES[1], TABLES[0], TABLES[2])),
        )  # fmt: skip


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "cure"),
    [
        ("warmup --dtype bfloat", "did you mean 'bfloat16'?"),
        ("warmup --kv-dtype fp9", "fp8 is e4m3"),
        ("warmup --mask casual", "did you mean 'causal'?"),
        ("plan-for meta-llama/Llama-3.1-8B", "hf download meta-llama/Llama-3.1-8B config.json"),
        ("warmup --arch hoper", "did you mean 'hopper'?"),
        ("cache lst", "did you mean 'list'?"),
    ],
)
def test_what_to_write_on_the_command_line_is_said(line: str, cure: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: Any = main(line.split())
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert cure in capsys.readouterr().err
