"""Random expressions of variants, on the CPU's functions and on the GPU's, against float64.

Many expressions are one program: the GPU's functions (tile/shared/expression.cuh) are compiled for the host here, with
the instructions of ptx/math.cuh replaced by the C library's. What a kernel computes besides is tested in
test_variants.py. QUIRE_EXPRESSIONS=10000 draws that many.
"""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import quire
from quire.kernels.expressions import to_float, to_int, tree, where
from quire.kernels.expressions.cxx import render
from quire.kernels.expressions.trace import call
from quire.kernels.expressions.tree import FLOAT, Expression, Node

TEMPLATES = Path(__file__).resolve().parents[1] / "templates/include"
HEADS, QO_LEN, KV_LEN, REQUEST = 2, 3, 64, 1
COUNT, PER_PROGRAM = int(os.environ.get("QUIRE_EXPRESSIONS", "30")), 30
LIKE_A_GPU = 10  #: programs that the host evaluates in a GPU's ways, too

TENSORS = {"bias": torch.float32, "table": torch.int32, "flag": torch.bool, "line": torch.bfloat16}
SCALARS = {"c": "float32", "n": "int32"}
VALUES = {
    "bias": torch.randn(3, 90, generator=torch.Generator().manual_seed(1)),
    "table": torch.randint(-9, 70, (40,), generator=torch.Generator().manual_seed(2), dtype=torch.int32),
    "flag": torch.randint(0, 2, (64,), generator=torch.Generator().manual_seed(3)).bool(),
    "line": torch.randn(7, generator=torch.Generator().manual_seed(4)).bfloat16(), "c": 0.7, "n": 5,
}  # fmt: skip
SCORES = 3 * torch.randn(HEADS, QO_LEN, KV_LEN, generator=torch.Generator().manual_seed(8))

#: The instructions that the GPU's functions are made of, as the C library has them.
INSTRUCTIONS = """
#pragma once
#include <math.h>
#include "quire/core/types.h"
namespace quire::ptx {
inline float flushed(float x) { return fabsf(x) < 0x1p-126f ? 0.f * x : x; }
inline float ex2(float x) { return flushed(exp2f(x)); }
inline float lg2(float x) { return log2f(flushed(x)); }
inline float rcp(float x) { return flushed(1.f / flushed(x)); }
inline float min_nan(float a, float b) { return a != a ? a : b != b ? b : a < b ? a : b; }
inline float max_nan(float a, float b) { return a != a ? a : b != b ? b : a > b ? a : b; }
inline float divide(float a, float b) { return a / b; }
inline float sqrt(float x) { return ::sqrtf(flushed(x)); }
inline float rsqrt(float x) { return 1.f / ::sqrtf(flushed(x)); }
inline float floor(float x) { return ::floorf(x); }
inline int32_t to_int(float x) {
  return x != x ? 0 : x >= 0x1p31f ? INT32_MAX : x <= -0x1p31f ? -INT32_MAX - 1 : static_cast<int32_t>(x);
}
inline int32_t subtract_saturated(int32_t a, int32_t b) {
  const int64_t y = static_cast<int64_t>(a) - b;
  return static_cast<int32_t>(y < -INT32_MAX - 1LL ? -INT32_MAX - 1LL : y > INT32_MAX ? INT32_MAX : y);
}
}  // namespace quire::ptx
"""

