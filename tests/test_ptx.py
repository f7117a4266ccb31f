"""The instructions of the PTX interpreter, by what the PTX manual says of each; on a GPU they are compared with it."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from ptx import probe, threads
from ptx.memory import Fault
from ptx.program import parse
from ptx.threads import Turns

WORDS = np.array(
    [0, 1, 2, 3, 7, 8, 15, 16, 31, 32, 33, 64, 100, 127, 128, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x12345678,
     0x7FFFFFFF, 0x80000000, 0x80000001, 0x89ABCDEF, 0xDEADBEEF, 0xFEDCBA98, 0xFFFF0000, 0xFFFFFFFE, 0xFFFFFFFF, 5],
    np.uint32,
)  # fmt: skip
FLOATS = np.array(
    [0.0, -0.0, 1.0, -1.0, 1.5, 2.5, 1 / 3, -2 / 3, 1e-8, 6e-8, 65504.0, 65520.0, 7e4, 3.3895e38, 1.00390625,
     1.0078125, 1.01171875, 2.0**-14, 2.0**-24, 2.0**-25, 3e-45, -1e-39, 1e30, -1e30, math.inf, -math.inf, math.nan,
     0.1, 0.7, 12.3, 100.5, -7.75],
    np.float32,
)  # fmt: skip
#: Each value meets each value of the other two.
A, B, C = WORDS, np.roll(WORDS, 5), np.roll(WORDS[::-1], 3)
X, Y, Z = FLOATS, np.roll(FLOATS, 7), np.roll(FLOATS[::-1], 2)

M32 = 0xFFFFFFFF


def signed(word: int) -> int:
    return word - 2**32 if word >> 31 else word


def saturated(number: int) -> int:
    return min(max(number, -(2**31)), 2**31 - 1) & M32


def bytes_by_number(a: int, b: int, selector: int) -> int:
    source, result = [*a.to_bytes(4, "little"), *b.to_bytes(4, "little")], 0
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = source[nibble & 7]
        result |= (0xFF if byte & 0x80 else 0) << 8 * i if nibble & 8 else byte << 8 * i
    return result


def inserted(a: int, b: int, begin: int, count: int) -> int:
    for i in range(count):
        if begin + i < 32:
            b = b & ~(1 << begin + i) | (a >> i & 1) << begin + i
    return b & M32


def looked_up(a: int, b: int, c: int, table: int) -> int:
    rows = ((a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1) for i in range(32))
    return sum((table >> row & 1) << i for i, row in enumerate(rows))


#: An instruction, and what it makes of the words a, b and c in Python's integers.
OF_WORDS: dict[str, Callable[[int, int, int], int]] = {
    "add.s32 %r4, %r1, %r2": lambda a, b, c: a + b & M32,
    "sub.s32 %r4, %r1, %r2": lambda a, b, c: a - b & M32,
    "mul.lo.s32 %r4, %r1, %r2": lambda a, b, c: a * b & M32,
    "mul.hi.u32 %r4, %r1, %r2": lambda a, b, c: a * b >> 32,
    "mul.hi.s32 %r4, %r1, %r2": lambda a, b, c: signed(a) * signed(b) >> 32 & M32,
    "mad.lo.s32 %r4, %r1, %r2, %r3": lambda a, b, c: a * b + c & M32,
    "mul.wide.s32 %rd6, %r1, %r2; shr.u64 %rd6, %rd6, 20; cvt.u32.u64 %r4, %rd6":
        lambda a, b, c: (signed(a) * signed(b) & (1 << 64) - 1) >> 20 & M32,
    "min.s32 %r4, %r1, %r2": lambda a, b, c: min(a, b, key=signed),
    "max.u32 %r4, %r1, %r2": lambda a, b, c: max(a, b),
    "shl.b32 %r4, %r1, %r2": lambda a, b, c: a << b & M32 if b < 32 else 0,
    "shr.u32 %r4, %r1, %r2": lambda a, b, c: a >> b if b < 32 else 0,
    "shr.s32 %r4, %r1, %r2": lambda a, b, c: signed(a) >> min(b, 31) & M32,
    "shf.l.wrap.b32 %r4, %r1, %r2, %r3": lambda a, b, c: ((b << 32 | a) << (c & 31)) >> 32 & M32,
    "shf.r.wrap.b32 %r4, %r1, %r2, %r3": lambda a, b, c: (b << 32 | a) >> (c & 31) & M32,
    "shf.r.clamp.b32 %r4, %r1, %r2, %r3": lambda a, b, c: (b << 32 | a) >> min(c, 32) & M32,
    "prmt.b32 %r4, %r1, %r2, %r3": bytes_by_number,
    "prmt.b32 %r4, %r1, %r2, 0x3715": lambda a, b, c: bytes_by_number(a, b, 0x3715),
    "bfi.b32 %r4, %r1, %r2, 5, 11": lambda a, b, c: inserted(a, b, 5, 11),
    "bfi.b32 %r4, %r1, %r2, 29, 11": lambda a, b, c: inserted(a, b, 29, 11),
    "bfe.u32 %r4, %r1, 7, 9": lambda a, b, c: a >> 7 & 511,
    "lop3.b32 %r4, %r1, %r2, %r3, 0xCA": lambda a, b, c: looked_up(a, b, c, 0xCA),
    "lop3.b32 %r4, %r1, %r2, %r3, 0x96": lambda a, b, c: a ^ b ^ c,
    "popc.b32 %r4, %r1": lambda a, b, c: a.bit_count(),
    "clz.b32 %r4, %r1": lambda a, b, c: 32 - a.bit_length(),
    "brev.b32 %r4, %r1": lambda a, b, c: int(f"{a:032b}"[::-1], 2),
    "bfind.u32 %r4, %r1": lambda a, b, c: a.bit_length() - 1 & M32,
    "bfind.shiftamt.u32 %r4, %r1": lambda a, b, c: 32 - a.bit_length() if a else M32,
    "add.sat.s32 %r4, %r1, %r2": lambda a, b, c: saturated(signed(a) + signed(b)),
    "sub.sat.s32 %r4, %r1, %r2": lambda a, b, c: saturated(signed(a) - signed(b)),
    "not.b32 %r4, %r1": lambda a, b, c: ~a & M32,
    "setp.lt.s32 %p1, %r1, %r2; selp.b32 %r4, %r1, %r3, %p1": lambda a, b, c: a if signed(a) < signed(b) else c,
    "setp.hi.u32 %p1, %r1, %r2; @%p1 mov.u32 %r4, %r3": lambda a, b, c: c if a > b else 0,
    "setp.ge.u32 %p1, %r1, %r2; @!%p1 mov.u32 %r4, %r3": lambda a, b, c: c if a < b else 0,
    "cvt.s64.s32 %rd6, %r1; shr.s64 %rd6, %rd6, 8; cvt.u32.u64 %r4, %rd6": lambda a, b, c: signed(a) >> 8 & M32,
    "mov.b32 {%h1, %h2}, %r1; mov.b32 %r4, {%h2, %h1}": lambda a, b, c: a >> 16 | (a & 0xFFFF) << 16,
    "or.b32 %r9, %r2, 1; div.s32 %r4, %r1, %r9":
        lambda a, b, c: math.trunc(signed(a) / signed(b | 1)) & M32,
    "or.b32 %r9, %r2, 1; rem.u32 %r4, %r1, %r9": lambda a, b, c: a % (b | 1),
}  # fmt: skip


@pytest.mark.parametrize("body", OF_WORDS)
def test_instructions_of_words(body: str) -> None:
    found = probe.interpret(f"{body};", A, B, C)[:, 0].tolist()
    wanted = [OF_WORDS[body](*map(int, words)) for words in zip(A, B, C, strict=True)]
    assert found == wanted


def of_torch(bits: torch.Tensor) -> np.ndarray:
    return bits.contiguous().view(torch.int16).numpy().view(np.uint16).astype(np.uint32)


def pair(upper: torch.Tensor, lower: torch.Tensor) -> np.ndarray:
    return of_torch(upper) << 16 | of_torch(lower)


_X, _Y, _Z = (torch.from_numpy(x.copy()) for x in (X, Y, Z))
#: An instruction of the numbers X, Y and Z, and its result by torch, as float32 or as pairs of 16 bits.
OF_FLOATS: dict[str, Callable[[], np.ndarray | torch.Tensor]] = {
    "add.f32 %r4, %r1, %r2": lambda: _X + _Y,
    "mul.f32 %r4, %r1, %r2": lambda: _X * _Y,
    "fma.rn.f32 %r4, %r1, %r2, %r3": lambda: (_X.double() * _Y.double() + _Z.double()).float(),
    "max.f32 %r4, %r1, %r2": lambda: torch.fmax(_X, _Y),
    "min.f32 %r4, %r1, %r2": lambda: torch.fmin(_X, _Y),
    "neg.f32 %r4, %r1": lambda: -_X,
    "abs.f32 %r4, %r1": lambda: _X.abs(),
    "cvt.rn.f16x2.f32 %r4, %r1, %r2": lambda: pair(_X.half(), _Y.half()),
    "cvt.rn.bf16x2.f32 %r4, %r1, %r2": lambda: pair(_X.bfloat16(), _Y.bfloat16()),
    "cvt.rn.f16.f32 %h1, %r1; cvt.f32.f16 %r4, %h1": lambda: _X.half().float(),
    "cvt.rn.f16x2.f32 %r8, %r1, %r2; cvt.rn.f16x2.f32 %r9, %r3, %r1; mul.rn.f16x2 %r4, %r8, %r9":
        lambda: pair((_X.half() * _Z.half()), (_Y.half() * _X.half())),
    "cvt.rzi.s32.f32 %r8, %r1; cvt.rn.f32.s32 %r4, %r8":
        lambda: _X.double().nan_to_num(0.0).clamp(-(2.0**31), 2.0**31 - 1).trunc().float(),
    "setp.lt.f32 %p1, %r1, %r2; selp.f32 %r4, %r1, %r3, %p1": lambda: torch.where(_X < _Y, _X, _Z),
    "setp.neu.f32 %p1, %r1, %r2; selp.f32 %r4, %r1, %r3, %p1": lambda: torch.where(_X != _Y, _X, _Z),
    "setp.gtu.f32 %p1, %r1, %r2; selp.f32 %r4, %r1, %r3, %p1": lambda: torch.where(~(_X <= _Y), _X, _Z),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_numbers_of_8_bits(kind: str) -> None:
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[kind]
    given = torch.arange(256).to(torch.uint8).view(dtype)
    words = np.arange(256, dtype=np.uint32) | np.arange(256, dtype=np.uint32)[::-1] << 8
    found = probe.interpret(f"cvt.u16.u32 %h1, %r1; cvt.rn.f16x2.{kind}x2 %r4, %h1;", words)[:, 0].copy()
    halves = torch.from_numpy(found.view(np.int16)).view(torch.float16).view(256, 2)
    torch.testing.assert_close(halves[:, 0], given.half(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(halves[:, 1], given.half().flip(0), rtol=0, atol=0, equal_nan=True)


def same_numbers(found: np.ndarray, wanted: np.ndarray | torch.Tensor, rtol: float = 0.0) -> None:
    if isinstance(wanted, torch.Tensor):
        np.testing.assert_allclose(found.view(np.float32), wanted.numpy(), rtol=rtol)
        return
    is_nan = [((w & 0x7F80) == 0x7F80) & ((w & 0x7F) != 0) for w in (wanted, wanted >> 16)]
    for lower, nan in zip((0, 16), is_nan, strict=True):
        halves = found >> lower & 0xFFFF, wanted >> lower & 0xFFFF
        np.testing.assert_array_equal(halves[0][~nan], halves[1][~nan])


@pytest.mark.parametrize("body", OF_FLOATS)
def test_instructions_of_numbers(body: str) -> None:
    with np.errstate(all="ignore"):
        same_numbers(probe.interpret(f"{body};", X, Y, Z)[:, 0], OF_FLOATS[body]())


#: Approximations, with the error that the manual allows; flushed: denormal numbers are 0.
APPROXIMATE = {
    "ex2.approx.ftz.f32 %r4, %r1": (lambda x: torch.exp2(x), 2e-7),
    "lg2.approx.ftz.f32 %r4, %r1": (lambda x: torch.log2(x), 2e-6),
    "rcp.approx.ftz.f32 %r4, %r1": (lambda x: 1 / x, 2e-7),
}


@pytest.mark.parametrize("body", APPROXIMATE)
def test_approximations(body: str) -> None:
    function, error = APPROXIMATE[body]
    flushed = torch.where(_X.abs() < 2.0**-126, torch.copysign(torch.zeros(32), _X), _X)
    wanted = function(flushed.double()).float()
    wanted = torch.where(wanted.abs() < 2.0**-126, wanted * 0, wanted)
    found = probe.interpret(f"{body};", X)[:, 0]
    np.testing.assert_allclose(found.view(np.float32), wanted.numpy(), rtol=error, atol=error)


# --- warps -----------------------------------------------------------------------------------------------------------

LANES = np.arange(32)
SHUFFLES = {
    "shfl.sync.bfly.b32 %r4|%p1, %r1, 5, 31, -1": lambda i: (i ^ 5, True),
    "shfl.sync.idx.b32 %r4|%p1, %r1, 3, 0x181F, -1": lambda i: (i // 8 * 8 + 3, True),
    "shfl.sync.up.b32 %r4|%p1, %r1, 3, 0, -1": lambda i: (i - 3, True) if i >= 3 else (i, False),
    "shfl.sync.down.b32 %r4|%p1, %r1, 3, 0x101F, -1": lambda i: (i + 3, True) if i % 16 < 13 else (i, False),
}


@pytest.mark.parametrize("body", SHUFFLES)
def test_shuffles(body: str) -> None:
    found = probe.interpret(f"{body}; selp.u32 %r5, 1, 0, %p1;", WORDS)
    wanted = [SHUFFLES[body](lane) for lane in range(32)]
    assert found[:, 0].tolist() == [int(WORDS[lane]) for lane, _ in wanted]
    assert found[:, 1].tolist() == [inside for _, inside in wanted]


def test_votes_and_reductions() -> None:
    body = (
        "setp.gt.s32 %p1, %r1, 31; vote.sync.ballot.b32 %r4, %p1, -1; vote.sync.any.pred %p2, %p1, -1;"
        "selp.u32 %r5, 1, 0, %p2; vote.sync.all.pred %p3, !%p1, -1; selp.u32 %r6, 1, 0, %p3;"
        "redux.sync.max.u32 %r7, %r1, -1;"
    )
    found = probe.interpret(body, WORDS)
    ballot = sum(1 << i for i, word in enumerate(WORDS.tolist()) if signed(word) > 31)
    assert np.array_equal(found, np.tile(np.array([ballot, 1, 0, M32], np.uint32), (32, 1)))


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(count: int, trans: str) -> None:
    """Lane i of register j has elements 2 (i % 4) and the next of row i / 4 of matrix j, or of its column."""
    registers = ", ".join(f"%r{4 + j}" for j in range(count))
    body = (  # word i of the CTA's 128 goes to word i, row r of 16 bytes lies at r * 16, and lane i asks for row 31 - i
        "shl.b32 %r9, %r0, 2; mov.u32 %r10, smem; add.s32 %r11, %r10, %r9; st.shared.u32 [%r11], %r1; bar.sync 0;"
        "and.b32 %r12, %r0, 31; sub.s32 %r12, 31, %r12; shl.b32 %r12, %r12, 4; add.s32 %r12, %r10, %r12;"
        f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{registers}}}, [%r12];"
    )
    words = np.random.default_rng(0).integers(0, 2**32, 128, np.uint32)
    rows = words.view(np.uint16).reshape(32, 8)
    found = probe.interpret(body, words)
    for lane in range(32):
        for j in range(count):
            matrix = np.stack([rows[31 - (8 * j + i)] for i in range(8)])
            matrix = matrix.T if trans else matrix
            low, high = (int(matrix[lane // 4, 2 * (lane % 4) + i]) for i in (0, 1))
            assert found[lane, j] == low | high << 16


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_mma(kind: str) -> None:
    """Fragments by the manual's formulas, element by element."""
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16}[kind]
    source = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-8, 9, shape, generator=source).to(dtype) for shape in ((16, 16), (16, 8)))
    place = lambda lane, i: (lane // 4 + 8 * (i % 4 // 2), lane % 4 * 2 + i % 2 + 8 * (i // 4))  # noqa: E731
    of_a = torch.stack([torch.stack([a[place(lane, i)] for i in range(8)]) for lane in range(32)])
    of_b = torch.stack(
        [torch.stack([b[lane % 4 * 2 + i % 2 + 8 * (i // 2), lane // 4] for i in range(4)]) for lane in range(32)]
    )
    words = [of_torch(x).reshape(32, -1, 2) for x in (of_a, of_b)]
    (a_words, b_words) = (x[..., 0] | x[..., 1] << 16 for x in words)
    # One word of A comes with each input: the other ones through shared memory, which has all of them.
    body = "shl.b32 %r9, %r0, 2; mov.u32 %r10, smem; add.s32 %r11, %r10, %r9; st.shared.u32 [%r11], %r1; bar.sync 0;"
    for i in range(6):
        body += f"and.b32 %r12, %r0, 31; shl.b32 %r12, %r12, 2; add.s32 %r12, %r12, {128 * i};"
        body += f"add.s32 %r12, %r12, %r10; ld.shared.u32 %r{20 + i}, [%r12];"
    body += (
        "mov.u32 %r26, 0x3f800000; mov.u32 %r27, 0;"
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%r4, %r5, %r6, %r7}},"
        "{%r20, %r21, %r22, %r23}, {%r24, %r25}, {%r26, %r27, %r26, %r27};"
    )
    words = np.concatenate([*a_words.T, *b_words.T]).astype(np.uint32)  # 6 x 32
    found = probe.interpret(body, words)[:32].view(np.float32)
    product = a.double() @ b.double()
    for lane in range(32):
        for i in range(4):
            row, column = lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2
            assert found[lane, i] == float(product[row, column]) + (i % 2 == 0)


# --- where threads go ------------------------------------------------------------------------------------------------

LOOP = """
  and.b32 %r9, %r1, 15;
again:
  setp.eq.u32 %p1, %r9, 0;
  @%p1 bra done;
  add.u32 %r4, %r4, %r9;
  sub.u32 %r9, %r9, 1;
  bra again;
done:
  shfl.sync.bfly.b32 %r5, %r4, 1, 31, -1;
"""


@pytest.mark.parametrize("turns", Turns)
def test_threads_that_part_meet_again(turns: Turns) -> None:
    words = np.concatenate([WORDS, WORDS[::-1]])
    found = probe.interpret(LOOP, words, turns=turns)
    sums = [int(word & 15) * int((word & 15) + 1) // 2 for word in words]
    assert found[:, 0].tolist() == sums and found[:, 1].tolist() == [sums[i ^ 1] for i in range(64)]


#: Thread i reads what thread 63 - i has written.
EXCHANGE = """
  shl.b32 %r9, %r0, 2; mov.u32 %r10, smem; add.s32 %r11, %r10, %r9;
  @%p7 bra never;
  st.shared.u32 [%r11], %r1;
  BARRIER
  sub.s32 %r12, 252, %r9; add.s32 %r12, %r10, %r12; ld.shared.u32 %r4, [%r12];
never:
"""


@pytest.mark.parametrize("turns", [Turns.FIRST, Turns.LAST])
def test_a_missing_barrier_is_seen_where_warps_take_turns(turns: Turns) -> None:
    words = np.arange(64, dtype=np.uint32)
    right = probe.interpret(EXCHANGE.replace("BARRIER", "bar.sync 0;"), words, turns=turns)[:, 0]
    wrong = probe.interpret(EXCHANGE.replace("BARRIER", ""), words, turns=turns)[:, 0]
    assert np.array_equal(right, words[::-1]) and not np.array_equal(wrong, words[::-1])
    assert set(wrong[wrong != words[::-1]].tolist()) == {M32}, "what is not written is NaN"


COPY = """
  shl.b32 %r9, %r0, 4; mov.u32 %r10, smem; add.s32 %r11, %r10, %r9;
  cp.async.cg.shared.global [%r11], [%rd4], 16; cp.async.commit_group; WAIT
  ld.shared.v4.u32 {%r4, %r5, %r6, %r7}, [%r11]; setp.eq.u32 %p1, %r4, 0; selp.u32 %r4, 1, 2, %p1;
"""


def test_copies_are_there_after_a_wait() -> None:
    """%rd4 is where the result goes, which is 0 before."""
    assert set(probe.interpret(COPY.replace("WAIT", "cp.async.wait_group 0;"))[:, 0].tolist()) == {1}
    assert set(probe.interpret(COPY.replace("WAIT", "cp.async.wait_group 1;"))[:, 0].tolist()) == {2}


FAULTS = {
    "frobnicate.b32 %r4, %r1;": "`frobnicate.b32 %r4, %r1` is not known here",
    "add.cc.u32 %r4, %r1, %r2;": r"`add.cc.u32 .* is not known here: modifiers \['cc'\]",
    "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%r4}, {%r1}, {%r2}, {%r4};": "a shape or type of mma",
    "ld.global.u32 %r4, [%rd1+128];": "a tensor's memory: 4 bytes at byte 128 of 128",
    "ld.global.u32 %r4, [%rd1+-4];": "a tensor's memory: 4 bytes at byte -4 of 128",
    "ld.shared.u32 %r4, [smem+2];": "not aligned to 4 bytes",
    "add.s64 %rd6, %rd1, 0x1000000000000; ld.global.u32 %r4, [%rd6];": "is in no memory",
    "mov.u64 %rd6, 16; ld.global.u32 %r4, [%rd6];": "is in no memory",
    "st.shared.u32 [smem+4096], %r1;": "shared memory: 4 bytes at byte 4096 of 4096",
    "setp.gt.u32 %p1, %r0, 3; @%p1 bra after; shfl.sync.bfly.b32 %r4, %r1, 1, 31, -1; ret; after: bar.warp.sync -1;":
        "waits forever at `(shfl|bar)",
    "shfl.sync.bfly.b32 %r4, %r1, 1, 31, 0xF;": "some lanes of a warp only",
    "bar.sync 0, 64;": "waits forever",
    "mov.u32 %r9, 0; div.s32 %r4, %r1, %r9;": "division by 0",
    "on: bra on;": "has not ended",
}  # fmt: skip


@pytest.mark.parametrize("body", FAULTS)
def test_faults(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_MOST_BLOCKS", 1000)
    with pytest.raises(Fault, match=FAULTS[body]):
        probe.interpret(body, WORDS)


def test_clocks_go_on_and_threads_have_memory_of_their_own() -> None:
    body = """
      mov.u64 %rd6, %clock64;
      and.b32 %r9, %r0, 3; cvt.u64.u32 %rd7, %r9; shl.b64 %rd7, %rd7, 2;
      .local .align 16 .b8 own[16];
      mov.u64 %rd8, own; cvta.local.u64 %rd8, %rd8; add.s64 %rd9, %rd8, %rd7;
      st.local.v4.u32 [%rd8], {%r0, %r0, %r0, %r0}; st.u32 [%rd9], %r1; ld.local.u32 %r4, [%rd8];
    spin:
      mov.u64 %rd10, %clock64; sub.s64 %rd10, %rd10, %rd6; setp.lt.s64 %p1, %rd10, 30000;
      @%p1 bra spin;
    """
    found = probe.interpret(body, WORDS)[:, 0].tolist()
    assert found == [int(word) if i % 4 == 0 else i for i, word in enumerate(WORDS)]


def test_the_parser_knows_scopes_and_calls() -> None:
    program = parse(
        """
        // a comment; with a semicolon {
        .func helper(.param .b64 x) ;
        .global .align 4 .b8 table[8] = {1, 2, 3};
        .visible .entry main(.param .align 8 .b8 given[16]) .maxntid 128, 1, 1
        {
          .reg .pred %p<3>; .reg .b32 %r<4>;
          { .reg .b16 h; mov.u32 %r1, 5; }
        $L__BB0_1:
          @!%p1 bra.uni $L__BB0_1;
          { .param .b64 x0; st.param.b64 [x0+0], 7; call.uni helper, (x0); }
          ret;
        }
        .func helper(.param .b64 x) { ret; }
        """
    )
    main = program.functions["main"]
    assert [i.name for i in main.code] == ["mov", "bra", "st", "call", "ret"] and main.labels == {"$L__BB0_1": 1}
    assert (main.code[1].predicate, main.code[1].negated) == ("%p1", True)
    assert main.code[3].operands == ("helper", "(x0)") and main.registers["h"] == "b16"
    assert program.variables["table"].size == 8 and len(program.functions["helper"].code) == 1


# --- a GPU -----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("body", [*OF_WORDS, *OF_FLOATS, *SHUFFLES])
def test_a_gpu_computes_what_the_interpreter_does(body: str) -> None:
    given = (X, Y, Z) if body in OF_FLOATS else (A, B, C)
    found, wanted = probe.interpret(f"{body};", *given)[:, 0], probe.run(f"{body};", *given)[:, 0]
    if body in OF_FLOATS and "x2" not in body:
        np.testing.assert_array_equal(found.view(np.float32), wanted.view(np.float32))
    elif body in OF_FLOATS:
        same_numbers(found, wanted)
    else:
        assert found.tolist() == wanted.tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("body", APPROXIMATE)
def test_a_gpu_approximates_what_the_interpreter_rounds(body: str) -> None:
    found, wanted = (call(f"{body};", X)[:, 0].view(np.float32) for call in (probe.interpret, probe.run))
    np.testing.assert_allclose(found, wanted, rtol=APPROXIMATE[body][1], atol=APPROXIMATE[body][1])
