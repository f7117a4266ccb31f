"""Checks of arguments: what a kernel cannot read or write is refused by name, with what to do."""

from __future__ import annotations

import inspect
import math
import sys

import pytest
import torch

import quire
from problems import ints, workspace
from quire.engine import tensors
from quire.engine.checks import (
    batch_size_of,
    check_dtype,
    check_output,
    check_positive,
    check_tensor,
    device_indices,
    float_sinks,
    host_indices,
    number,
    refuse,
    scalar,
    to_int32,
)
from quire.kernels.features import dtype_of

FLOAT = torch.zeros(4, 4)


def refused(call, *words):
    """A ValidationError whose text has the words."""
    with pytest.raises(quire.ValidationError) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("tensor", "word"),
    [
        (torch.zeros(3, requires_grad=True), "no_grad"),
        (torch.zeros(3, dtype=torch.complex64), "view_as_real"),
        (torch._neg_view(torch.zeros(3)), "resolve_neg"),
        (torch.zeros(3, device="meta"), "data"),
        (torch.eye(3).to_sparse(), "sparse"),
        ([0.0], "list"),
    ],
    ids=["grad", "complex", "negated", "meta", "sparse", "list"],
)
def test_tensors_that_are_not_numbers_in_memory(tensor, word):
    refused(lambda: check_tensor(tensor, "q"), "q: ", word)


def test_tensors_whose_memory_was_freed():
    """Without elements there is nothing to read: an address of 0 is then right."""
    freed = torch.zeros(3)
    freed.untyped_storage().resize_(0)
    refused(lambda: check_tensor(freed, "q"), "q: ", "freed")
    check_tensor(torch.zeros(0, 4), "q")


def test_tensors_inside_vmap_have_no_memory():
    refused(lambda: torch.vmap(lambda row: check_tensor(row, "q"))(FLOAT), "q: ", "vmap")


def test_a_gradient_is_not_needed_without_grad_mode():
    with torch.no_grad():
        check_tensor(torch.zeros(3, requires_grad=True), "q")


@pytest.mark.parametrize(
    "shape_and_strides",
    [((4, 4), (0, 1)), ((4, 4), (4, 0)), ((4, 4), (2, 1)), ((2, 3, 4), (4, 4, 1)), ((3, 4), (4, 2))],
    ids=str,
)
def test_outputs_whose_elements_share_memory(shape_and_strides):
    shape, strides = shape_and_strides
    overlapping = torch.zeros(64).as_strided(shape, strides)
    refused(lambda: check_output(overlapping, "out"), "out: ", "strides")


@pytest.mark.parametrize(
    "shape_and_strides",
    [((4, 4), (4, 1)), ((4, 4), (1, 4)), ((1, 4), (0, 1)), ((4, 0), (0, 1)), ((2, 3, 4), (1, 16, 3)), ((), ())],
    ids=str,
)
def test_outputs_whose_elements_do_not(shape_and_strides):
    check_output(torch.zeros(64).as_strided(*shape_and_strides), "out")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("uses_spcompress", "each key that a query sees counts"),
        ("profiler_buffer", "torch.profiler"),
        ("other", "not supported by this call"),
    ],
)
def test_what_has_no_use_is_refused_with_its_reason(name, reason):
    refused(lambda: refuse(**{name: FLOAT}), f"{name}: ", reason, "expected None")
    refuse(**{name: None})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38, -1e39, 2**2000, "1.5", b"1", 1j, [1.0]])
def test_scales_that_float32_does_not_hold(value):
    refused(lambda: scalar(value, "v_scale"), "v_scale: ")


@pytest.mark.parametrize("value", [0.0, -1.0, 1e-46, torch.tensor(0.0)])
def test_scales_that_are_not_positive(value):
    refused(lambda: scalar(value, "sm_scale", positive=True), "sm_scale: expected a positive number, got")
    scalar(value, "v_scale")