PROGRAM = """
#ifndef __CUDACC__
#define QUIRE_DEVICE inline __attribute__((always_inline))
#include "quire/tile/cpu/expression.h"
#endif
#include "quire/tile/shared/expression.cuh"
using namespace quire;

struct Logits { const float* scores; float *score, *mask; };  // [heads, qo_len, kv_len]
constexpr int kHeads = HEADS, kQo = QO_LEN, kKv = KV_LEN, kRequest = REQUEST;

struct Place {
  int query_head, query;
  QUIRE_HD int head() const { return query_head; }
  QUIRE_HD int q_idx() const { return query; }
  QUIRE_HD int request() const { return kRequest; }
  QUIRE_HD int qo_len() const { return kQo; }
  QUIRE_HD int kv_len() const { return kKv; }
};
#ifndef __CUDACC__
struct KeyLanes : Place {  // of the CPU, few rows
  int key;
  cpu::Ints kv_idx() const { return key + cpu::iota(); }
};
struct RowLanes : Place {  // of the CPU, many rows: lanes are queries, of which some do not exist
  int key;
  cpu::Ints q_idx() const { return cpu::iota() % kQo; }
  cpu::Ints head() const { return cpu::Ints{} + query_head; }
  int kv_idx() const { return key; }
};
#endif
template <bool kInside_>
struct Keys : Place {  // of a GPU's lane
  static constexpr bool kInside = kInside_;
  int first, at;
  QUIRE_DEVICE Ramp<int32_t> kv_idx() const { return {first, 1, at}; }
};

template <class V>
struct Evaluate {
  const typename V::Operands& o;
  const Logits& x;
  QUIRE_HD int at(int h, int q, int k) const { return (h * kQo + q) * kKv + k; }

#ifndef __CUDACC__
  void cpu_keys() const {
    for (int h = 0; h < kHeads; ++h)
      for (int q = 0; q < kQo; ++q)
        for (int k = 0; k < kKv; k += cpu::kLanes) {
          const KeyLanes place = {{h, q}, k};
          using M = cpu::ExpressionMath;
          const cpu::Floats s = cpu::load(x.scores + at(h, q, k));
          cpu::store(x.score + at(h, q, k), M::as_logits(V::template score<M>(o, s, place)));
          const cpu::Ints seen = cpu::as_vector(V::template mask<M>(o, place)).lanes;
          for (int i = 0; i < cpu::kLanes; ++i) x.mask[at(h, q, k + i)] = seen[i] != 0;
        }
  }
  void cpu_rows() const {
    for (int h = 0; h < kHeads; ++h)
      for (int k = 0; k < kKv; ++k) {
        const RowLanes place = {{h, 0}, k};
        using M = cpu::ExpressionMath;
        cpu::Floats s = {};
        for (int i = 0; i < cpu::kLanes; ++i) s[i] = x.scores[at(h, i % kQo, k)];
        const cpu::Floats y = M::as_logits(V::template score<M>(o, s, place));
        const cpu::Ints seen = cpu::as_vector(V::template mask<M>(o, place)).lanes;
        for (int q = 0; q < kQo; ++q) x.score[at(h, q, k)] = y[q], x.mask[at(h, q, k)] = seen[q] != 0;
      }
  }
#endif
  template <bool kInside>
  QUIRE_DEVICE void gpu_row(int h, int q) const {
    using M = FragmentMath<false>;
    for (int lane = 0; lane < 4; ++lane)
      for (int k = 0; k < kKv; k += 16) {
        const Keys<kInside> place = {{h, q}, 2 * lane, k};
        Four<float> s;
        for (int j = 0; j < 4; ++j) s.at[j] = x.scores[at(h, q, 2 * lane + k + j / 2 * 8 + j % 2)];
        const Four<float> y = M::as_logits(V::template score<M>(o, s, place));
        const auto seen = V::template mask<M>(o, place);
        for (int j = 0; j < 4; ++j) {
          x.score[at(h, q, 2 * lane + k + j / 2 * 8 + j % 2)] = y.at[j];
          x.mask[at(h, q, 2 * lane + k + j / 2 * 8 + j % 2)] = number(seen, j);
        }
      }
  }
  template <class T>
  QUIRE_DEVICE static bool number(const T& x, int j) {
    return OfKeys<T>::get(x, j);
  }
  QUIRE_DEVICE void gpu(int h, int q, bool may_be_inside) const {
    if constexpr (V::kLinearReads != 0) {
      const Keys<false> place = {{h, q}, 0, 0};
      const KeyRange inside = V::template keys_inside<ExpressionMath>(o, place);
      if (may_be_inside && inside.covers({0, kKv})) return gpu_row<true>(h, q);
    }
    gpu_row<false>(h, q);
  }
};

#ifdef __CUDACC__
template <class V>
__device__ void evaluate(int how, const typename V::Operands& operands, const Logits& x) {
  const Evaluate<V> e = {operands, x};
  e.gpu(threadIdx.x / kQo, threadIdx.x % kQo, how == 3);
}
#else
template <class V>
void evaluate(int how, const void* operands, const Logits& x) {
  const Evaluate<V> e = {*static_cast<const typename V::Operands*>(operands), x};
  if (how == 0) e.cpu_keys();
  if (how == 1) e.cpu_rows();
  if constexpr (LIKE_A_GPU) {
    for (int i = 0; how > 1 && i < kHeads * kQo; ++i) e.gpu(i / kQo, i % kQo, how == 3);
  }
}
#endif
"""


