"""What the engines' runners share: stub modules, Quire as their flashinfer, the CPU in place of CUDA, a reference."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import pathlib
import sys
import traceback
import types

import torch
from torch.overrides import TorchFunctionMode

from quire.compat import flashinfer as compat

compat.activate()


class _Meta(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Meta(name, (Anything,), {})
        setattr(cls, name, value)
        return value

    def __call__(cls, *args, **kwargs):
        if cls.__mro__[1] is Anything and len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]  # used as a decorator
        return super().__call__(*args, **kwargs)

    def __getitem__(cls, item):  # a generic base, or kernel[grid]
        return cls

    def __or__(cls, other):
        return cls

    __ror__ = __or__


class Anything(metaclass=_Meta):
    """Stands for any name of an engine: a base class, a decorator, a namespace or an object."""

    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        return args[0] if len(args) == 1 and callable(args[0]) else Anything()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __bool__(self):
        return False

    def __getitem__(self, item):
        return self


class StubModule(types.ModuleType):
    __path__: list = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Meta(name, (Anything,), {"__module__": self.__name__})
        setattr(self, name, value)
        return value


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Any module of `packages` but those in `real` (name -> file) is a stub; `names` sets attributes: module -> {...}."""

    def __init__(self, packages, real, names):
        self.packages, self.real, self.names = packages, real, names

    def find_spec(self, fullname, path=None, target=None):
        if fullname in self.real:
            return importlib.util.spec_from_file_location(fullname, self.real[fullname])
        if fullname.split(".")[0] in self.packages:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return StubModule(spec.name)

    def exec_module(self, module):
        module.__dict__.update(self.names.get(module.__name__, {}))


class OnCpu(TorchFunctionMode):
    """device="cuda" and pinned memory mean the CPU."""

    def __torch_function__(self, func, types_, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


def reference(q, k, v, scale, causal=True, window=-1, cap=0.0, sinks=None, return_lse=False):
    """Plain attention in float64: q [n, h, d] are the last tokens of k, v [m, hk, d]. window: keys to the left that stay."""
    n, m, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, 1) for t in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if cap:
        logits = cap * torch.tanh(logits / cap)
    qi, ki = torch.arange(n)[:, None] + m - n, torch.arange(m)[None]
    seen = (ki <= qi) if causal else torch.ones(n, m, dtype=torch.bool)
    if window >= 0:
        seen = seen & (ki >= qi - window)
    logits = logits.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.double()[:, None, None].expand(-1, n, 1)], -1)
        v = torch.cat([v, torch.zeros_like(v[:1])])
    return torch.einsum("hqk,khd->qhd", logits.softmax(-1), v)


RESULTS: list[tuple[str, str]] = []
torch.cuda.get_device_properties = lambda *a: types.SimpleNamespace(multi_processor_count=132, name="CPU")


def case(name, function, tolerance=2e-3):
    """Runs `function`, which returns (result, reference); prints what came."""
    try:
        with OnCpu():
            got, want = function()
        error = float((got.double() - want.double()).abs().max() / want.double().abs().max())
        text = f"right ({error:.1e})" if error < tolerance else f"WRONG (error {error:.1e} of the largest)"
    except Exception as error:  # an engine may raise anything: the path is then not right
        where = [f for f in traceback.extract_tb(error.__traceback__) if "harness" not in f.filename]
        engine = [
            f
            for f in where
            if any(p in f.filename for p in ("sglang", "vllm", "minisgl", "lightllm", "text_generation"))
        ]
        at = f" at {pathlib.Path(engine[-1].filename).name}:{engine[-1].lineno}" if engine else ""
        text = f"FAILS{at}: {type(error).__name__}: {str(error).splitlines()[0][:230] if str(error) else ''}"
        if os.environ.get("ENGINES_TRACE"):
            traceback.print_exc()
    RESULTS.append((name, text))
    print(f"{name:52} {text}", flush=True)


def finish(expected=()):
    """Exit status 1 if a path is not right, but for those `expected` not to be: with a reason each."""
    bad = {n for n, t in RESULTS if not t.startswith("right")}
    print(f"{len(RESULTS) - len(bad)} of {len(RESULTS)} run right")
    print(compat.report())
    sys.exit(bad != set(expected))