def test_scales_that_are_right():
    assert scalar(None, "s") == 1.0 and scalar(2, "s") == 2.0 and scalar(torch.tensor([0.5]), "s") == 0.5
    assert scalar(-1e38, "s") == -1e38 and scalar(torch.tensor(3), "s", positive=True) == 3.0
    refused(lambda: scalar(torch.ones(2), "s"), "s: ", "[2]")
    assert number(2, "s") == 2.0
    refused(lambda: number(None, "s"), "s: expected a number, got None")


@pytest.mark.parametrize(
    "value", [0, -1, 2**31, 1.0, "3", None, True, torch.tensor([1, 2]), torch.tensor(1.5)], ids=str
)
def test_numbers_that_are_not_positive_integers(value):
    refused(lambda: check_positive(value, "page_size"), "page_size: ")


def test_integers_of_one_element():
    assert check_positive(torch.tensor(3), "page_size") == 3


@pytest.mark.parametrize("value", [-(2**63), 2**31, -(2**31) - 1])
def test_indices_beyond_int32(value):
    """abs() of the least int64 is negative."""
    refused(lambda: to_int32(torch.tensor([0, value]), "kv_indptr"), "kv_indptr: ", str(value))


@pytest.mark.parametrize(
    "value", [torch.zeros(0, dtype=torch.int32), ints([0], "cpu").to_sparse(), ints([0], "meta"), ["a"], 3.5, None]
)
def test_offsets_that_are_none(value):
    refused(lambda: batch_size_of(host_indices(value, "indptr"), "indptr"), "indptr: ")


def freed(numbers):
    """int32, whose storage was freed."""
    tensor = ints(numbers, "cpu")
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    "value",
    [
        *(freed([1, 2]), torch._neg_view(ints([1], "cpu")), ints([0], "cpu").to_sparse(), ints([0], "meta")),
        *(ints([[1, 2]], "cpu"), FLOAT[0], [3], None),
    ],
)
def test_page_numbers_that_are_none(value):
    refused(lambda: device_indices(value, "paged_kv_indices"), "paged_kv_indices: ")


def test_page_numbers_stay_where_they_are():
    """Except that int64 and strided ones are copied."""
    pages, wide = ints([4, 0, 2], "cpu"), torch.tensor([[4, 9], [0, 9], [2, 9]], dtype=torch.int64)[:, 0]
    assert device_indices(pages, "paged_kv_indices") is pages
    taken = device_indices(wide, "paged_kv_indices")
    assert taken.equal(pages) and taken.dtype is torch.int32 and taken.is_contiguous()
    assert device_indices(pages[:0], "paged_kv_indices").numel() == 0


def test_offsets_on_a_list_are_read_whatever_the_default_device_is():
    with torch.device("meta"):
        offsets = host_indices([0, 2, 5], "indptr")
    assert offsets.tolist() == [0, 2, 5] and offsets.dtype is torch.int32 and batch_size_of(offsets, "indptr") == 2


def test_a_dtype_that_was_not_planned_says_how_to_plan_it():
    text = "q_data_type=torch.bfloat16"
    refused(lambda: check_dtype(FLOAT.bfloat16(), "q", dtype_of("float16", "q")), "q: ", "default", text)
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    wrapper.plan(ints([0, 1], "cpu"), ints([0], "cpu"), ints([1], "cpu"), 4, 1, 64, 16)
    q, cache = torch.zeros(1, 4, 64, dtype=torch.bfloat16), torch.zeros(1, 2, 16, 1, 64, dtype=torch.bfloat16)
    refused(lambda: wrapper.run(q, cache), text)


@pytest.mark.parametrize(("name", "value"), [("sm_scale", -1), ("sm_scale", 0), ("logits_soft_cap", -1)])
def test_the_logits_option_that_is_wrong_is_named_alone(name, value):
    q, k = torch.zeros(4, 64), torch.zeros(9, 1, 64)
    with pytest.raises(quire.ValidationError, match=f"^{name}: expected a positive number") as caught:
        quire.single_decode_with_kv_cache(q, k, k, **{name: value})
    assert ("sm_scale" in str(caught.value)) == (name == "sm_scale")


