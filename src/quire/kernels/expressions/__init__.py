"""Functions for the score and the mask of a quire.Variant, in addition to operators.

Of floats: tanh, exp, exp2, log, log2, sqrt, rsqrt, sigmoid, sin, cos, erf, floor. Of numbers: abs, minimum, maximum,
to_float, to_int (towards 0). where(condition, a, b) replaces `if`. torch's functions and methods have torch's meaning.

>>> from quire.expression import where
>>> window = quire.Variant(score=lambda score, q_idx, kv_idx: where(kv_idx > q_idx - 4, score, -float("inf")))
"""

from __future__ import annotations

from functools import partial
from typing import Any

import quire.kernels.expressions.torch_functions  # noqa: F401  what values do with torch's functions
from quire.kernels.expressions.trace import call

__all__ = [
    "abs", "cos", "erf", "exp", "exp2", "floor", "log", "log2", "maximum", "minimum", "rsqrt", "sigmoid", "sin", "sqrt",
    "tanh", "to_float", "to_int", "where",
]  # fmt: skip

abs: Any = partial(call, "abs")
cos: Any = partial(call, "cos")
erf: Any = partial(call, "erf")
exp: Any = partial(call, "exp")
exp2: Any = partial(call, "exp2")
floor: Any = partial(call, "floor")
log: Any = partial(call, "log")
log2: Any = partial(call, "log2")
maximum: Any = partial(call, "maximum")
minimum: Any = partial(call, "minimum")
rsqrt: Any = partial(call, "rsqrt")
sigmoid: Any = partial(call, "sigmoid")
sin: Any = partial(call, "sin")
sqrt: Any = partial(call, "sqrt")
tanh: Any = partial(call, "tanh")
to_float: Any = partial(call, "to_float")
to_int: Any = partial(call, "to_int")
where: Any = partial(call, "where")
