"""TGI's and mini-SGLang's own backends, and LightLLM's calls, over Quire, on the CPU.

    python run_small.py DIRECTORY       # holds checkouts tgi and mini; one that is not there is not run

LightLLM's file needs its whole model: its four calls stand here as it makes them.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace as NS

import torch
from harness import Stubs, case, finish, reference

flashinfer = importlib.import_module("flashinfer")
ROOT = Path(sys.argv[1])
HEADS, KV, DIM = 8, 2, 128
CONTEXT = NS()
real = {}
if (ROOT / "tgi").is_dir():
    real["text_generation_server.layers.attention.flashinfer"] = (
        f"{ROOT}/tgi/server/text_generation_server/layers/attention/flashinfer.py"
    )
if (ROOT / "mini").is_dir():
    real["minisgl.attention.fi"] = f"{ROOT}/mini/python/minisgl/attention/fi.py"
names = {
    "minisgl.core": {"get_global_ctx": lambda: CONTEXT}, "minisgl.distributed": {"get_tp_info": lambda: NS(size=1)},
    "minisgl.env": {"ENV": NS(FLASHINFER_USE_TENSOR_CORES=NS(value=None))},
    "minisgl.utils": {"div_even": lambda a, b, **k: a // b, "init_logger": lambda n: NS(warning=print)},
    "minisgl.attention.base": {"BaseAttnBackend": object, "BaseAttnMetadata": object}, "minisgl.attention.utils": {"BaseCaptureData": object},
}  # fmt: skip
sys.meta_path.insert(0, Stubs({"minisgl", "text_generation_server"}, real, names))
torch.cuda.Event = lambda *a, **k: NS(record=lambda: None, synchronize=lambda: None)
torch.manual_seed(0)
PAGE = 1
K, V = (torch.randn(256, 1, KV, DIM, dtype=torch.float16) for _ in range(2))
TABLE = torch.randperm(256).view(2, 128)


def answer(q, lens, new, causal=True):
    out, at = [], 0
    for i, (m, n) in enumerate(zip(lens, new)):
        out.append(reference(q[at : at + n], K[TABLE[i, :m], 0], V[TABLE[i, :m], 0], DIM**-0.5, causal))
        at += n
    return torch.cat(out)


def tgi(lens, new, decode):
    def function():
        module = importlib.import_module("text_generation_server.layers.attention.flashinfer")
        q = torch.randn(sum(new), HEADS, DIM, dtype=torch.float16)
        lengths, table = (
            torch.tensor(lens, dtype=torch.int32),
            torch.cat([TABLE[i, :m] for i, m in enumerate(lens)]).int(),
        )
        common = dict(
            input_lengths=lengths,
            block_tables=table,
            num_heads=HEADS,
            num_kv_heads=KV,
            head_size=DIM,
            page_size=1,
            q_dtype=torch.float16,
        )
        if decode:
            state = module.create_decode_state(device="cpu", num_heads=HEADS, num_kv_heads=KV)
            with module.use_decode_state(state=state, kv_cache_dtype=torch.float16, **common):
                o = module.decode_state.get().forward(
                    q, paged_kv_cache=(K, V), logits_soft_cap=None, sm_scale=DIM**-0.5, k_scale=1.0, v_scale=1.0
                )
        else:
            state = module.create_prefill_with_paged_kv_state(device="cpu")
            cu = torch.tensor([0, *new], dtype=torch.int32).cumsum(0).int()
            with module.use_prefill_with_paged_kv_state(
                state=state, cu_seqlens=cu, custom_mask=None, kv_dtype=torch.float16, **common
            ):
                o = module.prefill_with_paged_kv_state.get().forward(
                    q.contiguous(),
                    causal=True,
                    paged_kv_cache=(K, V),
                    logits_soft_cap=None,
                    sm_scale=DIM**-0.5,
                    k_scale=1.0,
                    v_scale=1.0,
                    window_left=-1,
                )
        return o, answer(q, lens, new)

    return function


def mini(lens, new, decode):
    def function():
        module = importlib.import_module("minisgl.attention.fi")
        module.FIMetadata.__post_init__ = lambda self: None  # asserts that tensors are on a GPU
        cache = NS(
            device="cpu", dtype=torch.float16, store_kv=lambda *a: None, k_cache=lambda i: K, v_cache=lambda i: V
        )
        CONTEXT.kv_cache, CONTEXT.page_table = cache, TABLE
        backend = module.FlashInferBackend(NS(num_qo_heads=HEADS, num_kv_heads=KV, head_dim=DIM))
        reqs = [
            NS(extend_len=n, device_len=m, cached_len=m - n, table_idx=i) for i, (m, n) in enumerate(zip(lens, new))
        ]
        batch = NS(padded_reqs=reqs, is_decode=decode, out_loc=None)
        backend.prepare_metadata(batch)
        q = torch.randn(sum(new), HEADS, DIM, dtype=torch.float16)
        return backend.forward(q, None, None, 0, batch), answer(q, lens, new)

    return function


def lightllm(decode):
    def function():
        lens, new = [17, 40], [1, 1] if decode else [9, 40]
        starts, q_starts = (torch.tensor([0, *x], dtype=torch.int32).cumsum(0).int() for x in (lens, new))
        indices, last = (
            torch.cat([TABLE[i, :m] for i, m in enumerate(lens)] + [torch.zeros(64, dtype=torch.int64)]).int(),
            torch.ones(2, dtype=torch.int32),
        )
        workspace, types_ = (
            torch.empty(64 << 20, dtype=torch.uint8),
            dict(q_data_type=torch.float16, kv_data_type=torch.float16),
        )
        q = torch.randn(sum(new), HEADS, DIM, dtype=torch.float16)
        out = torch.empty_like(q)
        if decode:
            w = flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", use_cuda_graph=True, use_tensor_cores=True, paged_kv_indptr_buffer=starts, paged_kv_indices_buffer=indices, paged_kv_last_page_len_buffer=last,
            )  # fmt: skip
            w.plan(starts, indices, last, HEADS, KV, DIM, 1, non_blocking=True, **types_)
        else:
            w = flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper(
                workspace, qo_indptr_buf=q_starts, paged_kv_indptr_buf=starts, paged_kv_indices_buf=indices, paged_kv_last_page_len_buf=last,
            )  # fmt: skip
            w.plan(
                q_starts,
                starts,
                indices,
                last,
                HEADS,
                KV,
                DIM,
                1,
                causal=True,
                pos_encoding_mode="NONE",
                logits_soft_cap=0.0,
                **types_,
            )
        w.run(q, (K, V), out=out)
        return out, answer(q, lens, new)

    return function


if (ROOT / "tgi").is_dir():
    case("TGI prefill", tgi([17, 40], [9, 40], False))
    case("TGI decode", tgi([17, 40], [1, 1], True))
if (ROOT / "mini").is_dir():
    case("mini-SGLang prefill", mini([17, 40], [9, 40], False))
    case("mini-SGLang decode", mini([17, 40], [1, 1], True))
case("LightLLM prefill", lightllm(False))
case("LightLLM decode", lightllm(True))
finish()
