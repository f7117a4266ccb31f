"""Each shipped variant of the attention kernels once, on a small batch, against the oracle.

    python tests/every_variant.py                                    # all presets, on the GPU if there is one
    python tests/every_variant.py --as-gpu 8.6 --backend decode,fa2,wide  # another GPU's, as PTX
    python tests/every_variant.py --interpret sm86 --backend decode,fa2,wide --preset encoder  # the same without a GPU
    compute-sanitizer --tool memcheck python tests/every_variant.py --backend decode,fa2

A line for each variant that is wrong; exit status 1 if there is one.
"""

from __future__ import annotations

import own_environment  # noqa: F401  # before torch is

# isort: split
import argparse
import math
import sys
from collections.abc import Iterator
from functools import partial

import torch

import nvfp4_cases
import quire
from calls import paged_wrapper, plan_paged, plan_ragged, ragged_wrapper
from latents import Latents
from problems import Problem
from ptx.impersonated import GPUS, impersonated, refusal
from ptx.memory import Fault
from ptx.simulated import simulated
from quire.cli.aot import PRESETS, Selection, select
from quire.engine.device import target_of
from quire.kernels import AttentionKey, kernel_of
from quire.kernels.features import NVFP4, MaskMode, PosEncodingMode
from test_fp8_products import check as check_products_of_8_bits
from test_mla import parts, planned
from test_xqa import Draft, call, with_draft

GROUP_SIZE = 4
#: Long enough that keys of a request are divided, and a request of none.
KV_LENS = (300, 0, 67)
#: What --announce prints before a variant's name.
ANNOUNCEMENT = "variant: "


def shipped(target: str, backends: tuple[str, ...], presets: tuple[str, ...]) -> Iterator[AttentionKey]:
    """The keys of the presets' variants on these backends, each once."""
    found: dict[str, AttentionKey] = {}
    for name in presets:
        for spec in select(Selection(**{**PRESETS[name], "targets": (target,), "backends": backends})):
            if spec.slug.startswith("attention_"):
                found[spec.slug] = AttentionKey.parse(spec.slug)
    yield from found.values()


