"""The masks and scores that papers and attention-gym write for FlexAttention: recorded as torch computes them.

All are recorded and compared element by element, which compiles nothing; the slow test runs kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, or_masks

import quire
from quire.kernels import AttentionProblem, decide
from quire.kernels.expressions import tree
from quire.kernels.expressions.cxx import mask_blocks
from quire.kernels.expressions.dependencies import Capturing, Setting
from quire.kernels.features import MaskMode, dtype_of
from quire.kernels.hopper import FA3

Function = Callable[..., Any]
BATCH, HEADS, LEN = 2, 4, 64
SOURCE = torch.Generator().manual_seed(3)


def ints(*rows: object) -> Tensor:
    return torch.tensor(rows)


def drawn(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=SOURCE)


def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


# --- masks -----------------------------------------------------------------------------------------------------------


def neighbourhood(place: Callable[[Any], tuple[Any, Any]], size: int, width: int, height: int) -> Function:
    """NATTEN: the keys in a rectangle around the query, which is moved inside of the picture of size x size."""

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        (x, y), (other_x, other_y) = place(i), place(j)
        x = x.clamp(width // 2, size - 1 - width // 2)
        y = y.clamp(height // 2, size - 1 - height // 2)
        return ((x - other_x).abs() <= width // 2) & ((y - other_y).abs() <= height // 2)

    return mask


def tiled(index: Any) -> tuple[Any, Any]:
    """Tiles of 2 x 4 in a picture of 8 x 8, one after another."""
    tile, inside = index // 8, index % 8
    return tile % 2 * 4 + inside % 4, tile // 2 * 2 + inside // 4


def even_bits(code: Any) -> Any:
    for shift, bits in ((0, 0x55555555), (1, 0x33333333), (2, 0x0F0F0F0F), (4, 0x00FF00FF)):
        code = (code | (code >> shift)) & bits
    return code


def tiles_in_reach(tiles: tuple[int, ...], reach: tuple[int, ...], numel: int, text: int) -> Function:
    """STA: tiles of a picture or a film of `tiles` tiles see those in reach around them; all see the text behind it."""
    length = math.prod(tiles) * numel

    def place(index: Any) -> list[Any]:
        tile, found = index // numel, []
        for size in reversed(tiles):
            found.append(tile % size)
            tile = tile // size
        return found[::-1]

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        near = (i < length) & (j < length)
        for at, other, size, width in zip(place(i), place(j), tiles, reach, strict=True):
            left, right = width // 2, width // 2 + width % 2 - 1
            middle = at.clamp(left, size - 1 - right)
            near = near & (other >= middle - left) & (other <= middle + right)
        return near | ((j >= length) & (j < length + text)) | ((i >= length) & (j < length + text))

    return mask


STARTS = ints(0, 10, 40, LEN)
DOCUMENT = torch.repeat_interleave(torch.arange(3), STARTS.diff())
PREFIX_OF = ints(0, 0, 0)
IS_GLOBAL = torch.arange(LEN) % 13 == 5
IMAGE = torch.arange(24) // 8
INTERVALS = ints((0, 20), (10, 40), (30, 64))
CHOSEN = torch.stack([torch.randperm(4, generator=SOURCE)[:2] for _ in range(BATCH * HEADS * 4)]).view(
    BATCH, HEADS, 4, 2
)
TILE_LENS = ints(16, 9, 16, 4)
ANCESTORS = torch.eye(7, dtype=torch.bool)
for node, parent in enumerate((0, 1, 1, 3, 3, 0), start=1):
    ANCESTORS[node] |= ANCESTORS[parent]


def of_document(inner: Function) -> Function:
    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        at, other = i - STARTS[DOCUMENT[i]], j - STARTS[DOCUMENT[j]]
        return (DOCUMENT[i] == DOCUMENT[j]) & inner(b, h, at, other)

    return mask


def shared_prefix(b: Any, h: Any, i: Any, j: Any) -> Any:
    document = DOCUMENT[i]
    prefix = PREFIX_OF[document]
    is_own = (j >= STARTS[document]) & (i >= j)
    return is_own | ((document != prefix) & (j >= STARTS[prefix]) & (j < STARTS[prefix + 1]))


def in_intervals(b: Any, h: Any, i: Any, j: Any) -> Any:
    interval = INTERVALS[IMAGE[j]]
    return (i >= interval[0]) & (i < interval[1])


def block_diffusion(b: Any, h: Any, i: Any, j: Any) -> Any:
    half, size = LEN // 2, 8
    noised, other_noised, block, other = i < half, j < half, i % half // size, j % half // size
    is_own = (block == other) & (noised == other_noised)
    return is_own | ((block > other) & noised & ~other_noised) | ((block >= other) & ~noised & ~other_noised)


def chosen_tiles(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (CHOSEN[b, h, i // 16] == (j // 16).unsqueeze(-1)).any(dim=-1) & (j % 16 < TILE_LENS[j // 16])


def in_tree(b: Any, h: Any, i: Any, j: Any) -> Any:
    number = (j - 9).clamp(min=0, max=6)
    return (j < 9) | ((j >= 9) & (j < 16) & ANCESTORS[i, number])


class Case(NamedTuple):
    """A mask, and the lengths that it is for."""

    mask: Function
    q_len: int = LEN
    kv_len: int = LEN


MASKS = {
    "causal": Case(causal),
    "sliding": Case(and_masks(causal, lambda b, h, i, j: i - j <= 9)),
    "prefix": Case(or_masks(causal, lambda b, h, i, j: j < 11)),
    "dilated": Case(lambda b, h, i, j: (torch.abs(i - j) <= 20) & (torch.abs(i - j) % 3 == 0)),
    "global": Case(or_masks(lambda b, h, i, j: (i - j).abs() <= 4, lambda b, h, i, j: IS_GLOBAL[i] | IS_GLOBAL[j])),
    "NATTEN": Case(neighbourhood(lambda index: (index // 8, index % 8), 8, 3, 5)),
    "NATTEN of tiles": Case(neighbourhood(tiled, 8, 3, 5)),
    "NATTEN of Morton's order": Case(neighbourhood(lambda index: (even_bits(index), even_bits(index >> 1)), 8, 3, 5)),
    "STA of a picture": Case(tiles_in_reach((4, 4), (2, 3), 4, 8), 72, 72),
    "STA of a film": Case(tiles_in_reach((2, 2, 2), (1, 2, 1), 8, 8), 72, 72),
    "SVG, spatial": Case(lambda b, h, i, j: (j < 22) | (i < 6) | (torch.abs(i - j) < math.floor(32 / 8) * 8), 70, 70),
    "SVG, temporal": Case(lambda b, h, i, j: (j < 6) | (i < 6) | (torch.abs((i - 6) % 16 - (j - 6) % 16) < 8), 70, 70),
    "VSA": Case(chosen_tiles),
    "documents": Case(of_document(causal)),
    "windows of documents": Case(of_document(lambda b, h, i, j: (i - j).abs() <= 5)),
    "packed documents": Case(lambda b, h, i, j: (j >= STARTS[DOCUMENT[i]]) & (i >= j)),
    "shared prefix": Case(shared_prefix),
    "groups": Case(lambda b, h, i, j: (i // 16 == j // 16) & causal(b, h, i % 16, j % 16)),
    "Flamingo": Case(in_intervals, LEN, 24),
    "block diffusion": Case(block_diffusion),
    "a tree of drafts": Case(in_tree, 7, 16),
    "draft heads": Case(
        lambda b, h, i, j: (j < 9) | ((j >= 9) & (i // 4 == (j - 9) // 4) & ((j - 9) % 4 <= i % 4)), 24, 33
    ),
    "each head its own": Case(lambda b, h, i, j: (i >= j) & (i - j < (h + 1) * 8)),
}  # fmt: skip

# --- scores ----------------------------------------------------------------------------------------------------------

ROPE_Q, ROPE_K = drawn(BATCH, HEADS, LEN, 16), drawn(BATCH, 1, LEN, 16)
DISTANCES = torch.randint(0, 7, (BATCH, LEN, LEN), generator=SOURCE, dtype=torch.int32)
OF_DISTANCE = drawn(HEADS, 7)
EDGES = torch.randint(0, 3, (BATCH, LEN, LEN, 3), generator=SOURCE, dtype=torch.int32)
OF_EDGES = [drawn(HEADS, 3) for _ in range(3)]
PATH_LENS = torch.randint(0, 4, (BATCH, LEN, LEN), generator=SOURCE, dtype=torch.int32)
SANDWICH, STEEPNESS = drawn(2 * LEN), drawn(HEADS).abs()


def of_edges(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    length, total = PATH_LENS[b, i, j], 0.0
    for n, table in enumerate(OF_EDGES):
        total = total + torch.where(length > n, table[h, EDGES[b, i, j, n]], 0.0)
    return s + total / torch.clamp(length, min=1)


SCORES: dict[str, Function] = {
    "ALiBi": lambda s, b, h, i, j: s + (j - i) * torch.exp2(-((h + 1) * 8.0 / HEADS)),
    "soft cap": lambda s, b, h, i, j: 3 * torch.tanh(s / 3),
    "checkerboard": lambda s, b, h, i, j: torch.where((j - i).abs() % 2 == 1, s * 0.5, s * 2.0),
    "GELU in place of softmax": lambda s, b, h, i, j: torch.log(F.gelu(s) + 1.0),
    "squared ReLU": lambda s, b, h, i, j: torch.log(torch.relu(s) ** 2 + 1.0),
    "Graphormer, distances": lambda s, b, h, i, j: s + OF_DISTANCE[h, DISTANCES[b, i, j]],
    "Graphormer, edges": of_edges,
    "rotated parts of MLA": lambda s, b, h, i, j: s + 0.3 * torch.dot(ROPE_Q[b, h, i], ROPE_K[b, h // HEADS, j]),
    "sandwich": lambda s, b, h, i, j: s + SANDWICH[i - j + LEN - 1] * STEEPNESS[h],
}  # fmt: skip


def eager(function: Function, sizes: tuple[int, ...], *scores: Tensor) -> Tensor:
    """What torch computes of each element."""
    places = torch.cartesian_prod(*map(torch.arange, sizes)).int().unbind(1)
    return torch.vmap(function)(*(s.flatten() for s in scores), *places).reshape(sizes)


def recorded(score: Function | None, mask: Function | None, sizes: tuple[int, ...], scores: Tensor) -> Tensor:
    """What Quire records, in float64."""
    tracer = Capturing(Setting(sizes[2], sizes[3] + 1, torch.device("cpu")))  # one key more: nothing is a kernel's own
    variant, _ = tracer.variant_of(score, mask)
    values = {name: x.double() if x.is_floating_point() else x for name, x in tracer.captured.items()}
    return torch.stack(
        [tree.evaluate(variant.expression, scores[b], b, values)[mask is not None] for b in range(sizes[0])]
    )


@pytest.mark.parametrize("name", [name for name in MASKS if name not in ("causal", "sliding")])
def test_masks(name):
    case = MASKS[name]
    sizes = BATCH, HEADS, case.q_len, case.kv_len
    assert torch.equal(recorded(None, case.mask, sizes, torch.zeros(sizes)), eager(case.mask, sizes).expand(sizes))


@pytest.mark.parametrize("name", SCORES)
def test_scores(name):
    sizes = BATCH, HEADS, LEN, LEN
    scores = 2 * torch.randn(sizes, generator=SOURCE).double()
    expected = eager(SCORES[name], sizes, scores.float())
    torch.testing.assert_close(recorded(SCORES[name], None, sizes, scores), expected.double(), rtol=1e-4, atol=1e-4)


def check(device: str, seen: Tensor | None, score: Function | None, mask: BlockMask | None, lengths: tuple[int, int]):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (drawn(BATCH, HEADS, n, 64).to(dtype).to(device) for n in (lengths[0], lengths[1], lengths[1]))
    scores = q.double().cpu() @ k.double().cpu().transpose(2, 3) / 8
    if score is not None:
        scores = eager(score, scores.shape, scores.float()).double()
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    truth = torch.softmax(scores, 3).nan_to_num() @ v.double().cpu()
    close = {"rtol": 2e-5, "atol": 2e-5} if device == "cpu" else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(quire.flex_attention(q, k, v, score, mask).cpu().double(), truth, **close)


@pytest.mark.daily(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", MASKS)
def test_kernels_of_masks(device, name, monkeypatch):
    case = MASKS[name]
    sizes = BATCH, HEADS, case.q_len, case.kv_len
    seen = eager(case.mask, sizes).expand(sizes)
    for table, value in list(globals().items()):
        if isinstance(value, Tensor):
            monkeypatch.setitem(globals(), table, value.to(device))
    check(device, seen, None, create_block_mask(case.mask, *sizes, device=device, BLOCK_SIZE=16), sizes[2:])


@pytest.mark.daily(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", SCORES)
def test_kernels_of_scores(name):
    check("cpu", None, SCORES[name], None, (LEN, LEN))


def test_lists_of_chosen_tiles():
    """VSA's fine pass: lists of tiles, of which those that are not whole have a function."""
    counts = torch.full((BATCH, HEADS, 4), 2, dtype=torch.int32)
    lists = CHOSEN.int().sort(-1).values
    mask = BlockMask.from_kv_blocks(
        counts, torch.cat([lists, lists], -1), BLOCK_SIZE=16, seq_lengths=(LEN, LEN),
        mask_mod=lambda b, h, i, j: j % 16 < TILE_LENS[j // 16],
    )  # fmt: skip
    check("cpu", eager(chosen_tiles, (BATCH, HEADS, LEN, LEN)), None, mask, (LEN, LEN))


STATES = torch.ones(4, 2, dtype=torch.uint8)


@pytest.mark.parametrize(("mask", "blocks"), [
    (lambda b, h, i, j: STATES[i // 128, j // 256] != 0, (128, 256)),
    (lambda b, h, i, j: (STATES[i // 64, j // 64] == 2) | ((STATES[i // 64, j // 64] == 1) & (i * 2 > j)), (64, 64)),
    (lambda b, h, i, j: (i // 96 - j // 64).abs() <= i // 64 % 3, (32, 64)),
    (MASKS["STA of a film"].mask, (0, 0)),  # the text behind it is no block
    (MASKS["NATTEN"].mask, (0, 0)),
    (MASKS["documents"].mask, (0, 0)),
    (lambda b, h, i, j: i // 128 > j, (0, 0)),
])  # fmt: skip
def test_blocks_of_masks(mask, blocks):
    """fa3 takes row tiles that cut none of them."""
    variant, _ = Capturing(Setting(8192, 8192, torch.device("cpu"))).variant_of(None, mask)
    assert mask_blocks(variant.expression) == blocks
    bf16 = dtype_of("bf16", "")
    problem = AttentionProblem(
        target="sm90a", mask=MaskMode.NONE, q=bf16, kv=bf16, o=bf16, head_dim_qk=128, head_dim_vo=128, page_size=0,
        window=False, soft_cap=False, variant=variant, rows=4096, group_size=4,
    )  # fmt: skip
    key = decide(problem, "quire:fa3").key
    assert key.tile_rows == (128 if blocks[0] else 192)
    assert FA3.tile(key).kv == (128 if blocks[1] % 128 == 0 and blocks[0] else 64)


def test_operators_of_other_libraries():
    """By their libraries' names: one that is called like a function of torch's is another."""
    q = drawn(1, 2, 9, 32)
    torch.library.define("quire_test::sin", "(Tensor x) -> Tensor")
    torch.library.define("approx::tanh", "(Tensor x) -> Tensor")
    for call, name in (
        (torch.ops.quire_test.sin, "quire_test::sin"), (torch.ops.quire_test.sin.default, "quire_test::sin")
    ):  # fmt: skip
        with pytest.raises(quire.ValidationError, match=f"{name}.. is no function"):
            quire.flex_attention(q, q, q, lambda s, b, h, i, j, call=call: call(s))
    of_torch = quire.flex_attention(q, q, q, lambda s, b, h, i, j: torch.tanh(s))
    for call in (torch.ops.aten.tanh.default, torch.ops.aten.tanh, torch.ops.approx.tanh):
        assert torch.equal(quire.flex_attention(q, q, q, lambda s, b, h, i, j, call=call: call(s)), of_torch)
