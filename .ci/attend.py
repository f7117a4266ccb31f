"""Run one small attention from an installed wheel and compare it with torch: `python .ci/attend.py WHERE`.

WHERE is the environment that quire must come from, so that a checkout on the path cannot pass for the wheel.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

import quire

where = Path(sys.argv[1]).resolve()
home = Path(quire.__file__).resolve().parent
if not home.is_relative_to(where):
    sys.exit(f"quire was imported from {home}, expected somewhere in {where}")
for needed in ("variant.jinja", "build.ninja.jinja", "include/quire/core/params.h"):
    if not (home / "templates" / needed).is_file():
        sys.exit(f"the wheel lacks templates/{needed}")

torch.manual_seed(0)
# head_dim 48 is not prebuilt: the wheel compiles.
q, k, v = (torch.randn(33, heads, 48) for heads in (8, 2, 2))
o = quire.single_prefill_with_kv_cache(q, k, v, causal=True)
heads_first = (t.transpose(0, 1)[None] for t in (q, k, v))
expected = scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
error = (o - expected).abs().max().item()
print(f"wheel: attention from {home}, largest error {error:.1e}")
if not error < 1e-5:
    sys.exit("the installed wheel computes something else than torch")
