"""The public names, which `import quire` gives under `quire.`: the names of the modules below, and these modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire import attention as attention
from quire import cache
from quire import errors as errors
from quire import jit as jit
from quire.attention import *  # noqa: F403
from quire.attention import cascade as cascade
from quire.attention import decode as decode
from quire.attention import flex, selection
from quire.attention import mla as mla
from quire.attention import pod as pod
from quire.attention import prefill as prefill
from quire.attention import sparse as sparse
from quire.attention import variants as variants
from quire.attention import viz as viz
from quire.attention.cascade import *  # noqa: F403
from quire.attention.cascade import BatchPrefillWithPrefixWrapper as BatchPrefillWithPrefixWrapper
from quire.attention.decode import *  # noqa: F403
from quire.attention.flex import *  # noqa: F403
from quire.attention.mla import *  # noqa: F403
from quire.attention.pod import *  # noqa: F403
from quire.attention.prefill import *  # noqa: F403
from quire.attention.selection import *  # noqa: F403
from quire.attention.sparse import *  # noqa: F403
from quire.attention.variants import get_alibi_slopes as get_alibi_slopes
from quire.cache import page as page
from quire.cache import quantization as quantization
from quire.cache import rope as rope
from quire.cache.page import *  # noqa: F403
from quire.cache.quantization import *  # noqa: F403
from quire.cache.rope import *  # noqa: F403
from quire.calls import cudnn as cudnn
from quire.calls import xqa as xqa
from quire.calls.xqa import xqa_mla as xqa_mla
from quire.cli import aot as aot
from quire.cli.aot import warmup as warmup
from quire.cli.catalogue import estimate as estimate
from quire.cli.catalogue import is_supported as is_supported
from quire.errors import *  # noqa: F403
from quire.jit import events as events
from quire.jit import record as record
from quire.jit import seal as seal
from quire.jit.events import metrics as metrics
from quire.kernels import backends as backends
from quire.kernels import expressions
from quire.kernels.expressions.variant import Variant as Variant

expression, merge = expressions, cache

if not TYPE_CHECKING:  # type checkers take names imported with *, or as themselves
    __all__ = [
        "BatchPrefillWithPrefixWrapper", "Variant", "aot", "attention", "backends", "cascade", "cudnn", "decode",
        "errors", "estimate", "events", "expression", "get_alibi_slopes", "is_supported", "jit", "merge", "metrics",
        "mla", "page", "pod", "prefill", "quantization", "record", "rope", "seal", "sparse", "variants", "viz",
        "warmup", "xqa", "xqa_mla",
    ]  # fmt: skip
    for _module in (
        attention, cascade, decode, errors, flex, mla, page, pod, prefill, quantization, rope, selection, sparse,
    ):  # fmt: skip
        errors.teach(vars(_module), _module.__all__)
        globals().update({name: getattr(_module, name) for name in _module.__all__})
        __all__ += _module.__all__
    errors.teach(globals(), __all__)
    for _module, _names in ((variants, variants.__all__), (viz, viz.__all__), (events, ("Event", "subscribe"))):
        errors.teach(vars(_module), _names)
