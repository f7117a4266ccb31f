"""Python imports this module at its start: every process of a run of FlashInfer's tests, their own children included, has
Quire as its flashinfer. Names that Quire has not can be imported too; they raise UnsupportedError when they are called."""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types

from quire.compat.flashinfer import refusing, standin

#: Questions whose answer is known: tests skip what is not there.
ANSWERS = {"flashinfer.cutile.cutile_common": {"is_cuda_tile_available": lambda: False}}

standin.activate()
sys.meta_path.insert(0, sys.meta_path.pop())  # before the package beside the tests


def refuse_others(module):
    """Every name that `module` lacks is one that refuses."""
    path = module.__name__.removeprefix("flashinfer").removeprefix(".")

    def other(name):
        if name.startswith("__"):
            raise AttributeError(name)
        return refusing(f"{path}.{name}".removeprefix("."))

    module.__getattr__ = other


class Others(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of FlashInfer that the stand-in has not, and CUDA libraries that tests import and do not need."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in ("flashinfer", "cudnn", "tvm_ffi"):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return types.ModuleType(spec.name)

    def exec_module(self, module):
        refuse_others(module)
        vars(module).update(ANSWERS.get(module.__name__, {}))


sys.meta_path.append(Others())
importlib.import_module("flashinfer")
for name, module in list(sys.modules.items()):
    if name.partition(".")[0] == "flashinfer":
        refuse_others(module)
