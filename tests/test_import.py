"""`import quire` does nothing: no CUDA, no file, no process, and it is quick."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest

import quire
from calls import pending

#: The public names that serving code imports.
NAMES = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "append_paged_kv_cache",
    "apply_llama31_rope",
    "apply_llama31_rope_inplace",
    "apply_llama31_rope_pos_ids",
    "apply_llama31_rope_pos_ids_inplace",
    "apply_rope",
    "apply_rope_inplace",
    "apply_rope_pos_ids",
    "apply_rope_pos_ids_inplace",
    "apply_rope_with_cos_sin_cache",
    "apply_rope_with_cos_sin_cache_inplace",
    "batch_decode_with_shared_prefix_padded_kv_cache",
    "fast_decode_plan",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "packbits",
    "segment_packbits",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "xqa",
    "xqa_batch_decode_with_kv_cache",
]

MODULES = ("cascade", "decode", "page", "prefill", "quantization", "rope", "xqa")

WATCHED = """
import os, sys
import torch
processes, writes = [], []
def watch(event, args):
    if event in ("subprocess.Popen", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"):
        processes.append((event, str(args)))
    if event == "open" and isinstance(args[0], (str, bytes)) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        writes.append(str(args[0]))
    if event in ("os.mkdir", "os.rename", "os.symlink"):
        writes.append(str(args))
sys.addaudithook(watch)
sys.dont_write_bytecode = True
import quire
assert not torch.cuda.is_initialized()
assert not processes, processes
assert not writes, writes
"""

TIMED = """
import gc, time
began = time.process_time()
import torch
between = time.process_time()
gc.collect()  # of torch's objects, which whoever allocates next would pay for
collected = time.process_time()
import quire
print((time.process_time() - collected) / (between - began))
"""


def run_python(code, *arguments, **env):
    """Runs `code` in a fresh interpreter; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_each(*codes):
    """The words that each prints, in a fork of an interpreter that has imported torch alone."""
    fork = "import os, sys, torch\nfor code in sys.argv[1:]:\n"
    fork += "    if not os.fork(): exec(code); sys.stdout.flush(); os._exit(0)\n"
    fork += "    assert not os.wait()[1]\n    print('end', flush=True)\n"
    return [told.split() for told in run_python(fork, *codes).split("end\n")[:-1]]


def test_import_has_no_effects(tmp_path):
    home, cache = tmp_path / "home", tmp_path / "cache"
    home.mkdir()
    cache.mkdir()
    places = {"HOME": str(home), "XDG_CACHE_HOME": str(cache), "QUIRE_CACHE_DIR": str(tmp_path / "own")}
    run_python(WATCHED, **places)
    assert not list(home.iterdir())
    assert not list(cache.iterdir())
    assert not (tmp_path / "own").exists()


@pytest.mark.slow
def test_import_is_quick():
    """At most an eighth of what torch's own import takes, in CPU time: other programs on the machine do not count.

    Of two runs of three: the first leaves bytecode behind, as an installation does, and the third is seldom needed.
    """
    ratios = [float(run_python(TIMED, PYTHONDONTWRITEBYTECODE="")) for _ in range(2)]
    if max(ratios) > 1 / 8:
        ratios.append(float(run_python(TIMED, PYTHONDONTWRITEBYTECODE="")))
    assert sorted(ratios)[1] <= 1 / 8, f"import quire took {ratios} of what import torch took"


@pytest.mark.parametrize("name", [pytest.param(n, marks=pending(n)) for n in NAMES])
def test_public_names(name):
    assert callable(getattr(quire, name))
    assert name in quire.__all__


def test_every_public_name_exists():
    assert [n for n in quire.__all__ if not hasattr(quire, n)] == []
    assert isinstance(quire.__version__, str)


@pytest.fixture(scope="module")
def told_of_modules():
    """What three programs print: of a process each, which have torch's import in common."""
    told = "print(page is cache.page, page.__name__, page.__spec__.name)"
    orders = ("import quire.page as page", "from quire import page")
    return run_each(
        f"import quire\nfor module in {MODULES}: print(getattr(quire, module).__name__)",
        *(f"{first}\nfrom quire import cache\nimport quire.cache.page\n{told}" for first in orders),
    )


def test_public_modules_are_attributes(told_of_modules):
    """quire.prefill and the like are reachable after `import quire` alone, as the manuals spell them."""
    names = told_of_modules[0]
    assert [name.rpartition(".")[2].replace("expressions", "expression") for name in names] == list(MODULES)


def test_modules_have_flashinfers_names_too(told_of_modules):
    """One module, two names, whichever is imported first."""
    assert len(told_of_modules) == 3
    for names in told_of_modules[1:]:
        assert names == ["True", *["quire.cache.page"] * 2]
    with pytest.raises(ModuleNotFoundError, match=r"quire\.nothing"):
        importlib.import_module("quire.nothing")
