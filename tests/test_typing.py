"""Types of the public surface, as a user's type checker sees them, and what dir(quire) shows."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import quire
from quire.compat import flash_attn

SCRIPT = Path(__file__).with_name("typed_user.py")
ROOT = Path(__file__).parents[1]

#: Each line of the bodies is a mistake that a type checker must find; misspelt keywords are no operands of a variant.
WRONG = """import quire
import torch
from quire.compat.flash_attn import flash_attn_func
from quire.compat.flash_mla import flash_mla_with_kvcache
from quire.distributed import InOrder, RingAttention

def f(w: quire.BatchDecodeWithPagedKVCacheWrapper, t: torch.Tensor) -> None:
    w.run(t, t).strange
    x: torch.Tensor = w.run(t, t, return_lse=True)
    w.run(t, t, k_scale="1").shape + 1
    quire.single_prefil_with_kv_cache(t, t, t)

def g(p: quire.BatchPrefillWithPagedKVCacheWrapper, r: quire.BatchPrefillWithRaggedKVCacheWrapper, t: torch.Tensor,
      w: quire.BatchDecodeWithPagedKVCacheWrapper, b: quire.BlockSparseAttentionWrapper,
      m: quire.BatchMLAPagedAttentionWrapper) -> None:
    p.plan(t, t, t, t, 8, 2, 64, 16, casual=True)
    r.plan(t, t, 8, 2, 64, casual=True)
    w.plan(t, t, t, 8, 2, 64, 16, non_bloking=True)
    p.run(t, t, returns_lse=True)
    r.run(t, t, t, returns_lse=True)
    w.run(t, t, returns_lse=True)
    b.plan(t, t, 8, 8, 4, 4, 8, 2, 64, casual=True)
    b.run(t, t, t, returns_lse=True)
    m.run(t, t, t, t, returns_lse=True)
    quire.single_prefill_with_kv_cache(t, t, t, casual=True)
    quire.single_decode_with_kv_cache(t, t, t, layout="NHD")
    quire.flex_attention(t, t, t, enable_gq=True)
    flash_attn_func(t, t, t, casual=True)

def h(ring: RingAttention, pod: quire.PODWithPagedKVCacheWrapper, c: quire.MultiLevelCascadeAttentionWrapper,
      t: torch.Tensor) -> None:
    ring.plan(InOrder(t), 8, 2, 64, casual=True)
    ring.run(t, t, t, returns_lse=True)
    pod.plan(t, t, t, 8, 2, 64, 16, casual=True)
    pod.run(t, t, t, t, t, casual=True)
    c.plan([t], [t], [t], [t], 8, 2, 64, 16, casual=True)
    flash_mla_with_kvcache(t, t, t, t, 512, t, t, casual=True)
    quire.append_paged_kv_cache(t, t, t, t, t, t, t, t, layout="NHD")
    quire.apply_rope(t, t, t, t, rope_base=1e4)
"""
MISTAKES = (8, 9, 10, 11, *range(16, 29), *range(32, 40))


@pytest.mark.slow
def test_mypy_accepts_a_typed_user_and_finds_mistakes(tmp_path: Path) -> None:
    """In one run, most of which is about torch; `make lint` finds that part in the cache."""
    pytest.importorskip("mypy")
    shutil.copy(SCRIPT, tmp_path)
    (tmp_path / "wrong.py").write_text(WRONG)
    # The floor of Python is that of `make lint`: another one would share nothing with its cache.
    settings = ["--strict", "--python-version", "3.10", "--cache-dir", str(ROOT / ".mypy_cache")]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *settings, SCRIPT.name, "wrong.py"],
        cwd=tmp_path, env={**os.environ, "MYPYPATH": str(Path(quire.__file__).parents[1])},
        capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert done.returncode == 1 and errors, done.stdout + done.stderr
    assert {line.rpartition(": error: ")[0] for line in errors} == {f"wrong.py:{line}" for line in MISTAKES}, errors


@pytest.mark.slow
def test_pyright_accepts_a_typed_user(tmp_path: Path) -> None:
    if shutil.which("pyright") is None:
        pytest.skip("no pyright on PATH: pip install 'pyright[nodejs]', 67 MB")
    shutil.copy(SCRIPT, tmp_path)
    (tmp_path / "pyrightconfig.json").write_text(f'{{"extraPaths": ["{Path(quire.__file__).parents[1]}"]}}')
    command = ["pyright", "--pythonpath", sys.executable, "-p", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "wrong.py").write_text(WRONG)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    found = {int(line) for line in re.findall(r"wrong\.py:(\d+):\d+ - error", done.stdout)}
    assert {*MISTAKES} == found, done.stdout


@pytest.mark.slow
def test_a_typed_user_runs() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("torch.Size([2, 8, 64])") == 8


def test_dir_shows_what_is_public() -> None:
    assert set(dir(quire)) == {*quire.__all__, "__version__"}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="typing.get_overloads() came with Python 3.11")
def test_the_last_overload_has_all_arguments() -> None:
    """It is the implementation's signature, so that no keyword is accepted by a checker and refused by the call."""
    wrappers = (
        quire.BatchPrefillWithPagedKVCacheWrapper, quire.BatchPrefillWithRaggedKVCacheWrapper,
        quire.BatchDecodeWithPagedKVCacheWrapper, quire.BlockSparseAttentionWrapper,
        quire.VariableBlockSparseAttentionWrapper, quire.BatchMLAPagedAttentionWrapper,
    )  # fmt: skip
    functions = (
        quire.flex_attention, quire.single_prefill_with_kv_cache, quire.single_decode_with_kv_cache,
        flash_attn.flash_attn_func, flash_attn.flash_attn_varlen_func, flash_attn.flash_attn_with_kvcache,
        *(wrapper.run for wrapper in wrappers),
    )  # fmt: skip
    for function in map(inspect.unwrap, functions):
        last = typing.get_overloads(function)[-1]
        assert [*inspect.signature(last).parameters] == [*inspect.signature(function).parameters], function.__qualname__
