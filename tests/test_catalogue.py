"""Which kernel takes a problem, without a device."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import replace
from itertools import product

import pytest

from covering import covering
from quire.errors import UnsupportedError, ValidationError
from quire.kernels import KERNELS, AttentionKey, AttentionProblem, decide, same_rows, variants_for_all_lengths
from quire.kernels.features import (
    ANY_PAGE_SIZE,
    ATTENTION_OPERANDS,
    DTYPES,
    Features,
    MaskMode,
    Operand,
    PosEncodingMode,
    dtype_of,
    mask_words,
    operand_fields,
    read_mask,
    rows_of,
)
from quire.kernels.operation import OPERATIONS, OperationKey
from quire.kernels.params import FastDivisor, params_with

ROWS = [*range(1, 300), *(bound + i for bound in (512, 1024, 2048, 4096, 100_000) for i in (-1, 0, 1))]


def answer(problem: AttentionProblem) -> object:
    """The variant's key, or why there is none."""
    try:
        return decide(problem).key
    except (UnsupportedError, ValidationError) as error:
        return type(error).__name__


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm90a", "sm80", "x86-64-v4"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_plans_are_looked_up_by_rows_that_kernels_tell_apart(target, dims):
    """A bound that same_rows() does not know would give a batch the kernel of its neighbour."""
    bf16 = dtype_of("bfloat16", "dtype")
    masks, splits = (MaskMode.NONE, MaskMode.CAUSAL, MaskMode.CUSTOM, MaskMode.TREE), (0, -1)
    options, seen = [*product(masks, splits, (0, 1, 16), (True, False))], set()
    for mask, split, page_size, uniform in (options[place] for place in covering(options, 2)):
        problem = AttentionProblem(target, bf16, bf16, bf16, *dims, page_size, mask, False, False, 1, uniform, split)
        answers = {rows: answer(replace(problem, rows=rows)) for rows in {*ROWS, *map(same_rows, ROWS)}}
        for rows in ROWS:
            assert answers[rows] == answers[same_rows(rows)], rows
        seen.update(answers[same_rows(rows)] for rows in ROWS)
    assert len(seen) > 4, "rows make no difference here"


def test_few_problems():
    assert same_rows(0) == 0 and len({same_rows(rows) for rows in range(100_000)}) < 25


_BF16, _E4M3 = dtype_of("bfloat16", "q"), dtype_of("float8_e4m3fn", "kv")
FA2_AND_DECODE = ("attention_fa2", "attention_decode")
_DECODE = AttentionProblem("sm90a", _BF16, _BF16, _BF16, 128, 128, 16, MaskMode.NONE, False, False, rows=8)


def chosen(backend: str = "auto", **changes: object) -> str:
    return decide(replace(_DECODE, **changes), backend).kernel.backend


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "decode"),
        ({"rows": 32}, "decode"),
        ({"rows": 64}, "fa3"),  # decode could, but yields
        ({"rows": 64, "target": "sm80"}, "fa2"),
        ({"rows": 64, "head_dim_qk": 64, "head_dim_vo": 64}, "decode"),
        ({"rows": 64, "kv": _E4M3}, "decode"),  # half the bytes
        ({"rows": 65, "kv": _E4M3}, "fa3"),
        ({"rows": 65, "kv": _E4M3, "target": "sm89"}, "fa2"),
        ({"rows": 64, "mask": MaskMode.TREE}, "fa2"),
        ({"rows": 65}, "fa3"),
        ({"rows": 8, "fixed_split_size": -1}, "decode"),
        ({"rows": 8, "fixed_split_size": -1, "uniform": False}, "fa3"),
    ],
    ids=str,
)
def test_auto(changes, expected):
    assert chosen(**changes) == expected


def test_a_kernel_that_yields_can_be_asked_for():
    decision = decide(replace(_DECODE, rows=64), "quire:decode")
    assert decision.kernel.backend == "decode" and decision.key.tile_rows == 64


