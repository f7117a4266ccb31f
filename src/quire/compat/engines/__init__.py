"""Quire in vLLM and SGLang where they take FlashAttention, as they do on Hopper by default.

Backends by name, once Quire is installed:

    vllm serve ... --attention-backend QUIRE                # QUIRE_MLA for DeepSeek's models
    python -m sglang.launch_server ... --attention-backend quire

In the place of FlashAttention, whichever backend calls it, also in programs that are no engines:

    QUIRE_FLASH_ATTN=auto vllm serve ...

    from quire.compat import engines
    engines.install()               # before or after FlashAttention is imported

install() replaces the functions of `vllm.vllm_flash_attn`, `sgl_kernel.flash_attn`, `flash_attn_interface` and
`flash_attn` where they are installed. A call that Quire refuses goes to the function that was there; the log says so
once for each cause, and report() counts such calls. Wrong input stays an error. Nothing is replaced on a machine with a
GPU on which no variant of Quire has run (`quire matrix`), unless QUIRE_FLASH_ATTN=on says so.

vLLM and SGLang call vllm_plugin() and sglang_plugin() in each of their processes, through the entry points
vllm.general_plugins and sglang.srt.plugins. Both also call quire.compat.flashinfer.activate(). If an engine has made 50
steps without a call that Quire could serve, the log says once which flag to set.

SGLang's name `quire`, of `--attention-backend` and of the options for prefill, decode and drafts alone, becomes
SGLang's own name for its backend of FlashAttention-3 before it resolves its options. So whatever it decides by name
holds: which models need this backend (gpt-oss, Llama 4), how DeepSeek's models divide prefill and decode, which pages,
graphs and drafts are possible. On GPUs for which SGLang has no FlashAttention-3 the backend is the one of FlashInfer,
in whose place Quire is, too. Nothing of an engine is imported before the engine imports it.
"""

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

from quire.compat import flashinfer
from quire.compat.flash_attn_interface_batch import fork_keywords
from quire.compat.flashinfer import fallback, spec_and_then
from quire.compat.flashinfer.fallback import function_over
from quire.errors import CompileError, PlanError, UnsupportedError, ValidationError
from quire.jit import config, events

__all__ = ["install", "report", "sglang_plugin", "uninstall", "vllm_member", "vllm_plugin"]

_MOST_STEPS = 50  #: without a call, before the log says so


def report() -> str:
    """The calls since install() or quire.compat.flashinfer.activate(), as quire.compat.flashinfer.report() has them."""
    return fallback.report()


def vllm_plugin() -> None:
    """What vLLM calls in each of its processes: FlashInfer's attention, QUIRE_FLASH_ATTN, the backends by name."""
    flashinfer.activate()
    if config.flash_attn_overlay():
        install()
    for kind, (*_, backends) in _REGISTRIES.items():
        for name in backends:
            try:
                vllm_member(kind, name)
            except (AttributeError, ImportError, TypeError, ValueError) as error:  # an error here would end vLLM
                events.warn_once(f"this version of vLLM takes no backend {name} ({kind}): {error}")
    flag = "--attention-backend QUIRE (QUIRE_MLA for DeepSeek's models)"
    _watch(
        _Steps("GPUModelRunner.execute_model", flag),
        ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"),
    )


#: vLLM's registries of backends: the module of each, its enumeration, its function, and Quire's backends by name.
_REGISTRIES = {
    "attention": (
        "vllm.v1.attention.backends.registry", "AttentionBackendEnum", "register_backend",
        {"QUIRE": "QuireAttentionBackend", "QUIRE_MLA": "QuireMLABackend"},
    ),
    "mla_prefill": (
        "vllm.v1.attention.backends.mla.prefill.registry", "MLAPrefillBackendEnum", "register_mla_prefill_backend",
        {"QUIRE": "QuireMLAPrefillBackend"},
    ),
}  # fmt: skip


def vllm_member(kind: str, name: str) -> Any:
    """The member of vLLM's enumeration of backends with one of Quire's names, registered if it is not.

    A process that vLLM starts anew reads its configuration before it loads plug-ins: members are pickled as calls of
    this function. Raises KeyError for other names.
    """
    module, enumeration, function, backends = _REGISTRIES[kind]
    registry = importlib.import_module(module)
    members = getattr(registry, enumeration).__members__
    if name not in members:
        getattr(registry, function)(name, f"quire.compat.engines.vllm.{backends[name]}")
        members[name].__reduce_ex__ = lambda _protocol: (vllm_member, (kind, name))
    return members[name]


def sglang_plugin() -> None:
    """What SGLang calls in each of its processes: FlashInfer's attention, QUIRE_FLASH_ATTN, the backend by name."""
    flashinfer.activate()
    if config.flash_attn_overlay():
        install()
    _register_sglang()
    _later.after(SGLANG_REGISTRY, _register_backend)
    _watch(_Steps("ModelRunner.forward", "--attention-backend quire"), ("sglang.srt.model_executor.model_runner",))


