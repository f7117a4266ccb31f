"""Quire in the place of FlashInfer, in programs that import `flashinfer` and know nothing of Quire.

    import quire.compat.flashinfer as compat
    compat.activate()               # before or after `import flashinfer`

    python -m quire.compat.flashinfer serve.py --model ...

vLLM and SGLang call activate() in each of their processes once Quire is installed, by the entry points
vllm.general_plugins and sglang.srt.plugins (VLLM_PLUGINS and SGLANG_PLUGINS restrict them).

Where FlashInfer is installed, its names for attention, pages and bits become Quire's, and all others stay what they
are: norms, sampling, GEMMs, MoE, communication. Where it is not, a package of its name appears, with the version that
engines ask for. It has Quire's names; names outside attention that engines import unconditionally exist there, and
raise UnsupportedError when they are called.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec

from quire.compat.flashinfer import calls, overlay, standin

__all__ = ["activate", "deactivate", "report"]


def activate() -> None:
    """Serve `flashinfer`'s attention from now on, in this process. May be called again."""
    if standin.is_active() or overlay.is_active():
        return
    calls.start()
    (standin if _installed() is None else overlay).activate()


def deactivate() -> None:
    """Undo activate(). What a program has imported from `flashinfer` meanwhile stays Quire's."""
    overlay.deactivate()
    standin.deactivate()
    calls.stop()


def report() -> str:
    """Which calls were served since activate(), how often and by which kernel, and which were refused; a line each.

    >>> from quire.compat import flashinfer as compat
    >>> compat.activate()
    >>> q, k, v = torch.randn(8, 64), torch.randn(10, 2, 64), torch.randn(10, 2, 64)
    >>> quire.single_decode_with_kv_cache(q, k, v).shape
    torch.Size([8, 64])
    >>> compat.report().split()[:3]
    ['served', 'single_decode_with_kv_cache', '1']
    >>> compat.deactivate()
    """
    return calls.report()


def _installed() -> ModuleSpec | None:
    """Where FlashInfer is installed, or was imported from."""
    loaded = sys.modules.get("flashinfer")
    return importlib.util.find_spec("flashinfer") if loaded is None else loaded.__spec__
