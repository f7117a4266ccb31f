"""FlashAttention's functions in the modules where engines and other programs import them: Quire's over those there."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from quire.compat.flash_attn_interface_batch import fork_keywords
from quire.compat.flashinfer import fallback, spec_and_then
from quire.compat.flashinfer.fallback import function_over
from quire.errors import CompileError, PlanError, UnsupportedError, ValidationError
from quire.jit import config, events

_Call = Callable[..., Any]
_FA2, _FA3 = "quire.compat.flash_attn", "quire.compat.flash_attn_interface"
_OF_FORKS = ("flash_attn_varlen_func", "flash_attn_with_kvcache")

#: Modules with FlashAttention's functions: the module of Quire in their place, and names of it; (): all public ones.
DOORS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "flash_attn": (_FA2, ()),
    "flash_attn.flash_attn_interface": (_FA2, ()),
    "flash_attn_interface": (_FA3, ()),
    "sgl_kernel.flash_attn": (_FA3, _OF_FORKS),
    "vllm.vllm_flash_attn": (_FA3, _OF_FORKS),
    "vllm.vllm_flash_attn.flash_attn_interface": (_FA3, _OF_FORKS),
}
#: Names that stay those of the library where it is installed: what it is asked for, and the schedules of its kernels,
#: which it needs for the calls that Quire leaves to it.
_STAY = frozenset(
    {
        "FA2_AVAILABLE", "FA3_AVAILABLE", "fa_version_unsupported_reason", "get_scheduler_metadata",
        "is_fa_version_supported",
    }
)  # fmt: skip


def install(*missing: str) -> bool:
    """Replace FlashAttention's functions from now on, in this process; whether that was done. May be called repeatedly.

    missing: modules that are not installed and that Quire is to stand for, such as "flash_attn_interface".
    QUIRE_FLASH_ATTN=off keeps it from doing anything. Raises ValidationError for another module than those above.

    >>> from quire.compat import engines
    >>> engines.install("flash_attn_interface")
    True
    >>> from flash_attn_interface import flash_attn_func
    >>> q = torch.randn(2, 5, 8, 64)
    >>> flash_attn_func(q, q, q, causal=True).shape
    torch.Size([2, 5, 8, 64])
    >>> engines.report().split()[:3]
    ['served', 'flash_attn_func', '1']
    >>> engines.uninstall()
    """
    for name in missing:
        if name not in DOORS:
            raise ValidationError(f"missing: expected one of {', '.join(DOORS)}, got {name!r}.")
    wish = config.flash_attn_overlay() or "auto"
    if wish == "off":
        return False
    if wish == "auto" and (gpus := fallback.untried_gpus()):
        events.info(
            f"FlashAttention keeps its functions, as no variant of Quire has run on {', '.join(gpus)} (quire matrix); "
            f"QUIRE_FLASH_ATTN=on replaces them"
        )
        return False
    fallback.start("engines")
    doors.activate(missing)
    return True


def uninstall() -> None:
    """Undo install()."""
    doors.deactivate()
    fallback.stop("engines")


@cache
def served(module: str) -> Mapping[str, Any]:
    """Quire's names by which it serves in the place of a module."""
    ours, names = DOORS[module]
    namespace = importlib.import_module(ours)
    return {name: getattr(namespace, name) for name in names or namespace.__all__}


def called_as(ours: _Call, theirs: _Call) -> _Call:
    """`ours` with the order of arguments and the number of splits of `theirs`; UnsupportedError also for what cannot be
    done here and now: gradients, some calls in captures of CUDA graphs, machines without a compiler.
    """
    known, parameters = _keywords(ours), _parameters(theirs)
    order = _order(parameters) or _order(known)
    splits = parameters.get("num_splits")
    defaults = {"num_splits": splits.default} if "num_splits" in known and splits is not None else {}

    @wraps(ours)
    def call(*args: Any, **kwargs: Any) -> Any:
        if args:
            kwargs = _by_name(ours.__name__, order, args, kwargs)
        if torch.is_grad_enabled() and any(getattr(value, "requires_grad", False) for value in kwargs.values()):
            raise UnsupportedError("gradients: Quire is for inference only")
        try:
            return ours(**{**defaults, **kwargs})
        except (PlanError, CompileError) as error:
            raise UnsupportedError(str(error)) from error

    call.__signature__ = inspect.Signature(list(known.values()))  # type: ignore[attr-defined]
    return call