def problem_of(key: AttentionKey, device: str) -> Problem:
    """A batch whose requests fill a row tile of the variant."""
    q_len = max(1, key.tile_rows // GROUP_SIZE) if key.tile_rows > 16 or key.mask is not MaskMode.NONE else 1
    if key.tile_rows > 128:  # the highest tiles are for long prompts
        q_len = 520
    kv_lens = tuple(max(n, q_len) if n else n for n in KV_LENS)
    chunked, soft_cap = key.mask is MaskMode.CHUNKED, 20.0 if key.soft_cap else None
    window_left = 100 if key.window and not chunked else -1
    rope = key.pos_encoding is PosEncodingMode.ROPE_LLAMA
    problem = Problem(
        (q_len,) * len(kv_lens), kv_lens, num_qo_heads=2 * GROUP_SIZE, num_kv_heads=2, head_dim=key.head_dim_qk,
        head_dim_vo=key.head_dim_vo, dtype=key.o.torch if key.q.bits == 8 else key.q.torch,
        kv_dtype=None if key.kv is NVFP4 else key.kv.torch, device=device,
        causal=key.mask is MaskMode.CAUSAL, window_left=window_left, soft_cap=soft_cap,
        attention_chunk_size=70 if chunked else None,
        pos_encoding_mode=key.pos_encoding.name, rope_scale=2.0 if rope else None, rope_theta=1e4 if rope else None,
    )  # fmt: skip
    return problem.random_mask() if key.mask is MaskMode.CUSTOM else problem


def run(key: AttentionKey, backend: str, device: str) -> str:
    """Compute and compare; returns the slug of the variant that ran, which the lengths may have made another one."""
    if key.problem().is_mla:
        return run_mla(key, backend, device)
    problem, types = problem_of(key, device), {"kv_data_type": key.kv.torch, "o_data_type": key.o.torch}
    check = problem.check
    if key.q.bits == 8:
        problem.q, types["q_data_type"] = problem.q.to(key.q.torch), key.q.torch
        check = partial(check_products_of_8_bits, problem)
    if key.kv is NVFP4:
        return run_nvfp4(key, problem, types, backend)
    if key.mask is MaskMode.TREE:
        draft = Draft.tree(len(problem.kv_lens), problem.qo_lens[0])
        with_draft(problem, draft)
        problem.check(call(problem, problem.paged(16), backend, mask=draft.words(device)))
        return key.slug
    if key.paged:
        cache = problem.paged(key.page_size if key.page_size > 0 else 5)  # 5: fits no tile
        wrapper = paged_wrapper(problem, cache, backend)
        plan_paged(wrapper, problem, cache, plan=types)
        check(*wrapper.run(problem.q, cache.kv, return_lse=True))
    else:
        wrapper = ragged_wrapper(problem, backend)
        plan_ragged(wrapper, problem, plan=types)
        check(*wrapper.run(problem.q, problem.k, problem.v, return_lse=True))
    slug: str = wrapper._attention.decision.key.slug
    return slug


def run_nvfp4(key: AttentionKey, problem: Problem, types: dict[str, torch.dtype], backend: str) -> str:
    """run() for keys and values of 4 bits."""
    rows = nvfp4_cases.quantise(problem)
    if key.paged:
        cache = nvfp4_cases.paged(problem, rows, key.page_size if key.page_size > 0 else 5)  # 5: fits no tile
        wrapper = paged_wrapper(problem, cache, backend)
        plan_paged(wrapper, problem, cache, plan=types)
        problem.check(*wrapper.run(problem.q, cache.kv, kv_cache_sf=cache.sf, return_lse=True))
    else:
        wrapper = ragged_wrapper(problem, backend)
        plan_ragged(wrapper, problem, plan=types)
        scales = (rows.k_sf, rows.v_sf)
        problem.check(*wrapper.run(problem.q, rows.k, rows.v, kv_cache_sf=scales, return_lse=True))
    slug: str = wrapper._attention.decision.key.slug
    return slug


def run_mla(key: AttentionKey, backend: str, device: str) -> str:
    """run() for latents; a query has half the heads of a row tile where the mask needs several queries."""
    q_len = 1 if key.mask is MaskMode.NONE else 2
    problem = Latents(
        (q_len,) * len(KV_LENS), KV_LENS, key.tile_rows // q_len, key.q.torch, device, key.mask is MaskMode.CAUSAL
    )
    pages = problem.paged(key.page_size if key.page_size > 0 else 5)  # 5: fits no tile
    wrapper = planned(problem, pages, backend)
    problem.check(*wrapper.run(*parts(problem), pages.ckv, pages.kpe, return_lse=True))
    slug: str = wrapper._attention.decision.key.slug
    return slug


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--backend", default="decode,fa2,fa3,fp8" if device != "cpu" else "cpu")
    parser.add_argument("--preset", default=",".join(PRESETS))
    parser.add_argument("--most", type=int, default=math.inf, help="variants")
    parser.add_argument("--announce", action="store_true", help="print each variant's name before it runs")
    parser.add_argument("--as-gpu", choices=sorted(GPUS), help="take the GPU for one of a compute capability")
    parser.add_argument("--interpret", metavar="TARGET", help="interpret PTX of a target, such as sm86, without a GPU")
    options = parser.parse_args()
    if options.interpret is not None:
        with simulated(options.interpret):
            return compare(options, "cpu")
    if options.as_gpu is None:
        return compare(options, device)
    if reason := refusal(options.as_gpu):
        parser.error(f"--as-gpu {options.as_gpu}: {reason}")
    with impersonated(options.as_gpu):
        return compare(options, device)


def compare(options: argparse.Namespace, device: str) -> int:
    """Run the variants that the options name; the exit status."""
    backends = tuple(options.backend.split(","))
    ran, wrong = set(), 0
    keys = list(shipped(target_of(torch.device(device)), backends, tuple(options.preset.split(","))))
    for count, key in enumerate(keys):
        if count >= options.most:
            break
        backend = f"quire:{kernel_of(key).backend}"
        if options.announce:
            print(f"{ANNOUNCEMENT}{key.slug}", flush=True)
        try:
            ran.add(run(key, backend, device))
        except (AssertionError, Fault, quire.QuireError) as error:
            wrong += 1
            print(f"{key.slug}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
    print(f"{len(keys)} variants, {len(ran)} ran, {wrong} wrong")
    print(*(f"not run: {key.slug}" for key in keys if key.slug not in ran and options.most is math.inf), sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