@pytest.mark.parametrize(
    ("target", "head_dim", "more", "decode_rows", "fa2_rows"),
    [
        ("sm90a", 128, {}, (16, 32, 64), (16, 64, 128)),
        ("sm100a", 64, {}, (16, 32, 64), (16, 64)),
        ("sm100a", 128, {}, (16, 32), (16, 64)),
        ("sm103a", 256, {}, (16,), (16, 64)),
        ("sm120a", 128, {}, (16,), (16, 64)),
        ("sm100a", 128, {"kv": _E4M3}, (16,), (16, 64)),
        ("sm80", 128, {"mask": MaskMode.CUSTOM, "soft_cap": True}, (16, 32, 64), (16, 64, 128)),
        ("sm89", 128, {"mask": MaskMode.CUSTOM, "soft_cap": True}, (16, 32, 64), (16, 64)),
    ],
)
def test_tiles_whose_registers_would_spill_are_left_out(target, head_dim, more, decode_rows, fa2_rows):
    problem = replace(_DECODE, target=target, head_dim_qk=head_dim, head_dim_vo=head_dim, **more)
    tiles = {kernel.backend: kernel.tiles(problem) for kernel in KERNELS if kernel.name in FA2_AND_DECODE}
    assert {name: tuple(tile.rows for tile in shapes) for name, shapes in tiles.items()} == {
        "decode": decode_rows,
        "fa2": fa2_rows,
    }


def test_decode_says_where_wide_heads_leave_it_no_registers():
    wide = replace(_DECODE, target="sm120a", head_dim_qk=256, head_dim_vo=256)
    assert chosen(target="sm120a", head_dim_qk=256, head_dim_vo=256) == "fa2"
    with pytest.raises(UnsupportedError, match="heads of 256 dims leave too few registers or shared memory on sm120a"):
        decide(wide, "quire:decode")


def test_a_fixed_split_is_a_multiple_of_the_tile_that_runs():
    """Tiles of 64 rows of 256-wide heads are 64 keys long, lower ones 32."""
    wide = {"head_dim_qk": 256, "head_dim_vo": 256, "fixed_split_size": 32}
    lower = replace(_DECODE, rows=8, **wide)
    assert decide(lower, "quire:decode").kernel.tile(decide(lower, "quire:decode").key).kv == 32
    with pytest.raises(
        ValidationError, match="got 32:\n  attention_decode its kv tile has 64 keys: pass fixed_split_size=64"
    ):
        decide(replace(lower, rows=64), "quire:decode")


@pytest.mark.parametrize(
    ("target", "tiles"), [("sm90a", [(16, 64), (32, 64), (64, 64)]), ("sm89", [(16, 32), (32, 32)])]
)
def test_decode_tiles_of_wide_heads_fit_shared_memory(target, tiles):
    """Rows of o, four bytes a number, take the place of 8-bit keys when a work tile ends: on sm89 two stages of 64 keys
    did not compile."""
    wide = replace(_DECODE, target=target, kv=_E4M3, head_dim_qk=256, head_dim_vo=256)
    assert list(decide(wide, "quire:decode").kernel.tiles(wide)) == tiles


@pytest.mark.parametrize(
    ("kv", "page_size", "most"),
    [(_BF16, 0, 0), (_BF16, 16, 0), *((_BF16, n, 1 << 36) for n in (1, 12)), (_E4M3, 0, 0), (_E4M3, 12, 1 << 36)],
    ids=str,
)
def test_what_fa3_finds_by_32_bits(kv, page_size, most):
    """Boxes are found by the copy engine; rows that are gathered, and results, by their number of 16 bytes."""
    decision = decide(replace(_DECODE, kv=kv, page_size=page_size), "quire:fa3")
    assert decision.kernel.max_bytes(decision.key, "k") == decision.kernel.max_bytes(decision.key, "v") == most
    assert decision.kernel.max_bytes(decision.key, "o") == 1 << 36


# Features: one table


def example(**changes: object) -> AttentionKey:
    """A key with other values of some fields."""
    q = dtype_of("bfloat16", "q")
    key = AttentionKey("sm90a", q, q, q, 128, 128, 16, MaskMode.CAUSAL, False, False, "attention_fa3", 128)
    return replace(key, **changes)


def values_of(name: str) -> list[object]:
    """Every value that has a word, and a few numbers where the feature takes some."""
    row = rows_of(AttentionKey)[name]
    return [*row.words.values(), *((8, 96, 256) if row.number else ())]


@pytest.mark.parametrize("name", rows_of(AttentionKey))
def test_a_slug_spells_each_value_and_parses_back(name):
    keys = [example(**{name: value}) for value in values_of(name)]
    assert len({key.slug for key in keys}) == len(keys)
    for key in keys:
        assert AttentionKey.parse(key.slug) == key
        assert {type(value) for value in key.members.values()} <= {int, str}


