"""A pytest plugin for torch's tests of flex_attention: what they compile is Quire's, what they compare with stays torch's.

A test compares torch.compile(a function that calls flex_attention) with the same function in eager mode. Within what the test
compiles, flex_attention is quire.flex_attention; UPSTREAM_COMPILE says how: "no" calls the function, any other value is
the backend of torch.compile. A test that compiles nothing runs a second time with Quire in all calls but those in float64.
Quire has no gradients: backward() does nothing, results alone are compared, and tests whose subject is gradients are left out.
On a CPU, what tests make on "cuda" lies there.
"""

import functools
import inspect
import os
import re
from collections import defaultdict

import plugin
import pytest
import torch
from torch.nn.attention import flex_attention as theirs
from torch.nn.attention.experimental._paged_attention import PagedAttention

import quire

BACKEND = os.environ.get("UPSTREAM_COMPILE", "no")
ON_CPU = not torch.cuda.is_available()
REFERENCES = "eager", "aot_eager"  # what tests compile with these is what they compare with
MODULES = "test_flex_attention", "test_flex_decoding"
#: Tests of what is torch's alone: gradients, its kernels' code and errors, the graphs that it makes and how many (those of
#: its eager calls, too), create_block_mask() itself, PagedAttention itself.
OUTSIDE = re.compile(
    r"grad|backward|fw_bw|autograd|max_autotune|epilogue_fused|kernel_options_argument|float32_matmul_precision|cant_lower|"
    r"cpu_error_message|cpu_dtype|block_mask_viz|compiling_create|inputs_are_realized|subgraph_respect|differentiable|"
    r"free_symbol|symbol_closure|logsumexp_only_return|force_write_lse|captured_reduction|captured_wrong_device|"
    r"invalid_block_size|mask_mod_combiners|rows_0_check|comparison_vs_sdpa|bw_decoding|symmetric_bias|"
    r"mods_dynamic|automatic_dynamic|not_trigger_dynamic|recompile|"
    r"TestPagedAttention.*(page_allocation|allocate|update|convert)|"
    r"TestBlockMask.*(attributes|size_changes|getitem|device_change|test_block_size|init_mismatched|from_kv_blocks)"
)
#: Tests that compare devices, which takes a GPU.
OF_DEVICES = re.compile(r"mixed_device|same_device|cuda_1")


class State:
    """What the calls of the current test are."""

    depth = 0  # of calls of what the test compiles
    is_quire_everywhere = False
    is_torchs = False  # whether torch's flex_attention runs, which compiles for itself
    compiled = eager = 0
    true_compile = torch.compile


def flex_attention(query, key, value, *args, **kwargs):
    """Quire's within what a test compiles, else torch's."""
    if torch.compiler.is_compiling():
        return quire.flex_attention(query, key, value, *args, **kwargs)
    State.eager += not State.depth
    if query.dtype is not torch.float64 and (State.depth or State.is_quire_everywhere):
        with torch.no_grad():
            return quire.flex_attention(query.detach(), key.detach(), value.detach(), *args, **kwargs)
    if ON_CPU:  # where torch's refuses gradients
        query, key, value = query.detach(), key.detach(), value.detach()
    State.is_torchs = True
    try:
        return theirs.flex_attention(query, key, value, *args, **kwargs)
    finally:
        State.is_torchs = False


def compile(model=None, **options):
    """A function that calls `model` as something compiled."""
    if State.is_torchs:
        return State.true_compile(model, **options)
    if model is None:
        return functools.partial(compile, **options)
    if options.get("backend") in REFERENCES or model in (theirs.create_block_mask, theirs.create_mask):
        return model
    inner = model
    if BACKEND != "no":
        known = {name: options[name] for name in ("dynamic", "fullgraph") if name in options}
        inner = State.true_compile(model, backend=BACKEND, **known)

    def call(*args, **kwargs):
        State.compiled += 1
        State.depth += 1
        try:
            with torch.no_grad():
                return inner(*args, **kwargs)
        finally:
            State.depth -= 1

    return call


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """A sample of each test's cases, which torch makes as methods; tests of other things are left out."""
    others = [OUTSIDE, *([OF_DEVICES] if ON_CPU else [])]
    left_out = [item for item in items if any(pattern.search(item.nodeid) for pattern in others)]
    cases = defaultdict(list)
    for item in items:
        if item not in left_out:
            name = name_in_source(item)
            case = item.originalname.removeprefix(name)
            test = item.nodeid.removesuffix(case)
            item.user_properties.append(("case", f"{test}[{case.strip('_')}]" if case else test))
            cases[test].append(item)
    for name, found in cases.items():
        plugin.COUNTS[name] = len(found)
        found.sort(key=lambda item: plugin.order(item.nodeid))
        left_out += found[plugin.SAMPLE or len(found) :]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@functools.cache
def names_in(path):
    """The names of a file's tests."""
    return sorted(re.findall(r"def (test_\w+)", path.read_text()), key=len, reverse=True)


def name_in_source(item):
    """The test that torch made a method of."""
    return next((name for name in names_in(item.path) if item.originalname.startswith(name)), item.originalname)


def pytest_pycollect_makemodule(module_path, parent):
    """The names of a test module, after its import."""
    if module_path.stem not in MODULES:
        return None
    found = pytest.Module.from_parent(parent, path=module_path)
    adapt(found.obj)
    return found


def adapt(module):
    """Quire in a test module."""
    for name, value in list(vars(module).items()):
        if value is theirs.flex_attention:
            setattr(module, name, flex_attention)
        if inspect.isclass(value) and value.__module__ == module.__name__:
            if hasattr(value, "_check_out_and_grad"):
                value._check_out_and_grad = compare_results
            if hasattr(value, "_check_outputs_and_grads"):
                value._check_outputs_and_grads = compare_first


def assign(self, batch_idx, input_pos, *args):
    """PagedAttention.assign(), also as torch 2.6's tests call it: with the positions of one request, the same for all."""
    return true_assign(self, batch_idx, input_pos.expand(len(batch_idx), -1), *args)


true_assign = PagedAttention.assign
PagedAttention.assign = assign


def compare_results(self, golden_out, ref_out, compiled_out, *_, **__):
    self._check_out(golden_out, ref_out, compiled_out)


def compare_first(self, out_eager, out_compiled, out_gold, *_, **__):
    self._gold_check(out_eager, out_compiled, out_gold, "out")


class Adapted:
    """While a test runs: torch.compile is this module's, and there are no gradients."""

    def __enter__(self):
        self._saved = torch.compile, torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad
        torch.compile = compile
        torch.Tensor.backward = torch.autograd.backward = lambda *_, **__: None
        torch.autograd.grad = lambda _, inputs, *__, **___: tuple(map(torch.zeros_like, inputs))
        State.compiled = State.eager = State.depth = 0

    def __exit__(self, *_):
        torch.compile, torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad = self._saved


@pytest.hookimpl(wrapper=True, trylast=True)  # within what maps "cuda" to the CPU
def pytest_runtest_call(item):
    """A test that compiles nothing is run again, all of it by Quire, whose result then counts."""
    State.is_quire_everywhere = False
    with Adapted():
        try:
            return (yield)
        except Exception:
            if State.compiled or not State.eager:
                raise
        finally:
            if not State.compiled and State.eager:
                State.is_quire_everywhere = True
                item.__dict__.pop("_excinfo", None)  # where pytest has the failures of unittest's cases
                item.runtest()
