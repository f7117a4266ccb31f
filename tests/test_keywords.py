"""What all public callables say about keywords that they do not take."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

import quire
from quire import errors
from quire.compat import flash_attn_interface

#: Modules of public names, beside quire itself.
MODULES = (
    "compat.flash_attn", "compat.flash_attn_interface", "compat.flash_mla", "compat.deep_gemm", "distributed",
    "compat.context_parallel", "compat.flashinfer.parallel_attention", "attention.variants", "attention.viz",
    "cache.rope", "cache.page", "calls.xqa", "calls.cudnn",
)  # fmt: skip
UNKNOWN = "zzz"


class Callee(NamedTuple):
    name: str
    call: Callable[..., Any]
    keywords: tuple[str, ...]  #: that it takes
    takes_any: bool  #: operands of variants
    is_complete: bool  #: without arguments


def callee(name: str, call: Callable[..., Any]) -> Callee:
    parameters = inspect.signature(call).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    words = tuple(part.name for part in parameters if part.kind in named)
    takes_any = any(part.kind is part.VAR_KEYWORD for part in parameters)
    is_complete = all(part.default is not part.empty for part in parameters if part.kind in named)
    return Callee(name, call, words, takes_any, is_complete)


def methods(name: str, owner: type) -> Iterator[Callee]:
    """The constructor and public methods of several arguments, of an object that is not initialised: none gets far."""
    yield callee(name, owner)
    instance = tuple.__new__(owner) if issubclass(owner, tuple) else object.__new__(owner)
    for attribute, function in inspect.getmembers(
        owner, lambda part: inspect.isfunction(part) or inspect.ismethod(part)
    ):
        if not attribute.startswith("_") and inspect.unwrap(function).__module__.startswith("quire"):
            found = callee(f"{name}.{attribute}", getattr(instance, attribute))
            if len(found.keywords) > 1:
                yield found


def callees() -> Iterator[Callee]:
    known: set[int] = set()
    for module in (quire, *(importlib.import_module(f"quire.{name}") for name in MODULES)):
        for name in module.__all__:
            value = getattr(module, name)
            if id(value) in known or not (inspect.isroutine(value) or inspect.isclass(value)):
                continue
            known.add(id(value))
            if not inspect.isclass(value):
                yield callee(f"{module.__name__}.{name}", value)
            elif not issubclass(value, BaseException):
                yield from methods(f"{module.__name__}.{name}", value)


#: Calls that take operands, and fail for other reasons first, are made as wholes in tests/test_mistakes.py.
LATER = [each for each in callees() if each.takes_any and (each.is_complete or each.call.__name__ == "run")]
CALLEES = [each for each in callees() if each.keywords and each.name not in {later.name for later in LATER}]


def misspelt(word: str) -> str:
    return f"{word[:-1]}_{word[-1]}" if len(word) > 5 else ""


def error_of(each: Callee, keyword: str) -> str:
    with pytest.raises(TypeError) as caught:
        each.call(**{keyword: None})
    return str(caught.value)


@pytest.mark.parametrize("each", CALLEES, ids=[each.name for each in CALLEES])
def test_unknown_keywords_are_explained(each: Callee) -> None:
    text = error_of(each, UNKNOWN)
    assert f"unexpected keyword argument '{UNKNOWN}'; " in text
    assert any(word in text for word in ("; expected one of ", "; help() of it shows")), text
    word = next(filter(None, map(misspelt, each.keywords)), None)
    if word is not None:
        text = error_of(each, word)
        assert f"unexpected keyword argument {word!r}; did you mean {word[:-2]}{word[-1]}?" in text


def test_there_are_many() -> None:
    assert len(CALLEES) > 180 and len(LATER) < 24
    names = {each.name for each in CALLEES}
    assert {"quire.flex_attention", "quire.apply_rope", "quire.append_paged_kv_cache", "quire.Variant"} <= names
    assert {"quire.distributed.RingAttention.plan", "quire.compat.flash_mla.flash_mla_with_kvcache"} <= names


@pytest.mark.parametrize(
    ("call", "keyword", "cure"),
    [
        (quire.flex_attention, "is_causal", "write it as a mask_mod: block_mask="),
        (quire.flex_attention, "sm_scale", "write scale="),
        (quire.flex_attention, "softcap", "write it into score_mod"),
        (quire.flex_attention, "dropout_p", "leave it out"),
        (quire.flex_attention, "kv_dtype", "leave it out: key has this type"),
        (quire.apply_rope, "rope_base", "write rope_theta="),
        (quire.apply_rope, "is_neox_style", "write interleave=not is_neox_style"),
        (quire.apply_rope_pos_ids, "positions", "write pos_ids="),
        (quire.apply_rope_pos_ids, "cos_sin_cache", "apply_rope_with_cos_sin_cache"),
        (quire.append_paged_kv_cache, "key", "write append_key="),
        (quire.append_paged_kv_cache, "slot_mapping", "get_batch_indices_positions"),
        (quire.append_paged_kv_cache, "block_table", "kv_indices has the pages"),
        (quire.append_paged_kv_cache, "kv_dtype", "paged_kv_cache has this type"),
        (quire.append_paged_mla_kv_cache, "kv_c", "write append_ckv="),
        (quire.BatchPrefillWithCausalBidirectionalRangesWrapper.run, "causal", "got an unexpected keyword"),
    ],
)
def test_words_of_other_libraries_are_known(call: Callable[..., Any], keyword: str, cure: str) -> None:
    with pytest.raises(TypeError, match="unexpected keyword") as caught:
        call(**{keyword: None})
    assert cure in str(caught.value)


def test_arguments_of_plan_are_not_those_of_run() -> None:
    wrapper = quire.BatchPrefillWithCausalBidirectionalRangesWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    with pytest.raises(TypeError, match=r"it is kv_data_type=\.\.\. of plan\(\)"):
        wrapper.run(None, None, kv_dtype=None)


def test_operands_of_a_variant_are_known() -> None:
    capped = quire.Variant(score=lambda score, limit: score * limit, scalars={"limit": float})
    q, k = torch.randn(2, 4, 64), torch.randn(3, 4, 64)
    with pytest.raises(TypeError, match=r"did you mean limit\?"):
        quire.single_prefill_with_kv_cache(q, k, k, variant=capped, limits=2.0)


def test_missing_arguments_under_another_name() -> None:
    wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    with pytest.raises(TypeError, match=r"'kv_indptr'; write paged_kv_indptr=\.\.\. here"):
        wrapper.plan(kv_indptr=None)
    with pytest.raises(TypeError, match="missing 2 required positional arguments: 'q' and 'k'"):
        quire.apply_rope(indptr=None, offsets=None)


def test_errors_of_other_calls_stay() -> None:
    def inner(*, known: int) -> int:
        return known

    namespace = {"outer": lambda: inner(unknown=1)}  # type: ignore[call-arg]
    errors.teach(namespace, ["outer"])
    with pytest.raises(TypeError) as caught:
        namespace["outer"]()
    assert str(caught.value).endswith("got an unexpected keyword argument 'unknown'")


def test_the_schedule_of_flash_attention_3_takes_no_unknown_keyword() -> None:
    lens = torch.tensor([20, 30], dtype=torch.int32)
    with pytest.raises(TypeError, match="'page_sizes'; did you mean page_size"):
        flash_attn_interface.get_scheduler_metadata(2, 1, 30, cache_seqlens=lens, num_heads=8, page_sizes=16)