INDEX_ARRAYS = {"qo_indptr": [0, 1], "paged_kv_indptr": [0, 1], "kv_indptr": [0, 3], "paged_kv_indices": [0]}
INDEX_ARRAYS |= {"paged_kv_last_page_len": [3], "indptr": [0, 1], "indices": [0], "last_page_len": [3]}
ITEMS = {"prefix_len_ptr": torch.zeros(1, dtype=torch.int32).view(torch.uint32), "token_pos_in_items_len": 32}
ITEMS["token_pos_in_items_ptr"] = torch.zeros(32, dtype=torch.int16).view(torch.uint16)
REFUSED = {"rope_scale", "rope_theta", "v_indptr", "o_indptr"}
#: Arguments of plan(), a value unlike the default, and where the plan has it.
TAKEN = {
    "causal": (True, lambda o: o.causal),
    "sm_scale": (0.3, lambda o: o.logits.sm_scale),
    "window_left": (7, lambda o: o.logits.window_left),
    "logits_soft_cap": (5.0, lambda o: o.logits.logits_soft_cap),
    "kv_data_type": ("float8_e4m3fn", lambda o: o.types.kv.slug.replace("e4m3", "float8_e4m3fn")),
    "fixed_split_size": (256, lambda o: o.fixed_split_size),
    "attention_chunk_size": (48, lambda o: o.logits.attention_chunk_size),
}
WRONG = {
    "uniform_q_len": 0,
    "num_qo_heads": 5, "num_kv_heads": 0, "head_dim_qk": -1, "head_dim_vo": 0, "page_size": -2, "head_dim": 0,
    "o_data_type": "f17", "q_data_type": "f18", "data_type": "f19", "pos_encoding_mode": "ROPE", "q_len_per_req": -3,
    "use_fp16_qk_reduction": "no", "allow_fp16_qk_reduction": "no", "non_blocking": 1, "disable_split_kv": 2,
    "custom_mask": "mask", "packed_custom_mask": "mask", "seq_lens": 3, "seq_lens_q": 3, "block_tables": 3,
    "max_token_per_sequence": 0, "max_sequence_kv": -1, "prefix_len_ptr": 3, "token_pos_in_items_ptr": 3,
    "token_pos_in_items_len": -1, "max_item_len_ptr": 3, "shared_prefix": "always",
    "window_right": 1, "is_causal": True,
}  # fmt: skip


def _plans():
    for cls in (
        quire.BatchPrefillWithPagedKVCacheWrapper,
        quire.BatchPrefillWithRaggedKVCacheWrapper,
        quire.BatchDecodeWithPagedKVCacheWrapper,
    ):
        for name, parameter in inspect.signature(cls.plan).parameters.items():
            if name != "self" and name not in INDEX_ARRAYS and parameter.kind is not parameter.VAR_KEYWORD:
                yield pytest.param(cls, name, id=f"{cls.__name__}-{name}")


@pytest.mark.parametrize(("cls", "name"), [*_plans()])
def test_each_argument_of_plan_arrives_under_its_name(cls, name, monkeypatch):
    """Thirty of them are handed on: none takes another one's place."""
    names = inspect.signature(cls.plan).parameters
    right = {n: ints(v, "cpu") for n, v in INDEX_ARRAYS.items() if n in names}
    right |= {"num_qo_heads": 4, "num_kv_heads": 2, "q_data_type": torch.float32}
    right |= {"page_size": 16} if "page_size" in names else {}
    right |= ITEMS if "_item" in name or name == "prefix_len_ptr" else {}
    if name != "head_dim":
        right["head_dim_qk" if "head_dim_qk" in names else "head_dim"] = 64
    wrapper = cls(workspace("cpu"))
    if name in TAKEN:
        value, found = TAKEN[name]
        specs = []
        monkeypatch.setattr(wrapper, "set_plan", specs.append)
        wrapper.plan(**{**right, name: value})
        assert found(specs[0].options) == value
        return
    value = 3 if name in REFUSED else WRONG[name]
    changed = {**right, name: value}
    if name == "data_type":
        del changed["q_data_type"]
    refused(lambda: wrapper.plan(**changed), name)