@pytest.mark.parametrize(
    ("changes", "slug"),
    [
        ({}, "attention_fa3.sm90a.bf16-bf16-bf16.d128-128.paged16.causal.m128"),
        ({"page_size": ANY_PAGE_SIZE}, "attention_fa3.sm90a.bf16-bf16-bf16.d128-128.paged.causal.m128"),
        (
            {"page_size": 0, "head_dim_qk": 192, "window": True, "soft_cap": True, "mask": MaskMode.NONE},
            "attention_fa3.sm90a.bf16-bf16-bf16.d192-128.ragged.none-window-cap.m128",
        ),
    ],
    ids=str,
)
def test_spelling(changes, slug):
    assert example(**changes).slug == slug


@pytest.mark.parametrize(
    "slug",
    [
        "",
        "attention_fa3",
        "attention_fa3.sm90a.bf16-bf16.d128-128.paged16.causal.m128",
        "attention_fa3.sm90a.bf16-bf16-bf16.d128-128.paged016.causal.m128",
        "attention_fa3.sm90a.bf16-bf16-bf16.d128-128.paged16.causal-cap-window.m128",
        "attention_fa3.sm90a.bf16-bf16-bf17.d128-128.paged16.causal.m128",
    ],
)
def test_what_is_no_slug(slug):
    with pytest.raises(ValidationError, match="slug: "):
        AttentionKey.parse(slug)


def test_a_variant_is_described_in_the_words_of_its_user():
    fields = dict(example(soft_cap=True, page_size=0).fields)
    assert (fields["mask"], fields["soft_cap"], fields["window"]) == ("causal", "yes", "no")
    assert (fields["page_size"], fields["head_dim_qk"], fields["kv"]) == ("ragged", "128", "bf16")


def test_masks_of_the_command_line():
    none = {
        "pos_encoding": PosEncodingMode.NONE,
        "cascade": False,
        "prefix": False,
        "tile_scales": False,
        "max_logits": False,
        "timed": False,
    }
    assert read_mask("causal+cap+window") == {"mask": MaskMode.CAUSAL, "window": True, "soft_cap": True, **none}
    assert read_mask("Tree") == {"mask": MaskMode.TREE, "window": False, "soft_cap": False, **none}
    assert read_mask("none+alibi")["pos_encoding"] is PosEncodingMode.ALIBI
    assert read_mask("none+cascade")["cascade"] is True and read_mask("none+scaled")["tile_scales"] is True
    for bad in ("", "window", "causal+tree", "causal+", "causal+wide"):
        with pytest.raises(ValidationError, match="none, causal, custom, tree"):
            read_mask(bad)
    assert all(f"+{word}" in mask_words() for word in ("window", "cap", "alibi", "cascade", "prefix", "scaled"))


def test_problems_and_keys_have_the_features():
    names = set(rows_of(Features))
    assert names < set(AttentionProblem.__dataclass_fields__) & set(AttentionKey.__dataclass_fields__)


# Operands: declared by a kernel's row


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_the_parameter_struct_begins_with_the_operands(kernel):
    base = dict(kernel.params._fields_).get("base", kernel.params)
    names = [name for name, _ in operand_fields(ATTENTION_OPERANDS)]
    assert [name for name, _ in base._fields_][: len(names)] == names
    assert [getattr(base, name).offset for name in names] == [8 * i for i in range(len(names))]
    for operand in kernel.tensors(example()):
        assert operand.type in (*rows_of(Features), "kpe") or dtype_of(operand.type, "type") in DTYPES


def test_scales_are_operands_behind_the_others():
    k = Operand("k", ("num_pages", "page_size", "num_kv_heads", "head_dim_qk"), "kv")
    scaled = k._replace(scales=Operand("k_scales", ("num_pages", "page_size", "num_kv_heads"), "fp32"))
    q, _, *rest = ATTENTION_OPERANDS
    operands = q, scaled, *rest, Operand("extra", ("nnz_qo", "head_dim_vo"), "q")
    kernel = replace(KERNELS[0], operands=operands, params=params_with("ScaledParams", operands))
    assert [operand.name for operand in kernel.tensors(example())] == ["q", "k", "v", "o", "extra", "k_scales"]
    params = kernel.params()
    strides = struct.pack("14q", *range(1, 15))
    pointers, extra, scales = (block.write(ctypes.addressof(params), strides) for block in kernel.blocks(example()))
    pointers[:], extra[:], scales[:] = [100, 200, 300, 400], [500], [600]
    base = params.base
    assert (base.q, base.k, base.v, base.o, params.extra, params.k_scales) == (100, 200, 300, 400, 500, 600)
    assert (base.q_token_stride, base.o_head_stride, params.extra_token_stride) == (1, 10, 11)
    names = ("k_scales_page_stride", "k_scales_token_stride", "k_scales_head_stride")
    assert [getattr(params, name) for name in names] == [12, 13, 14]


