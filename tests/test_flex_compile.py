"""quire.flex_attention in torch.compile(fullgraph=True), torch.export and make_fx: its functions are in the graph."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.variables import higher_order_ops
from torch._inductor import config as inductor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import flex_attention as theirs

import quire
from quire.attention import flex
from quire.engine import plan_cache
from quire.engine.operators import FunctionsOperator
from test_compile import TRACERS, pytestmark  # noqa: F401  # of torch's own warnings

if not hasattr(higher_order_ops, "_hop_name_to_variable_class"):
    pytest.skip("before torch 2.9 Dynamo traces functions of its own operators alone", allow_module_level=True)

HEADS, DIM = 4, 32


@pytest.fixture(autouse=True)
def _no_graphs():
    """Also none of Inductor's cache, which does not notice that an operator gives other strides."""
    torch._dynamo.reset()
    with torch.no_grad(), inductor.patch(fx_graph_cache=False):
        yield
    torch._dynamo.reset()


def of_torch(q: Tensor, *args: object, **options: object) -> object:
    """torch's result in float64."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not compiled
        return theirs.flex_attention(*(t.double() for t in (q, *args[:2])), *args[2:], **options)


def agree(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result.double(), expected.double(), rtol=2e-5, atol=2e-5)


def inputs(q_len: int = 16, kv_len: int = 16, batch: int = 2) -> list[Tensor]:
    return [torch.randn(batch, HEADS, n, DIM) for n in (q_len, kv_len, kv_len)]


def block_mask(function: object, n: int = 16) -> theirs.BlockMask:
    return theirs.create_block_mask(function, None, None, n, n, device="cpu", BLOCK_SIZE=8)


class Layer(torch.nn.Module):
    """A score that reads a table, a scale and a number; tables of a module are inputs of its graph."""

    def __init__(self, attention: object) -> None:
        super().__init__()
        self.attention = attention
        self.bias = torch.nn.Buffer(torch.rand(HEADS, 16, 16))
        self.scale = torch.nn.Buffer(torch.tensor(0.5))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: object, more: object) -> Tensor:
        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (s * self.scale + self.bias[h, i][j]).clamp(max=5) + torch.where(i > j, more, 0)

        return self.attention(q * 2, k, v, score_mod=score, block_mask=mask) + 1


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("tracer", TRACERS)
def test_one_graph(tracer, dynamic):
    """Other values of captured tensors, in place or in new tensors, compile nothing, neither graphs nor kernels."""
    documents = torch.randint(0, 3, (16,))
    mask = block_mask(lambda b, h, i, j: (i >= j) & (documents[i] == documents[j]))
    mine, reference = Layer(quire.flex_attention), Layer(of_torch)
    counter = CompileCounterWithBackend(tracer)
    compiled = torch.compile(mine, backend=counter, fullgraph=True, dynamic=dynamic)
    for step in range(4):
        tensors = inputs()
        if step % 2:
            mine.bias, mine.scale = torch.rand(HEADS, 16, 16), torch.tensor(0.1 * step)
        else:
            mine.bias.copy_(torch.rand(HEADS, 16, 16))
        reference.bias, reference.scale = mine.bias, mine.scale
        agree(compiled(*tensors, mask, 3), reference(*tensors, mask, 3))
    assert counter.frame_count == 1


@pytest.mark.parametrize("tracer", TRACERS)
def test_dynamic_lengths_and_numbers(tracer):
    counter = CompileCounterWithBackend(tracer)

    def attend(attention: object, q: Tensor, k: Tensor, v: Tensor, n: int) -> Tensor:
        return attention(q, k, v, lambda s, b, h, i, j: torch.where(i + n >= j, s - (i - j).abs() * 0.1, -torch.inf))

    compiled = torch.compile(
        lambda *args: attend(quire.flex_attention, *args), backend=counter, fullgraph=True, dynamic=True
    )
    for q_len, kv_len, n in ((16, 24, 9), (17, 40, 30), (9, 33, 11)):
        tensors = inputs(q_len, kv_len)
        agree(compiled(*tensors, n), attend(of_torch, *tensors, n))
    assert counter.frame_count == 1


@pytest.mark.parametrize("tracer", ["eager", "aot_eager"])
def test_sizes_that_a_graph_does_not_know(tracer):
    """Indices from the end, clamped ones, and rows, of tensors whose sizes are symbols."""

    def attend(attention: object, q: Tensor, k: Tensor, v: Tensor, table: Tensor, rows: Tensor) -> Tensor:
        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            near = torch.clamp(j, 0, table.shape[0] - 1)
            hidden = torch.where(i % 5 == 4, -torch.inf, torch.where(j > i, -torch.inf, s))
            return hidden + table[near] + table[i - j] + (rows[i] * rows[-1]).sum()

        return attention(q, k, v, score)

    compiled = torch.compile(
        lambda *args: attend(quire.flex_attention, *args), backend=tracer, fullgraph=True, dynamic=True
    )
    for n in (12, 17):
        given = *inputs(n, n), torch.rand(n), torch.rand(n, 3)
        agree(torch.nan_to_num(compiled(*given)), torch.nan_to_num(attend(of_torch, *given)))


@pytest.mark.parametrize("tracer", TRACERS)
def test_results_beside_o(tracer):
    """lse, AuxOutput; grouped heads; head dims that kernels do not have; neither score nor mask."""
    q, k, v = torch.randn(2, HEADS, 5, 20), torch.randn(2, 2, 9, 20), torch.randn(2, 2, 9, 12)

    def attend(attention: object, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        o, lse = attention(q, k, v, None, None, 0.3, enable_gqa=True, return_lse=True, kernel_options={"BLOCK_M": 64})
        other, aux = attention(q, k, v, enable_gqa=True, return_aux=theirs.AuxRequest(lse=True))
        return o.transpose(1, 2).reshape(2, 5, -1), lse, other, aux.lse

    compiled = torch.compile(lambda *args: attend(quire.flex_attention, *args), backend=tracer, fullgraph=True)
    for result, expected in zip(compiled(q, k, v), attend(of_torch, q, k, v), strict=True):
        agree(result, expected)


@pytest.mark.parametrize("tracer", ["eager", "aot_eager"])
def test_lists_decide(tracer):
    """Lists that say something else than the function, those without a function, and other lists in a later call."""
    function = lambda b, h, i, j: i >= j  # noqa: E731
    q, k, v = inputs()
    compiled = torch.compile(lambda *args: quire.flex_attention(*args), backend=tracer, fullgraph=True)
    for seed in range(2):
        torch.manual_seed(seed)
        indices = torch.stack([torch.randperm(2) for _ in range(2)])[None, None].int()
        for mask_mod in (function, None):
            mask = theirs.BlockMask.from_kv_blocks(
                torch.tensor([[[1, 2]]], dtype=torch.int32), indices, BLOCK_SIZE=8, mask_mod=mask_mod,
                seq_lengths=(16, 16),
            )  # fmt: skip
            dense = mask.to_dense().repeat_interleave(8, 2).repeat_interleave(8, 3).bool()
            if mask_mod is not None:
                dense = dense & torch.ones(16, 16).tril().bool()
            agree(
                torch.nan_to_num(compiled(q, k, v, None, mask)),
                torch.nan_to_num(torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense)),
            )


@pytest.mark.parametrize("tracer", ["eager", "aot_eager"])
def test_plans_are_kept(tracer, monkeypatch):
    """A block mask is planned once, also in a graph."""
    plans, known = [], plan_cache.new_plan
    monkeypatch.setattr(plan_cache, "new_plan", lambda *args: (plans.append(1), known(*args))[1])
    documents = torch.randint(0, 3, (16,))
    mask = block_mask(lambda b, h, i, j: (i >= j) & (documents[i] == documents[j]))
    compiled = torch.compile(
        lambda q, k, v, mask: quire.flex_attention(q, k, v, block_mask=mask), backend=tracer, fullgraph=True
    )
    for _ in range(4):
        compiled(*inputs(), mask)
    assert len(plans) == 1
    documents.copy_(torch.randint(0, 3, (16,)))  # in place: planned anew
    tensors = inputs()
    agree(compiled(*tensors, mask), of_torch(*tensors, block_mask=mask))
    assert len(plans) == 2


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("tracer", ["aot_eager", "inductor"])
def test_repeated_calls_in_graphs_only_launch(tracer, heads_first, monkeypatch):
    """A call of a known signature is neither traced nor planned, with an lse and other captured tensors, too."""
    documents, slopes = torch.randint(0, 3, (16,)), torch.rand(HEADS)
    mask = block_mask(lambda b, h, i, j: (i >= j) & (documents[i] == documents[j]))

    def attend(attention: object, q: Tensor, k: Tensor, v: Tensor, by: Tensor) -> object:
        return attention(q, k, v, lambda s, b, h, i, j: s + by[h] * j, mask, return_lse=True)

    compiled = torch.compile(lambda *args: attend(quire.flex_attention, *args), backend=tracer, fullgraph=True)
    for step in range(5):
        tensors = inputs()
        if not heads_first:
            tensors = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]
        if step == 3:
            monkeypatch.setattr(flex, "_attend", None)
        o, lse = compiled(*tensors, slopes * step)
        truth, of_rows = attend(of_torch, *tensors, slopes.double() * step)
        agree(o, truth), agree(lse, of_rows)


def test_exported_programs_hold_the_functions(tmp_path):
    """Their text is an argument of the operator, so that another process can run the program."""
    layer, (q, k, v) = Layer(quire.flex_attention), inputs()

    class Exported(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.layer(q, k, v, None, 2)

    for strict in (False, True):
        program = torch.export.export(Exported(), (q, k, v), strict=strict)
        assert "quire.flex_attention" in str(program.graph)
        torch.export.save(program, tmp_path / "program.pt2")
        agree(torch.export.load(tmp_path / "program.pt2").module()(q, k, v), layer(q, k, v, None, 2))


def test_make_fx():
    bias, (q, k, v) = torch.rand(HEADS), inputs()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return quire.flex_attention(q, k, v, lambda s, b, h, i, j: s + (2 * bias)[h] * (j - i))

    graph = make_fx(attend, tracing_mode="fake", _allow_non_fake_inputs=True)(q, k, v)
    agree(graph(q, k, v), attend(q, k, v))


def test_gradients_and_functions_are_refused():
    q, k, v = inputs()
    refused = (torch._dynamo.exc.TorchRuntimeError, quire.ValidationError)
    compiled = torch.compile(quire.flex_attention, backend="eager", fullgraph=True)
    with torch.enable_grad(), pytest.raises(refused, match="inference only"):
        compiled(q.clone().requires_grad_(), k, v)
    with pytest.raises(refused, match="float64"):
        compiled(q.double(), k.double(), v.double())
    for tracer in ("eager", "aot_eager"):
        compiled = torch.compile(quire.flex_attention, backend=tracer, fullgraph=True)
        raised = pytest.raises((*refused, torch._dynamo.exc.BackendCompilerFailed), match=r"torch's lgamma\(\) is no")
        with raised:
            compiled(q, k, v, lambda s, b, h, i, j: torch.lgamma(s))


def test_older_dynamos_end_a_graph(monkeypatch):
    """Where Dynamo cannot trace the functions, a compiled function calls it between two graphs."""
    monkeypatch.setattr(FunctionsOperator, "is_known", lambda _: False)
    slopes, counter = torch.rand(HEADS), CompileCounterWithBackend("eager")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return 1 + quire.flex_attention(2 * q, k, v, lambda s, b, h, i, j: s + slopes[h] * (j - i))

    tensors = inputs()
    agree(torch.compile(attend, backend=counter)(*tensors), attend(*tensors))
    assert counter.frame_count == 2
