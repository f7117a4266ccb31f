"""SGLang's backend `quire`: its backend of FlashAttention-3, with Quire's functions in the place of that library's.

`--attention-backend quire`, and the options for prefill, decode and drafts alone, become SGLang's own name for that
backend before it resolves its options. So whatever it decides by name holds: which models need this backend (gpt-oss,
Llama 4), how DeepSeek's models divide prefill and decode, which pages, graphs and drafts are possible. On GPUs for
which SGLang has no FlashAttention-3 the backend is the one of FlashInfer, in whose place Quire is, too.

Nothing of SGLang is imported before SGLang imports it.
"""

from __future__ import annotations

import importlib
from typing import Any

from quire.compat import flashinfer
from quire.compat.engines.in_place import install
from quire.jit import config, events

__all__ = ["REGISTRY", "create", "register", "register_backend", "resolve"]

REGISTRY = "sglang.srt.layers.attention.attention_registry"
NAME = "quire"
_OPTIONS = (
    "attention_backend", "prefill_attention_backend", "decode_attention_backend", "speculative_draft_attention_backend",
)  # fmt: skip


def register() -> None:
    """Make the name known to SGLang's options. May be called repeatedly."""
    choices = importlib.import_module("sglang.srt.arg_groups.choices")
    if NAME in choices.ATTENTION_BACKEND_CHOICES:
        return
    for name, names in vars(choices).items():
        if "ATTENTION_BACKEND" in name and isinstance(names, list) and "fa3" in names:
            names.append(NAME)
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry.register("sglang.srt.server_args.ServerArgs.resolve_once", resolve, hooks.HookType.BEFORE)


def register_backend(registry: str) -> None:
    """Put the name into SGLang's registry of backends, once that module is there."""
    importlib.import_module(registry).register_attention_backend(NAME)(create)


def resolve(server_args: Any) -> None:
    """Put the backend that Quire serves in the place of the name in SGLang's options, for all processes of a server."""
    asked = [name for name in _OPTIONS if getattr(server_args, name, None) == NAME]
    if not asked:
        return
    served = _served_backend()
    for name in asked:
        setattr(server_args, name, served)
    config.ask_for_overlays()  # for the processes that are to come
    _replace()
    events.info(f"SGLang's backend {served} runs on Quire ({', '.join(asked)})")


def create(runner: Any) -> Any:
    """SGLang's backend for a model runner, with Quire's functions: what its registry has under the name."""
    _replace()
    return importlib.import_module(REGISTRY).ATTENTION_BACKENDS[_served_backend()](runner)


def _served_backend() -> str:
    """FlashAttention-3's where SGLang has it, else FlashInfer's."""
    common = importlib.import_module("sglang.srt.utils.common")
    major, _ = common.get_device_capability()
    return "fa3" if major == 9 else "flashinfer"


def _replace() -> None:
    install()
    flashinfer.activate()
