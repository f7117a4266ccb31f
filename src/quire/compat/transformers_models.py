"""Which of transformers' models call registered attention functions, and which compute attention themselves.

transformers takes a registered name for each model. A model that computes attention itself does not call the function,
and adds the mask to its logits, so it needs another mask. It is refused, or runs transformers' eager attention where it
is one part of a composite model.

The decision reads compiled methods: of the model's class, and of the modules that it builds. It needs no source, so it
also holds for models outside of transformers and in notebooks.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, wraps
from types import CodeType, FunctionType
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakValueDictionary

from torch.nn import Module
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from quire.errors import UnsupportedError

__all__ = ["check_models", "may_omit_masks", "own_attention"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

_logger = logging.getLogger(__name__)
_PROBABILITIES = re.compile("softmax|scaled_dot_product_attention|multi_?head_?attention", re.IGNORECASE)
_INTERFACE = {"ALL_ATTENTION_FUNCTIONS", "get_interface"}
_ATTENTION = re.compile(r"(Attention\d*|Indexer)$")  #: types; routers and losses have masks and probabilities, too
_IMPLEMENTATIONS = "_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn"  #: transformers' own, beside eager
_NOT_RUN = {"_init_weights"}  #: names types to compare with, and builds none
_checked: dict[int, type[PreTrainedModel]] = {}  #: by id of config: the class of the model that was checked with it
_alive: WeakValueDictionary[int, PreTrainedConfig] = WeakValueDictionary()  #: configs, which have no hash, by id
_parts: WeakValueDictionary[int, PreTrainedConfig] = WeakValueDictionary()  #: those of parts of composite models


def _remembered(function: _Function) -> _Function:
    """lru_cache, for mypy: it takes types of modules for their instances, whose hash has another signature."""
    return cast(_Function, lru_cache(maxsize=4096)(function))


def check_models(functions: dict[str, str]) -> None:
    """Checks each model that is built with, or changed to, an implementation: those that compute attention themselves
    are refused.

    functions: name of an implementation, and the attribute of types that says that they call it otherwise, or "".
    """
    correct = PreTrainedModel.get_correct_attn_implementation
    if hasattr(correct, "__wrapped__"):
        return

    @wraps(correct)
    def checked(self: Any, requested_attention: str | None, is_init_check: bool = False) -> str:
        if requested_attention in functions:
            requested_attention = _applicable(self, requested_attention, functions[requested_attention])
        return str(correct(self, requested_attention, is_init_check))

    PreTrainedModel.get_correct_attn_implementation = checked


def _applicable(model: PreTrainedModel, name: str, supported: str) -> str:
    """name, or "eager" for a part of a composite model that computes attention itself."""
    kind, config = type(model), model.config
    is_inner = _alive.get(id(config)) is config and kind in _reached(_checked[id(config)])
    why = None if is_inner or getattr(kind, supported or "", False) else own_attention(kind)
    if why is not None and _parts.get(id(config)) is config:
        _logger.warning("%s runs transformers' eager attention instead of %r: it %s.", kind.__name__, name, why)
        return "eager"
    if why is not None:
        raise UnsupportedError(_message(name, kind, why))
    if not is_inner:
        _alive[id(config)], _checked[id(config)] = config, kind
        _parts.update((id(part), part) for part in _sub_configs(config))
    return name


def _sub_configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    for key in config.sub_configs:
        if isinstance(part := getattr(config, key, None), PreTrainedConfig):
            yield part
            yield from _sub_configs(part)


def _message(name: str, kind: type[PreTrainedModel], why: str) -> str:
    others = 'attn_implementation="eager"' + (' or "sdpa"' if kind._supports_sdpa else "")
    return (
        f"attn_implementation: {name!r} needs a model that calls the attention functions registered with transformers, "
        f"but {kind.__name__} {why}. Use {others}; in a composite model a dictionary names the implementation of each "
        'part, such as {"text_config": "eager"}.'
    )


def may_omit_masks(config: Any, name: str) -> bool:
    """Whether the attention modules of a config's model say themselves whether they are causal, so that None may stand
    for a mask: transformers' other implementations depend on it, too. Raises UnsupportedError if the model computes
    attention itself, which check_models() did not see if an implementation was assigned to the config.
    """
    if _alive.get(id(config)) is config:
        return _runs_more_than_eager(_checked[id(config)])
    kinds = _models_of(type(config))
    for kind in kinds:
        if why := own_attention(kind):
            raise UnsupportedError(_message(name, kind, why))
    return bool(kinds) and all(_runs_more_than_eager(kind) for kind in kinds)


@_remembered
def _models_of(config_class: Any) -> tuple[type[PreTrainedModel], ...]:
    """Types of models of a config. Models from elsewhere may share one with those of transformers; they are known
    only to check_models().
    """
    package = config_class.__module__.partition(".")[0]
    return tuple(
        kind for kind in _subclasses(PreTrainedModel)
        if kind.config_class is config_class and kind.__module__.partition(".")[0] == package
    )  # fmt: skip


def _runs_more_than_eager(kind: type[PreTrainedModel]) -> bool:
    return any(getattr(kind, flag) for flag in _IMPLEMENTATIONS)


def _subclasses(kind: type[PreTrainedModel]) -> Iterator[type[PreTrainedModel]]:
    for inner in kind.__subclasses__():
        yield inner
        yield from _subclasses(inner)


@_remembered
def own_attention(kind: type[PreTrainedModel]) -> str | None:
    """What a class of models does instead of calling registered attention functions; None if it calls them for each
    attention that reads a mask of transformers' mask functions, or has no attention.

    Parts of a composite model, which have other configs, are types of models that are asked separately.
    """
    modules = _reached(kind)
    own = [module.__name__ for module in modules if _computes_attention(module)]
    makes_masks = any(_read(module).makes_masks for module in modules)
    if own and (makes_masks or _is_alone(kind)):
        return f"computes attention itself ({', '.join(sorted(own))})"
    if makes_masks and _is_alone(kind):
        return "makes masks and calls no registered function"
    if any(_read(module).picks_class for module in modules):
        return "picks its attention class by the names of transformers' implementations"
    if kind._supports_attention_backend and not _runs_more_than_eager(kind):
        return "has eager attention only, by its class"  # its modules calculate with the numbers of eager's masks
    return None


def _is_alone(kind: type[PreTrainedModel]) -> bool:
    """Whether a model calls no registered function, with all its parts, and has none that its config alone names."""
    modules = _reached(kind, parts=True)
    return not any(_read(module).calls_functions or _read(module).builds_any for module in modules)


@_remembered
def _reached(kind: type[Module], parts: bool = False) -> tuple[type[Module], ...]:
    """A class of modules and those that it builds. parts: and models that have other configs."""
    config_class, reached, waiting = getattr(kind, "config_class", None), {}, [kind]
    while waiting:
        module = waiting.pop()
        is_part = issubclass(module, PreTrainedModel) and getattr(module, "config_class", None) is not config_class
        if module not in reached and (parts or not is_part):
            reached[module] = True
            waiting.extend(_read(module).builds)
    return tuple(reached)


def _computes_attention(module: type[Module]) -> bool:
    """Whether a class of modules makes probabilities from a mask and calls no registered function. The names of types
    are known only in transformers, where models themselves do not compute attention.
    """
    uses = _read(module)
    if uses.calls_functions or not (uses.takes_mask and uses.has_probabilities):
        return False
    is_known = module.__module__.startswith("transformers.")
    return _ATTENTION.search(module.__name__) is not None if is_known else True


class _Uses(NamedTuple):
    calls_functions: bool  #: attention functions registered with transformers
    has_probabilities: bool
    takes_mask: bool
    makes_masks: bool  #: with transformers' mask functions, for the implementation
    builds: tuple[type[Module], ...]
    builds_any: bool  #: models that a config names: AutoModel
    picks_class: bool  #: from a dictionary of the names of implementations


@_remembered
def _read(module: type[Module]) -> _Uses:
    """What the methods of a class use, and the functions of its package that they call."""
    methods = list(_methods(module))
    used = [(name, value) for method in methods for name, value in _used(method)]
    called = [value for _, value in used if _is_neighbour(value, methods)]
    used += [pair for function in called for pair in _used(function)]
    names = {name for name, value in used if not _is_module(value)}
    arguments = {name for method in methods for name in _arguments(method)}
    values = [inner for _, value in used for inner in _flat(value)]
    types = [value for value in values if isinstance(value, type)]
    return _Uses(
        calls_functions=not names.isdisjoint(_INTERFACE)
        or any(isinstance(value, AttentionInterface) for value in values),
        has_probabilities=any(_PROBABILITIES.search(name) for name in names),
        takes_mask=any("mask" in name for name in arguments),
        makes_masks=any(_makes_masks(value) for value in values),
        builds=tuple(kind for kind in types if _is_module(kind)),
        builds_any=any(kind.__module__.startswith("transformers.models.auto.") for kind in types),
        picks_class=any(isinstance(value, dict) and "eager" in value for _, value in used),
    )


def _methods(module: type[Module]) -> Iterator[FunctionType]:
    """The methods of a class, and those of its bases that are not replaced, or that are called through super()."""
    seen: dict[str, FunctionType] = {}
    for kind in module.__mro__:
        if kind in (PreTrainedModel, Module):
            return
        for name, value in vars(kind).items():
            function = _function(value)
            is_replaced = name in seen and "super" not in _names(seen[name].__code__)
            if function is not None and name not in _NOT_RUN and not is_replaced:
                seen[name] = function
                yield function


def _function(value: Any) -> FunctionType | None:
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    value = inspect.unwrap(value) if callable(value) else value
    return value if isinstance(value, FunctionType) else None


def _used(function: FunctionType) -> list[tuple[str, Any]]:
    """Names in a function, and what they are in its file or around it; None for attributes and builtins."""
    around = inspect.getclosurevars(function).nonlocals
    names = _names(function.__code__) - {"__class__"}  # of super()
    return [(name, around.get(name, function.__globals__.get(name))) for name in names]


@lru_cache(maxsize=8192)
def _names(code: CodeType) -> frozenset[str]:
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(code.co_freevars, *inner)


def _arguments(function: FunctionType) -> tuple[str, ...]:
    code = function.__code__
    named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return named + tuple(value for value in code.co_consts if value == "attention_mask")  # kwargs["attention_mask"]


def _is_neighbour(value: Any, methods: Iterable[FunctionType]) -> bool:
    """Whether a function stands in the same package as the methods that call it, and makes no masks."""
    packages = {method.__module__.rpartition(".")[0] for method in methods}
    return isinstance(value, FunctionType) and value.__module__.rpartition(".")[0] in packages


def _is_module(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Module) and not value.__module__.startswith("torch.")


def _flat(value: Any) -> Iterable[Any]:
    """The value, or those of a dictionary, such as that of a file's attention types."""
    return value.values() if isinstance(value, dict) else (value,)


def _makes_masks(value: Any) -> bool:
    """create_causal_mask and the like; create_recurrent_attention_mask gives all implementations the same."""
    if not isinstance(value, FunctionType) or value.__module__ != "transformers.masking_utils":
        return False
    return value.__name__.startswith("create_") and "recurrent" not in value.__name__