SGLANG_REGISTRY = "sglang.srt.layers.attention.attention_registry"
_SGLANG = "quire"
_SGLANG_OPTIONS = (
    "attention_backend", "prefill_attention_backend", "decode_attention_backend", "speculative_draft_attention_backend",
)  # fmt: skip


def _register_sglang() -> None:
    """Make the name known to SGLang's options. May be called repeatedly."""
    choices = importlib.import_module("sglang.srt.arg_groups.choices")
    if _SGLANG in choices.ATTENTION_BACKEND_CHOICES:
        return
    for name, names in vars(choices).items():
        if "ATTENTION_BACKEND" in name and isinstance(names, list) and "fa3" in names:
            names.append(_SGLANG)
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry.register("sglang.srt.server_args.ServerArgs.resolve_once", resolve_sglang, hooks.HookType.BEFORE)


def _register_backend(registry: str) -> None:
    """Put the name into SGLang's registry of backends, once that module is there."""
    importlib.import_module(registry).register_attention_backend(_SGLANG)(create_sglang)


def resolve_sglang(server_args: Any) -> None:
    """Put the backend that Quire serves in the place of the name in SGLang's options, for all processes of a server."""
    asked = [name for name in _SGLANG_OPTIONS if getattr(server_args, name, None) == _SGLANG]
    if not asked:
        return
    served = _served_backend()
    for name in asked:
        setattr(server_args, name, served)
    config.ask_for_overlays()  # for the processes that are to come
    install()
    flashinfer.activate()
    events.info(f"SGLang's backend {served} runs on Quire ({', '.join(asked)})")


def create_sglang(runner: Any) -> Any:
    """SGLang's backend for a model runner, with Quire's functions: what its registry has under the name."""
    install()
    flashinfer.activate()
    return importlib.import_module(SGLANG_REGISTRY).ATTENTION_BACKENDS[_served_backend()](runner)


def _served_backend() -> str:
    """FlashAttention-3's where SGLang has it, else FlashInfer's."""
    common = importlib.import_module("sglang.srt.utils.common")
    major, _ = common.get_device_capability()
    return "fa3" if major == 9 else "flashinfer"


# --- steps of engines ------------------------------------------------------------------------------------------------


class _Steps:
    """Counts the steps of an engine until Quire has served a call, or says after some that it has not."""

    def __init__(self, method: str, flag: str) -> None:
        self._owner, _, self._method = method.partition(".")
        self._flag, self._count = flag, 0
        self._undo: list[Callable[[], None]] = []

    def begin(self, module: str) -> None:
        """Count the calls of the method in a module."""
        owner = getattr(sys.modules[module], self._owner, None)
        method = getattr(owner, "__dict__", {}).get(self._method)
        if method is None:  # another version of the engine
            return

        @wraps(method)
        def step(*args: Any, **kwargs: Any) -> Any:
            self._note()
            return method(*args, **kwargs)

        setattr(owner, self._method, step)
        self._undo.append(lambda: setattr(owner, self._method, method))

    def _note(self) -> None:
        self._count += 1
        if not fallback.has_calls():
            if self._count <= _MOST_STEPS:
                return
            events.warn_once(
                f"Quire has served none of {_MOST_STEPS} steps: the engine takes another library's attention; start it "
                f"with {self._flag}, or with QUIRE_FLASH_ATTN=auto in its environment"
            )
        self.end()

    def end(self) -> None:
        """Count no more."""
        while self._undo:
            self._undo.pop()()


class _Later(MetaPathFinder):
    """Calls functions with the names of modules after these are imported."""

    def __init__(self) -> None:
        self.calls: dict[str, Callable[[str], None]] = {}  #: by module

    def after(self, module: str, call: Callable[[str], None]) -> None:
        """Call it once the module is there."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        self.calls[module] = call
        if module in sys.modules:
            call(module)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that others find, for the modules named."""
        call = self.calls.get(fullname)
        return None if call is None else spec_and_then(self, fullname, path, target, call)


_later = _Later()


def _watch(steps: _Steps, modules: Sequence[str]) -> None:
    """Count steps in these modules, where calls are counted and nobody has begun to."""
    if fallback.is_counting() and modules[0] not in _later.calls:
        for module in modules:
            _later.after(module, steps.begin)


# --- FlashAttention's functions where programs import them: Quire's over those there ---------------------------------


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
#: Names that stay the library's where it is installed: what it is asked for, and its schedules for calls left to it.
_STAY = (
    "FA2_AVAILABLE", "FA3_AVAILABLE", "fa_version_unsupported_reason", "get_scheduler_metadata",
    "is_fa_version_supported",
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
    order, splits = _order(parameters) or _order(known), parameters.get("num_splits")
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
