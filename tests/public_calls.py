"""One small call of every public function that computes, its tensors apart from the call: tests change a tensor or the
environment and compare.

Every tensor names its device and dtype, so that a test may make them under any default.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import quire

Tensors = dict[str, Tensor]
Results = tuple[Tensor, ...]

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 4
KV_LENS = (9, 5)  #: tokens of the two requests of every batch; their pages are 0 to 4


@dataclass(frozen=True)
class Call:
    """A public function on tensors that `make` draws anew, the same ones each time.

    start: plans, if there is anything to plan, and gives back what runs. `planned` names what only plan() reads.
    """

    name: str
    make: Callable[[], Tensors]
    start: Callable[[Tensors], Callable[[Tensors], Results]]
    planned: tuple[str, ...] = ()

    def __call__(self, tensors: Tensors) -> Results:
        return self.start(tensors)(tensors)

    def __repr__(self) -> str:
        return self.name

    @property
    def floats(self) -> tuple[str, ...]:
        """The floating-point tensors, which could require a gradient."""
        return tuple(name for name, tensor in self.make().items() if tensor.is_floating_point())


def _draw(**shapes: tuple[int, ...]) -> Tensors:
    source = torch.Generator(device="cpu").manual_seed(7)
    return {
        name: torch.randn(shape, generator=source, dtype=torch.float32, device="cpu") for name, shape in shapes.items()
    }


def ints(*values: int) -> Tensor:
    """int32 on the host."""
    return torch.tensor(values, dtype=torch.int32, device="cpu")


def workspace(num_bytes: int = 1 << 20) -> Tensor:
    """Memory for partial results."""
    return torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")


def _tables() -> Tensors:
    return {"kv_indptr": ints(0, 3, 5), "kv_indices": ints(4, 0, 2, 1, 3), "kv_last_page_len": ints(1, 1)}


def _cache() -> Tensors:
    pages = (5, PAGE, KV_HEADS, DIM)
    return _draw(k_cache=pages, v_cache=pages)


def _pages(t: Tensors) -> Tensor | tuple[Tensor, Tensor]:
    return t["paged_kv_cache"] if "paged_kv_cache" in t else (t["k_cache"], t["v_cache"])


def _one_cache() -> Tensors:
    """Keys and values in one tensor."""
    return {"paged_kv_cache": torch.stack(tuple(_cache().values()), 1)}


def _single(function: Callable[..., Tensor | Results], *names: str, **options: object) -> Callable[..., object]:
    """A `start` for a function that plans nothing: `names` by position, the others by keyword."""

    def run(t: Tensors) -> Results:
        result = function(*(t[n] for n in names), **{n: t[n] for n in t if n not in names}, **options)
        return result if isinstance(result, tuple) else (result,)

    return lambda _: run


def _ragged(t: Tensors) -> Callable[[Tensors], Results]:
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(t["float_workspace_buffer"])
    wrapper.plan(t["qo_indptr"], t["kv_indptr"], HEADS, KV_HEADS, DIM, causal=True, q_data_type=torch.float32)
    return lambda t: wrapper.run_return_lse(t["q"], t["k"], t["v"])


def _prefix(t: Tensors) -> Callable[[Tensors], Results]:
    wrapper = quire.BatchPrefillWithPrefixWrapper(t["float_workspace_buffer"])
    wrapper.plan(t["qo_indptr"], t["prefix_indptr"], HEADS, KV_HEADS, DIM, q_data_type=torch.float32)
    return lambda t: wrapper.run(t["q"], t["k"], t["v"], t["k_prefix"], t["v_prefix"], return_lse=True)


def _paged(t: Tensors) -> Callable[[Tensors], Results]:
    wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(t["float_workspace_buffer"])
    tables = (t["qo_indptr"], t["kv_indptr"], t["kv_indices"], t["kv_last_page_len"])
    wrapper.plan(*tables, HEADS, KV_HEADS, DIM, PAGE, custom_mask=t["custom_mask"], q_data_type=torch.float32)
    return lambda t: wrapper.run(
        t["q"], (t["k_cache"], t["v_cache"]), out=t["out"], lse=t["lse"], sinks=t["sinks"], return_lse=True
    )


def _decode(t: Tensors) -> Callable[[Tensors], Results]:
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(t["float_workspace_buffer"])
    tables = (t["kv_indptr"], t["kv_indices"], t["kv_last_page_len"])
    wrapper.plan(*tables, HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.float32)
    return lambda t: wrapper.run_return_lse(t["q"], _pages(t))


def _xqa(t: Tensors) -> Callable[[Tensors], Results]:
    names = ("query", "workspace_buffer", "block_tables", "seq_lens")
    return lambda t: (
        quire.xqa_batch_decode_with_kv_cache(
            kv_cache=(t["k_cache"], t["v_cache"]), max_seq_len=12, bmm1_scale=0.125, **{n: t[n] for n in names}
        ),
    )


def _xqa_function(t: Tensors) -> Callable[[Tensors], Results]:
    names = ("q", "k_cache", "v_cache", "page_table", "seq_lens", "output", "workspace_buffer", "semaphores")
    return lambda t: (quire.xqa(*(t[n] for n in names), KV_HEADS, PAGE),)


def _cascade(t: Tensors) -> Callable[[Tensors], Results]:
    wrapper = quire.MultiLevelCascadeAttentionWrapper(2, t["float_workspace_buffer"])
    wrapper.plan(
        [t["qo_indptr_shared"], t["qo_indptr"]], [t["kv_indptr_shared"], t["kv_indptr"]],
        [t["kv_indices_shared"], t["kv_indices"]], [t["kv_last_page_len_shared"], t["kv_last_page_len"]],
        HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.float32,
    )  # fmt: skip
    return lambda t: (wrapper.run(t["q"], (t["k_cache"], t["v_cache"])),)


def _decode_shared(t: Tensors) -> Callable[[Tensors], Results]:
    wrapper = quire.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(t["float_workspace_buffer"])
    tables = (t["kv_indptr"], t["kv_indices"], t["kv_last_page_len"])
    wrapper.begin_forward(*tables, HEADS, KV_HEADS, DIM, PAGE, data_type=torch.float32)
    return lambda t: (wrapper.forward(t["q"], t["k_shared"], t["v_shared"], (t["k_cache"], t["v_cache"])),)


def _prefill_shared(t: Tensors) -> Callable[[Tensors], Results]:
    wrapper = quire.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(t["float_workspace_buffer"])
    tables = (t["qo_indptr"], t["kv_indptr"], t["kv_indices"], t["kv_last_page_len"])
    wrapper.begin_forward(*tables, HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.float32)
    return lambda t: (wrapper.forward(t["q"], t["k_shared"], t["v_shared"], (t["k_cache"], t["v_cache"])),)


def _merge_in_place(t: Tensors) -> Callable[[Tensors], Results]:
    def run(t: Tensors) -> Results:
        quire.merge_state_in_place(t["v"], t["s"], t["v_other"], t["s_other"], mask=t["mask"])
        return t["v"], t["s"]

    return run


def _append(t: Tensors) -> Callable[[Tensors], Results]:
    names = ("append_key", "append_value", "batch_indices", "positions")

    def run(t: Tensors) -> Results:
        tables = (t["kv_indices"], t["kv_indptr"], t["kv_last_page_len"])
        quire.append_paged_kv_cache(*(t[n] for n in names), _pages(t), *tables)
        return tuple(t[n] for n in ("paged_kv_cache", "k_cache", "v_cache") if n in t)

    return run


def _in_place(function: Callable[..., None], *written: str, **options: object) -> Callable[..., object]:
    """A `start` for a function that plans nothing and writes into its arguments `written`."""

    def run(t: Tensors) -> Results:
        function(**t, **options)
        return tuple(t[n] for n in written)

    return lambda _: run


def _angles() -> Tensor:
    """Cosines and sines of 10 positions."""
    angles = torch.arange(10, dtype=torch.float32, device="cpu")[:, None] * _draw(a=(1, DIM // 2))["a"]
    return torch.cat((angles.cos(), angles.sin()), 1)


def _flat_heads() -> Tensors:
    flat = _draw(query=(3, HEADS * DIM), key=(3, KV_HEADS * DIM))
    return {**flat, "positions": ints(8, 3, 4), "cos_sin_cache": _angles()}


def _rope_append(t: Tensors) -> Callable[[Tensors], Results]:
    names = ("q", "k", "v", "batch_indices", "positions", "kv_indices", "kv_indptr", "q_weight", "k_weight", "out")

    def run(t: Tensors) -> Results:
        quire.rope_append_paged_kv_cache(paged_kv_cache=_pages(t), **{n: t[n] for n in names})
        return t["out"], t["k_cache"], t["v_cache"]

    return run


def _rope_quantize_append(t: Tensors) -> Callable[[Tensors], Results]:
    def run(t: Tensors) -> Results:
        shape = (5, PAGE, KV_HEADS, DIM)
        cache = tuple(torch.zeros(shape, dtype=torch.float8_e4m3fn, device="cpu") for _ in range(2))
        results = quire.rope.rope_quantize_fp8_append_paged_kv_cache(
            paged_kv_cache=cache, page_size=PAGE, q_nope=None, k_nope=None, **t
        )
        return tuple(result.float() for result in (*results, *cache))

    return run


def _block_sparse(t: Tensors) -> Callable[[Tensors], Results]:
    wrapper = quire.BlockSparseAttentionWrapper(t["float_workspace_buffer"])
    wrapper.plan(
        t["indptr"], t["indices"], 5, 14, 3, 4, HEADS, KV_HEADS, DIM, mask=t["mask"], q_data_type=torch.float32
    )
    return lambda t: wrapper.run(t["q"], t["k"], t["v"], out=t["out"], lse=t["lse"], return_lse=True)


def _variable_blocks(t: Tensors) -> Callable[[Tensors], Results]:
    wrapper = quire.VariableBlockSparseAttentionWrapper(t["float_workspace_buffer"])
    blocks = t["block_mask_map"], t["block_row_sz"], t["block_col_sz"]
    wrapper.plan(*blocks, HEADS, KV_HEADS, DIM, q_data_type=torch.float32)
    return lambda t: wrapper.run(t["q"], t["k"], t["v"], out=t["out"], lse=t["lse"], return_lse=True)


def _selected(t: Tensors) -> Callable[[Tensors], Results]:
    def run(t: Tensors) -> Results:
        selected = quire.SelectedPages(t["pages"], t["lens"])
        cache = t["k_cache"], t["v_cache"]
        return quire.batch_decode_with_selected_pages(t["q"], cache, t["workspace_buffer"], selected, return_lse=True)

    return run


def _rows(n: int) -> Tensors:
    return _draw(q=(n, HEADS, DIM))


def _shared() -> Tensors:
    return _draw(k_shared=(6, KV_HEADS, DIM), v_shared=(6, KV_HEADS, DIM))


_KV = (sum(KV_LENS), KV_HEADS, DIM)
_TABLES = ("kv_indptr", "kv_indices", "kv_last_page_len", "float_workspace_buffer")
_STATE = (3, HEADS, DIM)

CALLS = (
    Call(
        "single_prefill_with_kv_cache",
        lambda: _draw(q=(5, HEADS, DIM), k=_KV, v=_KV),
        _single(quire.single_prefill_with_kv_cache_return_lse, "q", "k", "v", causal=True),
    ),
    Call(
        "single_prefill_with_kv_cache-custom_mask",
        lambda: {**_draw(q=(5, HEADS, DIM), k=_KV, v=_KV), "custom_mask": _draw(m=(5, _KV[0]))["m"] > 0},
        _single(quire.single_prefill_with_kv_cache_return_lse, "q", "k", "v"),
    ),
    Call(
        "single_decode_with_kv_cache",
        lambda: _draw(q=(HEADS, DIM), k=_KV, v=_KV),
        _single(quire.single_decode_with_kv_cache, "q", "k", "v", return_lse=True),
    ),
    Call(
        "BatchPrefillWithRaggedKVCacheWrapper",
        lambda: {
            **_draw(q=(5, HEADS, DIM), k=_KV, v=_KV), "qo_indptr": ints(0, 3, 5), "kv_indptr": ints(0, 9, 14),
            "float_workspace_buffer": workspace(),
        },
        _ragged,
        ("qo_indptr", "kv_indptr", "float_workspace_buffer"),
    ),
    Call(
        "BatchPrefillWithPrefixWrapper",
        lambda: {
            **_draw(q=(5, HEADS, DIM), k=(5, KV_HEADS, DIM), v=(5, KV_HEADS, DIM), k_prefix=_KV, v_prefix=_KV),
            "qo_indptr": ints(0, 3, 5), "prefix_indptr": ints(0, 9, 14), "float_workspace_buffer": workspace(),
        },
        _prefix,
        ("qo_indptr", "prefix_indptr", "float_workspace_buffer"),
    ),
    Call(
        "BatchPrefillWithPagedKVCacheWrapper",
        lambda: {
            **_draw(q=(5, HEADS, DIM), out=(5, HEADS, DIM), lse=(5, HEADS), sinks=(HEADS,)), **_cache(), **_tables(),
            "qo_indptr": ints(0, 3, 5), "custom_mask": _draw(m=(3 * 9 + 2 * 5,))["m"] > 0,
            "float_workspace_buffer": workspace(),
        },
        _paged,
        ("qo_indptr", "custom_mask", *_TABLES),
    ),
    Call(
        "BatchDecodeWithPagedKVCacheWrapper",
        lambda: {**_rows(2), **_cache(), **_tables(), "float_workspace_buffer": workspace()},
        _decode,
        _TABLES,
    ),
    Call(
        "BatchDecodeWithPagedKVCacheWrapper-one_tensor",
        lambda: {**_rows(2), **_one_cache(), **_tables(), "float_workspace_buffer": workspace()},
        _decode,
        _TABLES,
    ),
    Call(
        "xqa_batch_decode_with_kv_cache",
        lambda: {
            **_draw(query=(2, HEADS, DIM)), **_cache(), "workspace_buffer": workspace(), "seq_lens": ints(*KV_LENS),
            "block_tables": ints(4, 0, 2, 1, 3, 0).reshape(2, 3),
        },
        _xqa,
    ),
    Call(
        "xqa",
        lambda: {
            **_draw(q=(2, 1, HEADS, DIM), output=(2, 1, HEADS, DIM)), **_cache(), "workspace_buffer": workspace(),
            "seq_lens": ints(*KV_LENS), "page_table": ints(4, 0, 2, 1, 3, 0).reshape(2, 3), "semaphores": ints(0, 0),
        },
        _xqa_function,
    ),
    Call(
        "MultiLevelCascadeAttentionWrapper",
        lambda: {
            **_rows(2), **_cache(), "qo_indptr_shared": ints(0, 2), "kv_indptr_shared": ints(0, 1),
            "kv_indices_shared": ints(3), "kv_last_page_len_shared": ints(4), "qo_indptr": ints(0, 1, 2),
            "kv_indptr": ints(0, 2, 3), "kv_indices": ints(0, 1, 2), "kv_last_page_len": ints(3, 2),
            "float_workspace_buffer": workspace(),
        },
        _cascade,
        ("qo_indptr_shared", "kv_indptr_shared", "kv_indices_shared", "kv_last_page_len_shared", "qo_indptr", *_TABLES),
    ),
    Call(
        "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
        lambda: {
            **_rows(2), **_shared(), **_cache(), **_tables(), "float_workspace_buffer": workspace(),
        },
        _decode_shared,
        _TABLES,
    ),
    Call(
        "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
        lambda: {
            **_rows(5), **_shared(), **_cache(), **_tables(), "qo_indptr": ints(0, 3, 5),
            "float_workspace_buffer": workspace(),
        },
        _prefill_shared,
        ("qo_indptr", *_TABLES),
    ),
    Call(
        "batch_decode_with_shared_prefix_padded_kv_cache",
        lambda: _draw(
            q=(2, HEADS, DIM), k_shared=(6, KV_HEADS, DIM), v_shared=(6, KV_HEADS, DIM),
            k_unique=(2, 3, KV_HEADS, DIM), v_unique=(2, 3, KV_HEADS, DIM),
        ),
        _single(
            quire.batch_decode_with_shared_prefix_padded_kv_cache, "q", "k_shared", "v_shared", "k_unique", "v_unique"
        ),
    ),
    Call(
        "merge_state",
        lambda: _draw(v_a=_STATE, s_a=_STATE[:2], v_b=_STATE, s_b=_STATE[:2]),
        _single(quire.merge_state, "v_a", "s_a", "v_b", "s_b"),
    ),
    Call(
        "merge_state_in_place",
        lambda: {
            **_draw(v=_STATE, s=_STATE[:2], v_other=_STATE, s_other=_STATE[:2]),
            "mask": torch.tensor([True, False, True], device="cpu"),
        },
        _merge_in_place,
    ),
    Call(
        "merge_states",
        lambda: _draw(v=(3, 5, HEADS, DIM), s=(3, 5, HEADS)),
        _single(quire.merge_states, "v", "s"),
    ),
    Call(
        "append_paged_kv_cache",
        lambda: {
            **_draw(append_key=(3, KV_HEADS, DIM), append_value=(3, KV_HEADS, DIM)), **_cache(), **_tables(),
            "batch_indices": ints(0, 1, 1), "positions": ints(8, 3, 4),
        },
        _append,
    ),
    Call(
        "append_paged_kv_cache-one_tensor",
        lambda: {
            **_draw(append_key=(3, KV_HEADS, DIM), append_value=(3, KV_HEADS, DIM)), **_one_cache(), **_tables(),
            "batch_indices": ints(0, 1, 1), "positions": ints(8, 3, 4),
        },
        _append,
    ),
    Call(
        "apply_rope",
        lambda: {**_draw(q=(3, HEADS, DIM), k=(3, KV_HEADS, DIM)), "indptr": ints(0, 1, 3), "offsets": ints(8, 131072)},
        _single(quire.apply_rope, "q", "k"),
    ),
    Call(
        "apply_llama31_rope_pos_ids_inplace",
        lambda: {**_draw(q=(3, HEADS, DIM), k=(3, KV_HEADS, DIM)), "pos_ids": ints(8, 3, 131072)},
        _in_place(quire.apply_llama31_rope_pos_ids_inplace, "q", "k", interleave=True, rotary_dim=32),
    ),
    Call(
        "apply_rope_with_cos_sin_cache",
        _flat_heads,
        _single(quire.apply_rope_with_cos_sin_cache, "positions", "query", "key", head_size=DIM),
    ),
    Call(
        "apply_rope_with_cos_sin_cache_inplace",
        _flat_heads,
        _in_place(quire.apply_rope_with_cos_sin_cache_inplace, "query", "key", head_size=DIM, is_neox=False),
    ),
    Call(
        "rope_append_paged_kv_cache",
        lambda: {
            **_draw(q=(3, HEADS, DIM), k=(3, KV_HEADS, DIM), v=(3, KV_HEADS, DIM), out=(3, HEADS, DIM)),
            **_draw(q_weight=(DIM,), k_weight=(DIM,)), **_cache(), "kv_indices": ints(4, 0, 2, 1, 3),
            "kv_indptr": ints(0, 3, 5), "batch_indices": ints(0, 1, 1), "positions": ints(8, 3, 4),
        },
        _rope_append,
    ),
    Call(
        "rope_quantize_fp8_append_paged_kv_cache",
        lambda: {
            **_draw(q_rope=(3, HEADS, DIM), k_rope=(3, KV_HEADS, DIM), v=(3, KV_HEADS, DIM)), "pos_ids": ints(8, 3, 4),
            "cos_sin_cache": _angles(), "kv_indices": ints(4, 0, 2, 1, 3), "kv_indptr": ints(0, 3, 5),
            "batch_indices": ints(0, 1, 1), "positions": ints(8, 3, 4),
        },
        _rope_quantize_append,
    ),
    Call(
        "BlockSparseAttentionWrapper",
        lambda: {
            **_draw(q=(5, HEADS, DIM), k=_KV, v=_KV, out=(5, HEADS, DIM), lse=(5, HEADS)),
            "indptr": ints(0, 2, 3), "indices": ints(3, 0, 1), "mask": _draw(m=(3, 3, 4))["m"] > 0,
            "float_workspace_buffer": workspace(),
        },
        _block_sparse, planned=("indptr", "indices", "mask", "float_workspace_buffer"),
    ),
    Call(
        "VariableBlockSparseAttentionWrapper",
        lambda: {
            **_draw(q=(HEADS, 5, DIM), k=(KV_HEADS, 14, DIM), v=(KV_HEADS, 14, DIM), out=(HEADS, 5, DIM)),
            **_draw(lse=(HEADS, 5)), "block_mask_map": _draw(m=(KV_HEADS, 2, 3))["m"] > 0,
            "block_row_sz": ints(2, 3, 5, 0).view(2, 2), "block_col_sz": ints(4, 4, 6, 8, 4, 2).view(2, 3),
            "float_workspace_buffer": workspace(),
        },
        _variable_blocks, planned=("block_mask_map", "block_row_sz", "block_col_sz", "float_workspace_buffer"),
    ),
    Call("page_key_bounds", _one_cache, _single(quire.page_key_bounds, "paged_kv_cache")),
    Call(
        "select_pages",
        lambda: {
            **_draw(q=(2, HEADS, DIM), bounds=(5, KV_HEADS, 2, DIM)), "seq_lens": ints(*KV_LENS),
            "block_tables": ints(4, 0, 2, 1, 3, 0).view(2, 3),
        },
        _single(quire.select_pages, "q", "bounds", "block_tables", "seq_lens", page_size=PAGE, top_k=2),
    ),
    Call(
        "select_tokens",
        lambda: {
            **_draw(scores=(2, 3 * PAGE)), "lens": ints(*KV_LENS), "block_tables": ints(4, 0, 2, 1, 3, 0).view(2, 3),
        },
        _single(quire.select_tokens, "scores", page_size=PAGE, top_k=2),
    ),
    Call(
        "batch_decode_with_selected_pages",
        lambda: {
            **_draw(q=(2, HEADS, DIM)), **_cache(), "pages": ints(4, 2, 0, 2, 1, 3, 3, 1).view(2, KV_HEADS, 2),
            "lens": ints(5, 8, 4, 3).view(2, KV_HEADS), "workspace_buffer": workspace(),
        },
        _selected,
    ),
    Call(
        "get_seq_lens",
        lambda: {"kv_indptr": ints(0, 3, 5), "kv_last_page_len": ints(1, 1)},
        _single(quire.get_seq_lens, "kv_indptr", "kv_last_page_len", page_size=PAGE),
    ),
    Call(
        "get_batch_indices_positions",
        lambda: {
            "append_indptr": ints(0, 1, 3), "seq_lens": ints(*KV_LENS), "batch_indices": ints(0, 0, 0, 0),
            "positions": ints(0, 0, 0, 0),
        },
        _single(quire.get_batch_indices_positions, "append_indptr", "seq_lens", nnz=4),
    ),
    Call("packbits", lambda: {"x": _draw(x=(19,))["x"] > 0}, _single(quire.packbits, "x")),
    Call(
        "segment_packbits",
        lambda: {"x": _draw(x=(19,))["x"] > 0, "indptr": ints(0, 3, 3, 19)},
        _single(quire.segment_packbits, "x", "indptr", bitorder="little"),
    ),
)  # fmt: skip

BY_NAME = {call.name: call for call in CALLS}