# --- random expressions ----------------------------------------------------------------------------------------------

_FLOATS = ("add", "sub", "mul", "div", "minimum", "maximum", "where", "neg", "abs", "tanh", "exp", "exp2", "log",
           "log2", "sqrt", "rsqrt", "sigmoid", "floor", "sin", "cos", "erf", "to_float", "bool_to_float",
           "bias", "line")  # fmt: skip
_INTS = ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor", "shl", "shr", "minimum", "maximum", "where", "neg",
         "abs", "not", "to_int", "table", "size", "number")  # fmt: skip
_BOOLS = ("lt", "le", "gt", "ge", "eq", "ne", "int_lt", "int_le", "int_gt", "int_ge", "int_eq", "int_ne", "and", "or",
          "xor", "not", "flag", "where")  # fmt: skip
_SYMBOLS = {"lt": "__lt__", "le": "__le__", "gt": "__gt__", "ge": "__ge__", "eq": "__eq__", "ne": "__ne__"}


class Drawn:
    """A program drawn at random: the same each time it is called."""

    def __init__(self, seed: int, steps: int) -> None:
        self.seed, self.steps = seed, steps

    def variant(self) -> quire.Variant:
        """Its score and its mask."""
        names = "q_idx, kv_idx, head, request, qo_len, kv_len, bias, table, flag, line, c, n"
        space = {"run": self._run}
        exec(
            f"def score(score, {names}):\n return run(locals(), 'score')\n"
            f"def mask({names}):\n return run(locals(), 'mask')\n",
            space,
        )
        return quire.Variant(space["score"], space["mask"], tensors=TENSORS, scalars=SCALARS)

    def _run(self, values: dict[str, Any], what: str) -> Any:
        r = Random(f"{self.seed} {what}")
        floats = [values[name] for name in ("score", "c") if name in values]
        ints = [values[name] for name in ("q_idx", "kv_idx", "kv_idx", "head", "request", "qo_len", "kv_len", "n")]
        kv_idx, past = values["kv_idx"], values["q_idx"] - values["kv_idx"]
        floats += [values["line"][values["head"]], values["bias"][0, kv_idx], values["c"] * past]
        ints += [values["table"][values["q_idx"]], past, values["n"] + kv_idx]
        bools = [values["flag"][values["kv_idx"]]]
        for _ in range(self.steps):
            kind = r.choice(("float", "float", "int", "bool"))
            if kind == "float":
                floats.append(self._float(r, r.choice(_FLOATS), floats, ints, bools, values))
            elif kind == "int":
                ints.append(self._int(r, r.choice(_INTS), floats, ints, bools, values))
            else:
                bools.append(self._bool(r, r.choice(_BOOLS), floats, ints, bools, values))
        if what == "mask":
            return where(kv_idx % 2 == 0, bools[-1], bools[len(bools) // 2])
        found = where(bools[-1], 1.0, 2.0)
        parts = [floats[-1], floats[-2], to_float(ints[-1]), found, to_float(ints[len(ints) // 2])]
        for number, part in enumerate(parts[1:]):  # a key for each, so that none hides another's NaN
            parts[0] = where(kv_idx % 5 == number, part, parts[0])
        return parts[0]

    def _float(self, r: Random, op: str, floats: list[Any], ints: list[Any], bools: list[Any], values: Any) -> Any:
        a, b = self._pick(r, floats), self._pick(r, floats)
        if op in ("add", "sub", "mul", "div"):
            return {"add": a + b, "sub": a - b, "mul": a * b, "div": a / b}[op]
        if op == "where":
            return where(r.choice(bools), a, b)
        if op == "bias":
            return values["bias"][self._pick(r, ints), self._pick(r, ints)]
        if op == "line":
            return values["line"][self._pick(r, ints)]
        if op in ("to_float", "bool_to_float"):
            return to_float(r.choice(ints if op == "to_float" else bools))
        return -a if op == "neg" else call(op, a, b) if op in ("minimum", "maximum") else call(op, a)

    def _int(self, r: Random, op: str, floats: list[Any], ints: list[Any], bools: list[Any], values: Any) -> Any:
        a, b = self._pick(r, ints), self._pick(r, ints)
        if op in ("floordiv", "mod", "shl", "shr"):
            b = r.choice(ints) if r.random() < 0.5 else r.randint(1, 9)
            return {"floordiv": a // b, "mod": a % b, "shl": a << b, "shr": a >> b}[op]
        if op in ("add", "sub", "mul", "and", "or", "xor"):
            return {"add": a + b, "sub": a - b, "mul": a * b, "and": a & b, "or": a | b, "xor": a ^ b}[op]
        if op == "where":
            return where(r.choice(bools), a, b)
        if op == "to_int":
            return to_int(r.choice(floats))
        if op == "table":
            return values["table"][a]
        if op == "size":
            return values["bias"].shape[1] + a
        if op == "number":
            return a + r.randint(-100, 100)
        return -a if op == "neg" else ~a if op == "not" else call(op, *((a, b) if op.endswith("imum") else (a,)))

    def _bool(self, r: Random, op: str, floats: list[Any], ints: list[Any], bools: list[Any], values: Any) -> Any:
        if op in _SYMBOLS or op.startswith("int_"):
            a, b = (self._pick(r, ints if op.startswith("int_") else floats) for _ in range(2))
            return getattr(a, _SYMBOLS[op.removeprefix("int_")])(b)
        a, b = r.choice(bools), r.choice(bools)
        if op in ("and", "or", "xor"):
            return {"and": a & b, "or": a | b, "xor": a ^ b}[op]
        if op == "flag":
            return values["flag"][self._pick(r, ints)]
        return where(r.choice(bools), a, b) if op == "where" else ~a

    def _pick(self, r: Random, pool: list[Any]) -> Any:
        """The younger the likelier, so that expressions are deep."""
        return pool[max(r.randrange(len(pool)), r.randrange(len(pool)))]


# --- the truth, and how far float32 may be from it -------------------------------------------------------------------


def noisy(expression: Expression, seed: int, patch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor, Tensor]:
    """Score, mask and extremes of an evaluation whose floats are each off by a little; seed 0: not at all.

    Extremes are where a float leaves the range that float32 has, or is infinite, and where two floats that are compared
    for equality are nearly equal, which float32 may make them.
    """
    source = torch.Generator().manual_seed(seed)
    extremes = torch.zeros(SCORES.shape, dtype=torch.bool)
    exact, operate = tree._wrapped, tree._operate

    def compared(node: Node, args: list[Tensor], *more: Any) -> Tensor:
        if node.op in ("eq", "ne") and node.args[0].type == FLOAT:
            a, b = args
            extremes.logical_or_((a != b) & ((a - b).abs() <= 1e-5 * (1 + a.abs() + b.abs())))
        return operate(node, args, *more)

    def wrapped(value: Tensor, node: Node) -> Tensor:
        value = exact(value, node)
        if node.type != FLOAT:
            return value
        size = value.abs()
        extremes.logical_or_((size > 1e36) | ((size < 1e-36) & (size > 0)))
        is_exact = node.op in ("const", "read", "scalar", "neg", "abs", "where", "minimum", "maximum")
        if seed == 0 or is_exact or (node.op == "to_float" and bool((size < 2**24).all())):
            return value
        errors = (torch.rand((2, *value.shape), generator=source, dtype=torch.float64) * 2 - 1) * 4e-6
        return value * (1 + errors[0]) + errors[1] * (
            node.op in ("tanh", "sigmoid", "log", "log2", "sin", "cos", "erf")
        )

    with patch.context() as context:
        context.setattr(tree, "_wrapped", wrapped)
        context.setattr(tree, "_operate", compared)
        values = {name: x if isinstance(x, Tensor) else torch.tensor(x) for name, x in VALUES.items()}
        score, mask = tree.evaluate(expression, SCORES.double(), REQUEST, values)
    return score, mask, extremes


@dataclass
class Truth:
    """What an expression is in float64, and whether float32 can be held to that: where evaluations agree whose floats
    are each off by a little.
    """

    expression: Expression
    patch: pytest.MonkeyPatch
    evaluations: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def check(self, how: str, score: Tensor, mask: Tensor) -> int:
        """Compares where evaluations agree; returns how many elements that are."""
        self._evaluate(5)
        wrong, _ = self._wrong(score, mask)
        if wrong.any():  # beside a step, five evaluations may agree by chance
            self._evaluate(100)
        wrong, steady = self._wrong(score, mask)
        assert not wrong.any(), (
            f"{how}: {int(wrong.sum())} elements, such as {wrong.nonzero()[0].tolist()}\n{self.expression.text}"
        )
        return steady

    def _evaluate(self, count: int) -> None:
        for seed in range(len(self.evaluations), count):
            self.evaluations.append(noisy(self.expression, seed, self.patch))

    def _wrong(self, score: Tensor, mask: Tensor) -> tuple[Tensor, int]:
        (truth, seen, extremes), *others = self.evaluations
        extremes = extremes | torch.stack([e for *_, e in others]).any(0)
        spread = torch.stack([(other - truth).abs() for other, *_ in others]).amax(0)
        same = torch.stack([other.isfinite() == truth.isfinite() for other, *_ in others]).all(0)
        steady = same & ~extremes & truth.isfinite()
        error = (score.double() - truth).abs()
        bad_score = ~(error <= 4 * spread + 2e-6 * truth.abs() + 2e-6) & (spread <= 1e-3 * (1 + truth.abs()))
        firm = torch.stack([s == seen for _, s, _ in others]).all(0) & ~extremes
        return (steady & bad_score) | (firm & (mask.bool() != seen)), int(steady.sum())


# --- the programs ----------------------------------------------------------------------------------------------------


def program(expressions: list[Expression], entry: str, *, like_a_gpu: bool = True) -> str:
    """The source of them all; entry: a line for each. like_a_gpu: with a GPU's ways of evaluation, on the host too."""
    units = [
        f"struct V{i} {{\nstatic constexpr int kScore = 1, kScoreMask = 1, kOperandsAt = 0;\n{render(e)}\n}};\n"
        + entry.format(i=i)
        for i, e in enumerate(expressions)
    ]
    sizes = {"HEADS": HEADS, "QO_LEN": QO_LEN, "KV_LEN": KV_LEN, "REQUEST": REQUEST}
    sizes["LIKE_A_GPU"] = int(like_a_gpu)
    return "".join(f"#define {name} {size}\n" for name, size in sizes.items()) + PROGRAM + "".join(units)


def compiled(command: list[str], source: str, place: Path, name: str) -> Path:
    """What a compiler makes of `source`."""
    suffix = ".cu" if command[0] == "nvcc" else ".cpp"
    (place / f"all{suffix}").write_text(source)
    files = ["-I", str(place), "-I", str(TEMPLATES), "-o", str(place / name), str(place / f"all{suffix}")]
    done = subprocess.run([*command, *files], capture_output=True, text=True, check=False)
    errors = [line for line in done.stderr.splitlines() if "error" in line][:5]
    assert done.returncode == 0, "\n".join(errors)
    return place / name


def build(expressions: list[Expression], place: Path, *, like_a_gpu: bool) -> ctypes.CDLL:
    """One library of them all, for the host."""
    (place / "quire/ptx").mkdir(parents=True)
    (place / "quire/ptx/math.cuh").write_text(INSTRUCTIONS)
    entry = 'extern "C" void evaluate{i}(int how, const void* o, Logits* x) {{ evaluate<V{i}>(how, o, *x); }}\n'
    flags = ["-O1", "-std=c++17", "-fPIC", "-shared", "-march=native", "-Wno-unknown-pragmas", "-fno-trapping-math"]
    source = program(expressions, entry, like_a_gpu=like_a_gpu)
    return ctypes.CDLL(str(compiled(["g++", *flags], source, place, "all.so")))


def operands(expression: Expression, values: dict[str, Any] = VALUES) -> ctypes.Structure:
    """The values of VALUES as a kernel is given them."""
    from quire.engine.operands import write_operands
    from quire.kernels.expressions.cxx import operands_struct

    struct = operands_struct(expression)()
    write_operands(struct, expression, set(values), values, values["bias"].device, {})
    return struct


class Logits(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("scores", "score", "mask"))


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(-(-COUNT // PER_PROGRAM)))
def test_random_expressions(batch, tmp_path, monkeypatch):
    """What the tracer lets through compiles, and is what float64 says, in all ways that kernels evaluate it: two of the
    CPU, and of the first programs, because they take long to compile, two of GPUs.
    """
    drawn = [Drawn(batch * PER_PROGRAM + i, 2 + i % 24).variant().expression for i in range(PER_PROGRAM)]
    ways = ("keys", "rows", "GPU", "GPU, neighbours")[: 4 if batch < LIKE_A_GPU else 2]
    library, steady = build(drawn, tmp_path, like_a_gpu=len(ways) > 2), 0
    for i, expression in enumerate(drawn):
        assert quire.Variant.parse(expression.text).expression == expression
        given, truth = operands(expression), Truth(expression, monkeypatch)
        for how, name in enumerate(ways):
            score, mask = torch.full(SCORES.shape, math.nan), torch.full(SCORES.shape, math.nan)
            x = Logits(SCORES.data_ptr(), score.data_ptr(), mask.data_ptr())
            getattr(library, f"evaluate{i}")(how, ctypes.byref(given), ctypes.byref(x))
            assert not mask.isnan().any()
            steady += truth.check(name, score, mask)
    assert steady > 0.3 * len(drawn) * len(ways) * SCORES.numel(), "most scores are compared"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("batch", range(-(-COUNT // PER_PROGRAM)))
def test_random_expressions_on_a_gpu(batch, tmp_path, monkeypatch):
    """The same with a GPU's own instructions."""
    drawn = [Drawn(batch * PER_PROGRAM + i, 2 + i % 24).variant().expression for i in range(PER_PROGRAM)]
    entry = (
        'extern "C" __global__ void evaluate{i}(int how, const __grid_constant__ V{i}::Operands o, Logits x) {{ '
        "evaluate<V{i}>(how, o, x); }}\n"
    )
    major, minor = torch.cuda.get_device_capability()
    command = ["nvcc", "-cubin", "-std=c++17", f"-arch=sm_{major}{minor}"]
    cubin = compiled(command, program(drawn, entry), tmp_path, "all.cubin").read_bytes()
    values = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in VALUES.items()}
    scores, driver, module, steady = SCORES.cuda(), ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), 0
    assert driver.cuModuleLoadData(ctypes.byref(module), cubin) == 0
    for i, expression in enumerate(drawn):
        function, given = ctypes.c_void_p(), operands(expression, values)
        truth = Truth(expression, monkeypatch)
        assert driver.cuModuleGetFunction(ctypes.byref(function), module, f"evaluate{i}".encode()) == 0
        for how, name in ((2, "GPU"), (3, "GPU, neighbours")):
            score, mask = torch.full_like(scores, math.nan), torch.full_like(scores, math.nan)
            x = Logits(scores.data_ptr(), score.data_ptr(), mask.data_ptr())
            arguments = (ctypes.c_int(how), given, x)
            packed = (ctypes.c_void_p * 3)(*(ctypes.addressof(argument) for argument in arguments))
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            grid = (1, 1, 1, HEADS * QO_LEN, 1, 1, 0)
            assert driver.cuLaunchKernel(function, *grid, stream, packed, None) == 0
            steady += truth.check(name, score.cpu(), mask.cpu())
    assert steady > 0.3 * len(drawn) * 2 * SCORES.numel(), "most scores are compared"


def test_small_tanh(tmp_path):
    """The tanh of small numbers that needs no special functions is within 1.8e-6 wherever it is used."""
    (tmp_path / "quire/ptx").mkdir(parents=True)
    (tmp_path / "quire/ptx/math.cuh").write_text(INSTRUCTIONS)
    source = """
#define QUIRE_DEVICE inline __attribute__((always_inline))
#include "quire/tile/shared/tanh.cuh"
extern "C" float most(float scale, float factor) { quire::SmallTanh t; t.set(scale, factor); return t.most; }
extern "C" float tanh_of(float x, float scale, float factor, float y) {
  quire::SmallTanh t;
  t.set(scale, factor);
  return t.plus(x, y);
}
"""
    library = ctypes.CDLL(str(compiled(["g++", "-O1", "-std=c++17", "-fPIC", "-shared"], source, tmp_path, "tanh.so")))
    library.most.restype = library.tanh_of.restype = ctypes.c_float
    number = ctypes.c_float
    for scale, factor in ((1.0, 1.0), (0.0884 / 30, 30 * 1.4427), (0.0884 / 1e4, 1e4), (40.0, 0.5)):
        most = library.most(number(scale), number(factor))
        assert math.isclose(most, min(0.4, 32 / factor) / scale, rel_tol=1e-6)
        for i in range(-200, 201):
            x = most * i / 200
            got = library.tanh_of(number(x), number(scale), number(factor), number(2.0)) - 2.0
            truth = factor * math.tanh(x * scale)
            assert abs(got - truth) <= min(1.8e-6 * factor, 1.5e-5 * abs(truth)) + 1e-6
    for scale, factor in ((-1.0, 1.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1e30), (1e5, 1.0)):
        assert library.most(number(scale), number(factor)) < 0, "powers that are out of range have no small numbers"