@pytest.mark.parametrize("kernel", [k for k in KERNELS if k.prefix_params], ids=lambda kernel: kernel.name)
def test_shared_keys_of_their_own_are_operands_behind_the_others(kernel):
    key = example(cascade=True, prefix=True, tile_rows=128 if kernel.on_cuda else 16)
    assert [operand.name for operand in kernel.tensors(key)] == ["q", "k", "v", "o", "k_prefix", "v_prefix"]
    params = kernel.params_of(key)()
    strides = struct.pack("14q", *range(1, 15))
    pointers, prefix = (block.write(ctypes.addressof(params), strides) for block in kernel.blocks(key))
    pointers[:], prefix[:] = [100, 200, 300, 400], [500, 600]
    assert (params.base.o, params.k_prefix, params.v_prefix) == (400, 500, 600)
    assert (params.base.o_head_stride, params.k_prefix_token_stride, params.v_prefix_head_stride) == (10, 11, 14)
    assert kernel.spec(key).params.size == ctypes.sizeof(params)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cascade": False}, "only a cascade has shared keys"),
        ({"page_size": 1}, "in pages of a multiple of 8 or ragged"),
        ({"kv": _E4M3}, "it takes 16-bit keys"),
        ({"target": "sm80"}, "in the cache alone"),
    ],
    ids=str,
)
def test_what_takes_no_shared_keys_of_their_own(changes, reason):
    assert chosen(rows=256, cascade=True, prefix=True) == "fa3"
    with pytest.raises(UnsupportedError, match=reason):
        chosen(**{"rows": 256, "cascade": True, "prefix": True, **changes})


def test_a_number_type_says_what_tensor_maps_call_it():
    """An 8-bit type described as f16 would be read as other numbers."""
    assert {d.slug: d.tensor_map for d in DTYPES if d.bits == 8} == {"e4m3": "u8", "e5m2": "u8"}
    assert all(d.bits == 8 * d.torch.itemsize for d in DTYPES)


# What other lengths take


def test_a_family_is_all_that_plan_may_choose_for_other_lengths():
    slugs = [spec.slug for spec in variants_for_all_lengths(replace(_DECODE, rows=8, mask=MaskMode.CAUSAL), "auto")]
    heights = [slug.rpartition(".m")[2] for slug in slugs if slug.startswith("attention_decode")]
    assert heights == ["16", "32"], "64 rows of wide heads are fa3's"
    assert [slug for slug in slugs if slug.startswith("attention_fa3")] == [
        f"attention_fa3.sm90a.bf16-bf16-bf16.d128-128.paged16.causal.m{rows}" for rows in (128, 192)
    ]
    assert len(variants_for_all_lengths(_DECODE, "quire:fa2")) == 3


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_family_of_an_operation_is_all_its_widths(name):
    operation = OPERATIONS[name]
    target = "sm90a" if operation.on_cuda else "x86-64-v4"
    for element, widths in operation.widths.items():
        keys = OperationKey(name, target, element, widths[-1]).family()
        assert [key.vector for key in keys] == list(widths) and widths[0] == 1
        assert [OperationKey.parse(key.slug) for key in keys] == keys


# What is said


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_dim_qk": 60}, "head_dim_qk=60: .*pad with zeros to 64 and pass sm_scale=0.1291"),
        ({"head_dim_qk": 576, "head_dim_vo": 512}, "576/512: MLA is not supported by this wrapper"),
        ({"head_dim_vo": 520}, "head_dim_vo=520: expected at most"),
        ({"head_dim_qk": 8}, "pad with zeros to 32"),
    ],
    ids=str,
)
def test_a_refusal_says_what_to_do(changes, words):
    for target in ("sm90a", "x86-64-v4"):
        with pytest.raises(UnsupportedError, match=words) as caught:
            decide(replace(_DECODE, target=target, **changes))
        others = [kernel.name for kernel in KERNELS if kernel.on_cuda != (target == "sm90a")]
        assert not any(name in str(caught.value) for name in others), "kernels of another device have no say"


def test_a_backend_of_another_device():
    with pytest.raises(
        UnsupportedError, match="backend='quire:cpu' does not run on sm90a; expected auto or one of quire:decode"
    ):
        decide(_DECODE, "quire:cpu")


def test_divisors_are_not_shared():
    first = FastDivisor.of(7)
    first.divisor = 1
    assert FastDivisor.of(7).divisor == 7
