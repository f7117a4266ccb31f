"""The public names, which `import quire` gives under `quire.`: the names of the modules below, and these modules."""

from __future__ import annotations

from quire import attention, errors, jit
from quire.attention import batch, cascade, decode, flex, mla, pod, prefill, selection, sparse, variants, viz
from quire.attention.batch import *  # noqa: F403
from quire.attention.cascade import *  # noqa: F403
from quire.attention.decode import *  # noqa: F403
from quire.attention.flex import *  # noqa: F403
from quire.attention.mla import *  # noqa: F403
from quire.attention.pod import *  # noqa: F403
from quire.attention.prefill import *  # noqa: F403
from quire.attention.selection import *  # noqa: F403
from quire.attention.sparse import *  # noqa: F403
from quire.attention.variants import get_alibi_slopes
from quire.cache import merge, page, quantization, rope
from quire.cache.page import *  # noqa: F403
from quire.cache.quantization import *  # noqa: F403
from quire.cache.rope import *  # noqa: F403
from quire.calls import cudnn, xqa
from quire.calls.xqa import xqa_mla
from quire.cli import aot
from quire.cli.aot import warmup
from quire.cli.estimates import estimate, is_supported
from quire.errors import *  # noqa: F403
from quire.jit import events, record, seal
from quire.jit.events import metrics
from quire.kernels import backends
from quire.kernels import expressions as expression
from quire.kernels.expressions.variant import Variant

__all__ = [
    "Variant", "aot", "attention", "backends", "cascade", "cudnn", "decode", "errors", "estimate", "events",
    "expression",
    "get_alibi_slopes", "is_supported", "jit", "merge", "metrics", "mla", "page", "pod", "prefill", "quantization",
    "record",
    "rope", "seal", "sparse", "variants", "viz", "warmup", "xqa", "xqa_mla",
]  # fmt: skip
__all__ += batch.__all__
__all__ += cascade.__all__
__all__ += decode.__all__
__all__ += errors.__all__
__all__ += flex.__all__
__all__ += mla.__all__
__all__ += page.__all__
__all__ += pod.__all__
__all__ += prefill.__all__
__all__ += quantization.__all__
__all__ += rope.__all__
__all__ += selection.__all__
__all__ += sparse.__all__
