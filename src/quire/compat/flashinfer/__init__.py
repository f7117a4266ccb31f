"""Quire as a drop-in replacement of FlashInfer, for programs that import `flashinfer`.

    import quire.compat.flashinfer as compat
    compat.activate()               # before or after `import flashinfer`

    python -m quire.compat.flashinfer serve.py --model ...

Once Quire is installed, vLLM and SGLang call activate() in each of their processes, by way of quire.compat.engines
(VLLM_PLUGINS and SGLANG_PLUGINS restrict which plug-ins they load).

If FlashInfer is installed, Quire replaces its functions for attention, pages and packed bits, and leaves all others:
norms, sampling, GEMMs, MoE, communication. A call that Quire refuses, because of an argument or because no kernel takes
the problem, goes to FlashInfer; the log says so once for each cause, and report() counts such calls. Wrong input stays
an error. Nothing is replaced on a machine with a GPU on which no variant of Quire has run (`quire matrix`), unless
QUIRE_FLASHINFER=on says so; QUIRE_FLASHINFER=off leaves FlashInfer alone anywhere.

If FlashInfer is not installed, Quire provides a package of that name, with the version that engines require. The
package has Quire's functions, and sampling, norms and activations in plain torch. It also has those other names that
engines import unconditionally; calling one of them raises UnsupportedError.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec

from quire.compat.flashinfer import devices
from quire.compat.flashinfer.names import overlay, standin
from quire.jit import config, events

__all__ = ["activate", "deactivate", "report"]


def activate() -> None:
    """Serve `flashinfer`'s attention from now on, in this process. May be called repeatedly."""
    wish = config.flashinfer_overlay()
    if standin.is_active() or overlay.is_active() or wish == "off":
        return
    is_installed = _installed() is not None
    if is_installed and wish == "auto" and (gpus := devices.untried_gpus()):
        events.info(
            f"FlashInfer keeps its attention, as no variant of Quire has run on {', '.join(gpus)} (quire matrix); "
            f"QUIRE_FLASHINFER=on replaces it"
        )
        return
    devices.start("flashinfer")
    (overlay if is_installed else standin).activate()


def deactivate() -> None:
    """Undo activate(). Names that a program has imported from `flashinfer` in the meantime remain Quire's."""
    overlay.deactivate()
    standin.deactivate()
    devices.stop("flashinfer")


def report() -> str:
    """The calls since activate(), one per line: those served, how often and by which kernel, those left to an installed
    FlashInfer, and why, and those refused.

    >>> from quire.compat import flashinfer as compat
    >>> compat.activate()
    >>> q, k, v = torch.randn(8, 64), torch.randn(10, 2, 64), torch.randn(10, 2, 64)
    >>> quire.single_decode_with_kv_cache(q, k, v).shape
    torch.Size([8, 64])
    >>> compat.report().split()[:3]
    ['served', 'single_decode_with_kv_cache', '1']
    >>> compat.deactivate()
    """
    return devices.report()


def _installed() -> ModuleSpec | None:
    """Where FlashInfer is installed, or was imported from."""
    loaded = sys.modules.get("flashinfer")
    return importlib.util.find_spec("flashinfer") if loaded is None else loaded.__spec__