def _order(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """The names of arguments that may be passed without them."""
    return [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _parameters(call: _Call) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(call).parameters
    except (TypeError, ValueError):  # compiled code has none
        return {}


def _keywords(ours: _Call) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function of Quire, with those that forks of FlashAttention add."""
    own = {name: p for name, p in inspect.signature(ours).parameters.items() if p.kind is not p.VAR_KEYWORD}
    more = {
        name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
        for name in fork_keywords(ours.__name__)
        if name not in own and ours.__module__ == _FA3
    }
    return own | more


def _by_name(name: str, order: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    if len(args) > len(order):
        raise TypeError(f"{name}() takes {len(order)} positional arguments but {len(args)} were given")
    given = dict(zip(order, args, strict=False))
    twice = given.keys() & kwargs.keys()
    if twice:
        raise TypeError(f"{name}() got multiple values for argument {min(twice)!r}")
    return given | dict(kwargs)


class _Doors(MetaPathFinder, Loader):
    """Finds modules of DOORS: those that are installed, whose names are then replaced, and stand-ins for others."""

    def __init__(self) -> None:
        self._made: dict[tuple[_Call, _Call], _Call] = {}  #: by Quire's function and the one behind it
        self._standins: set[str] = set()

    def is_active(self) -> bool:
        """Whether names are replaced."""
        return self in sys.meta_path

    def activate(self, standins: Sequence[str]) -> None:
        """Replace names in what is loaded, and in what will be; stand for the modules named if they are missing."""
        self._standins.update(name for name in standins if not _is_there(name))
        if not self.is_active():
            sys.meta_path.insert(0, self)
            for name in DOORS:
                if name in sys.modules:
                    self._replace(name)

    def deactivate(self) -> None:
        """Put back what was there."""
        if self.is_active():
            sys.meta_path.remove(self)
        for (ours, theirs), made in self._made.items():
            _put(ours.__name__, theirs, made)
        self._made.clear()
        for name in self._standins:
            sys.modules.pop(name, None)
        self._standins.clear()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that others find, with a loader that replaces names afterwards; else that of a stand-in."""
        if fullname not in DOORS:
            return None
        if fullname in self._standins:
            return ModuleSpec(fullname, self, is_package=True)
        return spec_and_then(self, fullname, path, target, self._replace)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty module."""
        return ModuleType(spec.name, f"Quire in the place of {spec.name}: see quire.compat.engines.")

    def exec_module(self, module: ModuleType) -> None:
        """Fill a stand-in."""
        ours = importlib.import_module(DOORS[module.__name__][0])
        vars(module).update({name: getattr(ours, name) for name in ours.__all__}, __version__=ours.__version__)

    def _replace(self, module: str) -> None:
        """Replace the names of a module that has been executed, and of those that have imported them from it."""
        namespace = vars(sys.modules[module])
        for name, ours in served(module).items():
            theirs = namespace.get(name)
            if name in _STAY or not callable(theirs) or theirs in self._made.values():
                continue
            if (ours, theirs) not in self._made:
                self._made[ours, theirs] = function_over(called_as(ours, theirs), theirs, module)
            _put(name, self._made[ours, theirs], theirs)


def _put(name: str, value: _Call, old: _Call) -> None:
    """`value` in the place of `old` in all modules that have it under that name."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if names.get(name) is old:
            names[name] = value


def _is_there(module: str) -> bool:
    try:
        return module in sys.modules or importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # nor the package that it would be in
        return False


doors = _Doors()
