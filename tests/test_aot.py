"""Recorded on small batches, warmed from the manifest, sealed: larger batches then compile nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire import aot
from quire.errors import ValidationError

SERVER = """
import sys, torch, quire
from quire import jit

ints = lambda *values: torch.tensor(values, dtype=torch.int32)
wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1 << 24, dtype=torch.uint8))
cache = torch.zeros(64, 2, 16, 2, 64)

def serve(qo_len, kv_len, offset):
    pages = -(-kv_len // 16)
    last = ints(*[(kv_len - 1) % 16 + 1] * 2)
    tables = ints(0, qo_len, 2 * qo_len), ints(0, pages, 2 * pages), ints(*range(2 * pages)), last
    wrapper.plan(*tables, 4, 2, 64, 16, causal=True, q_data_type=torch.float32)
    o, lse = wrapper.run(torch.zeros(2 * qo_len, 4, 64), cache, return_lse=True)
    whole = torch.zeros(2 * o.numel() + offset)
    view = whole[offset : offset + o.numel()].view_as(o)
    quire.merge_state(view, lse, o, lse)
    quire.merge_states(torch.stack([view, o], 1), torch.stack([lse, lse], 1))
    rows = torch.zeros(2 * 2 * 64 + offset)[offset:][: 2 * 2 * 64].view(2, 2, 64)
    quire.append_paged_kv_cache(rows, rows, ints(0, 1), ints(0, 0), cache, *tables[2:0:-1], tables[3])

if sys.argv[1] == "record":
    serve(1, 5, 0)
else:
    quire.warmup(sys.argv[2])
    quire.seal()
    for batch in ((1, 5, 0), (1, 400, 1), (40, 300, 0), (200, 400, 1), (3, 3, 3)):
        serve(*batch)
    print("served")
"""


def serve(action: str, manifest: Path, **environment: str) -> str:
    """A server in a process of its own."""
    command = [sys.executable, "-c", SERVER, action, str(manifest)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_server_that_was_recorded_on_small_batches_may_be_sealed(tmp_path):
    """Tile heights follow the lengths of a batch, and widths of operations the addresses of views."""
    manifest = tmp_path / "manifest.jsonl"
    serve("record", manifest, QUIRE_RECORD=str(manifest))
    assert any("attention" in json.loads(line)["slug"] for line in manifest.read_text().splitlines())
    assert serve("serve", manifest).strip() == "served"


def test_a_manifest_names_families(tmp_path):
    manifest = tmp_path / "slugs"
    manifest.write_text("attention_fa3.sm90a.bf16-bf16-bf16.d128-128.paged16.custom.m128\nappend.x86-64-v4.u16.v8\n")
    assert [spec.slug for spec in aot.read_manifest(manifest)] == [
        "attention_fa3.sm90a.bf16-bf16-bf16.d128-128.paged16.custom.m128",
        "block_mask.sm90a.any.v1",
        "attention_fa3.sm90a.bf16-bf16-bf16.d128-128.paged16.custom.m192",
        "append.x86-64-v4.u16.v8",
        "append.x86-64-v4.u16.v1",
    ]


@pytest.mark.parametrize(
    "slug",
    ["attention_fa2.x86-64-v4.bf16-bf16-bf16.d128-128.paged.none.m16", "append.x86-64-v4.u16.v4", "append.sm90a"],
)
def test_what_no_kernel_takes(slug):
    with pytest.raises(ValidationError):
        aot.family(slug)


def test_a_selection_has_both_widths():
    slugs = {spec.slug for spec in aot.select(aot.Selection(backends=("cpu",), targets=("x86-64-v4",)))}
    assert {"merge.x86-64-v4.bf16.v1", "merge.x86-64-v4.bf16.v8", "append.x86-64-v4.u16.v1"} < slugs