@pytest.mark.parametrize(
    ("indptr", "indices", "last", "words"),
    [
        ([0, 3, 4], [[4, 2, 0], [7, -1, -1]], [5, 16], ["paged_kv_indices: ", "1-D", "row for each request"]),
        ([3, 1], [4, 2, 0, 7], [5, 16], ["last_page_len: expected [batch_size=1]", "0 first"]),
    ],
    ids=["a block table", "counts of pages"],
)
def test_page_tables_in_other_libraries_forms(indptr, indices, last, words):
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    refused(lambda: wrapper.plan(ints(indptr, "cpu"), ints(indices, "cpu"), ints(last, "cpu"), 8, 2, 64, 16), *words)


def test_a_cache_in_the_other_layout_names_kv_layout():
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    wrapper.plan(*(ints(x, "cpu") for x in ([0, 1], [0], [5])), 8, 2, 64, 16)
    cache = torch.zeros(1, 2, 2, 16, 64, dtype=torch.float16)
    refused(lambda: wrapper.run(torch.zeros(1, 8, 64, dtype=torch.float16), cache), "page_size=16", "'HND'")


def test_calls_without_a_plan_name_their_own_arguments():
    q, k = torch.zeros(2, 8, 64, dtype=torch.float64), torch.zeros(2, 2, 64, dtype=torch.float64)
    refused(lambda: quire.single_prefill_with_kv_cache(q, k, k), "q: expected one of float32", "float64")


def test_sinks_that_are_no_tensor():
    with pytest.raises(quire.ValidationError, match=r"^s_aux: expected a tensor \[num_heads\] or None, got 1.0"):
        float_sinks(1.0, "s_aux")
    assert float_sinks(None, "s_aux") is None
    assert float_sinks(torch.ones(2, dtype=torch.float16), "s_aux").dtype is torch.float32


# --- signatures ------------------------------------------------------------------------------------------------------


class WrongGuards:
    """A check of torch's that has changed: it takes all tensors, none, or other arguments."""

    answer: object = True

    def __init__(self, *_, dynamic_dims_sizes, dynamic_dims_strides):
        if self.answer is TypeError:
            raise TypeError("expected other arguments")

    def check(self, *_):
        if self.answer is RuntimeError:
            raise RuntimeError("it has changed")
        return self.answer


@pytest.fixture
def forgotten():
    tensors._guards_work.cache_clear()
    yield
    tensors._guards_work.cache_clear()


@pytest.mark.parametrize("answer", [True, False, None, TypeError, RuntimeError])
def test_guards_that_have_changed_are_not_used(answer, monkeypatch, forgotten):
    guards = pytest.importorskip("torch._C._dynamo.guards")
    monkeypatch.setattr(guards, "TensorGuards", WrongGuards)
    monkeypatch.setattr(WrongGuards, "answer", answer)
    assert not tensors._guards_work()
    one, other = torch.zeros(2, 3), torch.zeros(3, 2)
    assert tensors.Signature([one, other]).fits(one.clone(), other.clone())
    assert not tensors.Signature([one, other]).fits(other, one)


def test_guards_are_used_where_torch_has_them(forgotten, monkeypatch):
    assert tensors._guards_work()
    monkeypatch.setitem(sys.modules, "torch._C._dynamo.guards", None)
    tensors._guards_work.cache_clear()
    assert not tensors._guards_work()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("kind", ["_guards", "_comparison"])
@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_signatures(kind, count, monkeypatch):
    monkeypatch.setattr(tensors, "_guards_work", lambda: kind == "_guards")
    known = [torch.zeros(2, 3, 4) for _ in range(count)]
    fits = tensors.Signature(known).fits
    assert fits(*(tensor.clone() for tensor in known))
    for wrong in (
        torch.zeros(2, 3, 5), torch.zeros(2, 3, 4, dtype=torch.float16), torch.zeros(4, 3, 2).mT, None, 3,
        torch.nested.nested_tensor([known[0]]), torch.nested.nested_tensor(list(known[0])),
        torch.zeros(2, 3, 4).to_sparse(), torch.zeros(2, 3, 4, device="meta"),
    ):  # fmt: skip
        for place in range(count):
            assert not fits(*known[:place], wrong, *known[place + 1 :])
