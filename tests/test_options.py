"""What plan()'s numbers and names say is looked up the second time, and never wrongly."""

from __future__ import annotations

import pytest
import torch

import quire
from problems import ints, workspace
from quire.engine.options import memoised

TABLE = ints([0, 2], "cpu"), ints([0, 1], "cpu"), ints([16], "cpu")
OPTIONS = {"num_qo_heads": 4, "num_kv_heads": 1, "head_dim": 64, "page_size": 16, "q_data_type": torch.bfloat16}


def plan(**changes: object) -> quire.BatchDecodeWithPagedKVCacheWrapper:
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    wrapper.plan(*TABLE, **{**OPTIONS, **changes})
    return wrapper


@pytest.mark.parametrize("change", [{"num_kv_heads": True}, {"num_kv_heads": 1.0}, {"disable_split_kv": 0}], ids=str)
def test_equal_is_not_the_same(change):
    """True, 1.0 and 1 are one key of a dict, and only one of them a number of heads."""
    plan()
    with pytest.raises(quire.ValidationError, match=next(iter(change))):
        plan(**change)


def test_a_tensor_is_read_each_time():
    scale = torch.tensor(0.5)
    assert plan(sm_scale=scale)._sm_scale == 0.5
    scale.fill_(0.25)
    assert plan(sm_scale=scale)._sm_scale == 0.25


def test_what_cannot_be_hashed_is_named():
    plan()
    with pytest.raises(quire.ValidationError, match="page_size"):
        plan(page_size=[16])


def test_memoised():
    calls = []

    @memoised
    def double(*values):
        calls.append(values)
        return [2 * value for value in values]

    assert double(1, 2.0) is double(1, 2.0) and len(calls) == 1
    assert double(1, 2) == [2, 4] and len(calls) == 2
    for _ in range(2):
        double((1,))
    assert len(calls) == 4
