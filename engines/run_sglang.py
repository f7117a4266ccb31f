"""SGLang's own attention backends over Quire, on the CPU: python run_sglang.py DIRECTORY-THAT-HOLDS-sglang"""

from __future__ import annotations

import enum
import sys
from types import SimpleNamespace as NS

import harness
import torch
from harness import Stubs, case, finish, reference

ROOT = sys.argv[1]
ATTENTION = f"{ROOT}/sglang/srt/layers/attention"
HEADS, KV_HEADS, DIM, SLOTS, CONTEXT = 8, 2, 128, 512, 128


class Mode(enum.IntEnum):  # ForwardMode, as far as the backends ask
    EXTEND, DECODE, VERIFY, DRAFT_EXTEND = 1, 2, 3, 4


for _name, _modes in {
    "is_decode_or_idle": {2}, "is_decode": {2}, "is_target_verify": {3}, "is_extend": {1, 3, 4}, "is_extend_without_speculative": {1},
    "is_draft_extend_v2": {4}, "is_draft_extend": {4}, "is_dllm_extend": set(), "is_idle": set(), "is_mixed": set(),
}.items():  # fmt: skip
    setattr(Mode, _name, lambda self, *a, __modes=_modes, **k: int(self) in __modes)


class Env(dict):
    def __getattr__(self, name):
        value = 64 << 20 if name.endswith("WORKSPACE_SIZE") else False
        return NS(get=lambda: value, set=lambda x: None)


class Translator:
    reads_are_translated = needs_read_translate = False

    def __init__(self, table):
        self.table = table

    def pack_read_stream(self, plan, *, req_pool_indices, seq_lens, indptr, out, kv_start_idx=None, kind=None):
        start = torch.zeros_like(seq_lens) if kv_start_idx is None else kv_start_idx
        rows = [
            self.table[r, s : s + n] for r, s, n in zip(req_pool_indices.tolist(), start.tolist(), seq_lens.tolist())
        ]
        flat = torch.cat(rows).to(torch.int32)
        out[: len(flat)] = flat
        return True


class Pool:
    def __init__(self, k, v, dtype):
        self.k, self.v = k.to(dtype), v.to(dtype)

    def get_kv_buffer(self, layer_id):
        return self.k, self.v

    def get_key_buffer(self, layer_id):
        return self.k

    def set_kv_buffer(self, layer, loc, k, v, k_scale=None, v_scale=None):
        self.k[loc] = k.to(self.k.dtype)
        if self.v is not None and v.shape == self.v[loc].shape:
            self.v[loc] = v.to(self.v.dtype)

    def get_kv_cache_quant_method(self):
        return NS(
            name="none",
            resolve_attention_access=lambda *a: NS(kind=0, scale_recipe=None),
            needs_global_scale=lambda: False,
        )


AttentionType = enum.Enum("AttentionType", "DECODER DECODER_BIDIRECTIONAL ENCODER_ONLY")
names = {
    "sglang.srt.environ": {"envs": Env()},
    "sglang.srt.model_executor.forward_batch_info": {"ForwardMode": Mode},
    "sglang.srt.layers.radix_attention": {"AttentionType": AttentionType},
    "sglang.srt.layers.quantization.fp4_kv_cache_quant_method": {"KVCacheAttentionAccessKind": NS(DEQUANT_WORKSPACE=1)},
    "sglang.srt.dllm.config": {"DllmConfig": NS(from_server_args=lambda a: None)},
    "sglang.srt.mem_cache.memory_pool": {"KVWriteLoc": NS(for_layer=lambda b, l, swa_loc=None: b.out_cache_loc, for_batch=lambda b: b.out_cache_loc)},
    "sglang.srt.model_executor.cuda_graph_config": {"check_cuda_graph_backend": lambda *a: False, "Phase": NS(PREFILL=0, DECODE=1), "Backend": NS(TC_PIECEWISE=0)},
    "sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph": {"is_in_tc_piecewise_cuda_graph": lambda: False},
    "sglang.srt.runtime_context": {
        "get_buffer": lambda name, make: make(),
        "get_exec": lambda: NS(features=NS(enable_mis=False), deterministic=NS(enable_deterministic_inference=DETERMINISTIC), kernel=harness.Anything()),
        "get_parallel": lambda: NS(attn_tp_size=1, attn_dcp_size=1, dcp_enabled=False),
        "get_platform": lambda: NS(is_sm100=False, is_sm90=True),
    },
    "sglang.srt.utils": {
        "is_flashinfer_available": lambda: True, "get_cuda_graph_max_batch_size": lambda n: n,
        "get_int_env_var": lambda name, default=0: default, "next_power_of_2": lambda n: 1 << (n - 1).bit_length(),
    },
    "sglang.kernels.kernel_api_logging": {"debug_kernel_api": lambda f: f},
}  # fmt: skip
DETERMINISTIC = False
real = {
    "sglang.srt.layers.attention.flashinfer_backend": f"{ATTENTION}/flashinfer_backend.py",
    "sglang.srt.layers.attention.flashinfer_mla_backend": f"{ATTENTION}/flashinfer_mla_backend.py",
}
sys.meta_path.insert(0, Stubs({"sglang"}, real, names))


def batch(mode, lens, prefix, table):
    """Requests of `lens` tokens of which `prefix` are cached."""
    lens_t, prefix_t = torch.tensor(lens), torch.tensor(prefix)
    loc = torch.cat([table[i, p:n] for i, (n, p) in enumerate(zip(lens, prefix))])
    return NS(
        forward_mode=mode, batch_size=len(lens), req_pool_indices=torch.arange(len(lens)), seq_lens=lens_t, seq_lens_cpu=lens_t,
        seq_lens_sum=sum(lens), extend_prefix_lens=prefix_t, extend_prefix_lens_cpu=prefix, extend_seq_lens_cpu=[n - p for n, p in zip(lens, prefix)],
        encoder_lens=None, spec_info=None, kv_loc_plan=None, out_cache_loc=loc, cross_attention_custom_mask=None, attn_attend_prefix_cache=None,
        positions=torch.zeros(len(loc)), num_token_non_padded=None, attn_dcp_metadata=None, mha_return_lse=False, mha_one_shot=False,
    )  # fmt: skip


def make(kind, dtype=torch.bfloat16, window=None, kv_dtype=None, multimodal=False, heads=HEADS, mla=False):
    torch.manual_seed(0)
    table = torch.randperm(SLOTS)[: 4 * CONTEXT].view(-1, CONTEXT)[:4] if SLOTS >= 4 * CONTEXT else None
    dims = (1, 576) if mla else (KV_HEADS, DIM)
    k = torch.randn(SLOTS, *dims)
    pool = Pool(k, k if mla else torch.randn(SLOTS, *dims), kv_dtype or dtype)
    config = NS(
        num_attention_heads=heads, get_num_kv_heads=lambda *a: KV_HEADS, context_len=CONTEXT, is_multimodal=multimodal, is_encoder_decoder=False,
        hf_config=NS(architectures=["LlamaForCausalLM"]), head_dim=DIM, v_head_dim=DIM, get_max_num_attention_heads=lambda: heads,
        qk_nope_head_dim=128, qk_rope_head_dim=64, kv_lora_rank=512, scaling=192**-0.5,
    )  # fmt: skip
    runner = NS(
        req_to_token_pool=NS(size=4, req_to_token=table), token_to_kv_pool=pool, kv_index_translator=Translator(table), server_args=NS(),
        prefill_attention_backend_str="flashinfer", decode_attention_backend_str="flashinfer", kv_cache_dtype=kv_dtype or dtype, dtype=dtype,
        model_config=config, page_size=1, sliding_window_size=window, device="cpu", is_draft_worker=False,
        token_to_kv_pool_allocator=NS(get_kvcache=lambda: pool),
    )  # fmt: skip
    module = __import__(f"sglang.srt.layers.attention.{kind}", fromlist=["x"])
    cls = module.FlashInferMLAAttnBackend if mla else module.FlashInferAttnBackend
    return cls(runner), table, pool


def attend(
    backend, b, pool, table, lens, prefix, scale=DIM**-0.5, cap=0.0, window=-1, layers=2, heads=HEADS, tree=None
):
    """forward_extend or forward_decode of `layers` layers; the last one's result and its reference."""
    dtype = torch.bfloat16
    layer = NS(
        layer_id=0, logit_cap=cap, scaling=scale, tp_q_head_num=heads, tp_k_head_num=KV_HEADS, tp_v_head_num=KV_HEADS, head_dim=DIM, v_head_dim=DIM,
        sliding_window_size=window, is_cross_attention=False, attn_type=AttentionType.DECODER, k_scale=None, v_scale=None, k_scale_float=None, v_scale_float=None,
    )  # fmt: skip
    n = len(b.out_cache_loc)
    for _ in range(layers):
        q, k, v = (torch.randn(n, h * DIM, dtype=dtype) for h in (heads, KV_HEADS, KV_HEADS))
        forward = backend.forward_decode if b.forward_mode is Mode.DECODE else backend.forward_extend
        o = forward(q, k.view(n, KV_HEADS, DIM), v.view(n, KV_HEADS, DIM), layer, b)
    want, at = [], 0
    for i, (m, p) in enumerate(zip(lens, prefix)):
        rows = q.view(n, heads, DIM)[at : at + m - p]
        want.append(reference(rows, pool.k[table[i, :m]], pool.v[table[i, :m]], scale, True, window, cap))
        at += m - p
    return o.view(n, heads, DIM), torch.cat(want)


from sglang.srt.speculative.spec_info import SpecInput, SpecInputType  # noqa: E402 - after the stubs


class Spec(SpecInput):
    """What speculative decoding hands to the backend: each request's last `width` tokens, a chain or under a mask."""

    ragged_verify_layout, topk, kv_indptr, kv_indices = None, 1, None, None

    def __init__(self, kind, lens, prefix, table, masked):
        self.spec_input_type, self.num_tokens_per_req, self.args = kind, lens[0] - prefix[0], (lens, prefix, table)
        parts = [torch.arange(m)[None] <= torch.arange(p, m)[:, None] for m, p in zip(lens, prefix)]
        self.custom_mask = torch.cat([part.reshape(-1) for part in parts]) if masked else None

    def generate_attn_arg_prefill(self, **ignored):
        lens, prefix, table = self.args

        def indptr(counts):
            return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).to(torch.int32)

        indices = torch.cat([table[i, :m] for i, m in enumerate(lens)]).to(torch.int32)
        return indices, indptr(lens), indptr([m - p for m, p in zip(lens, prefix)]), self.custom_mask


def flow(mode, lens, prefix, window=None, layer_window=-1, graph=False, times=1, spec=None, masked=False, **options):
    def function():
        scoring = {name: options.pop(name) for name in ("scale", "cap", "layers") if name in options}
        backend, table, pool = make("flashinfer_backend", window=window, **options)
        b = batch(mode, lens, prefix, table)
        if spec is not None:
            b.spec_info = Spec(spec, lens, prefix, table, masked)
        if graph:  # as the CUDA graph runner has it, without a graph: capture, then a replay with other lengths
            backend.init_cuda_graph_state(len(lens), 4 * len(b.out_cache_loc))
            first = batch(mode, [p + 1 for p in prefix] if mode is Mode.DECODE else lens, prefix, table)
            first.spec_info = b.spec_info
            backend.init_forward_metadata_out_graph(first, in_capture=True)
            attend(
                backend,
                first,
                pool,
                table,
                first.seq_lens.tolist(),
                prefix,
                heads=options.get("heads", HEADS),
                **scoring,
            )
            backend.init_forward_metadata_out_graph(b)
        else:
            for _ in range(times):
                backend.init_forward_metadata(b)
        return attend(
            backend, b, pool, table, lens, prefix, window=layer_window, heads=options.get("heads", HEADS), **scoring
        )

    return function


def mla(mode, lens, prefix, graph=False):
    def function():
        backend, table, pool = make("flashinfer_mla_backend", mla=True)
        b = batch(mode, lens, prefix, table)
        if graph:  # as the CUDA graph runner has it, without a graph: capture, then a replay with other lengths
            backend.init_cuda_graph_state(len(lens), 4 * len(b.out_cache_loc))
            first = batch(mode, [p + 1 for p in prefix], prefix, table)
            backend.init_forward_metadata_out_graph(first, in_capture=True)
            backend.init_forward_metadata_out_graph(b)
        else:
            backend.init_forward_metadata(b)
        n, ragged = len(b.out_cache_loc), mode is Mode.EXTEND and not any(prefix)
        dims = (192, 128) if ragged else (576, 512)
        layer = NS(
            layer_id=0,
            logit_cap=0.0,
            scaling=192**-0.5,
            tp_q_head_num=HEADS,
            tp_k_head_num=HEADS,
            tp_v_head_num=HEADS,
            head_dim=dims[0],
            v_head_dim=dims[1],
        )
        q, k, v = (torch.randn(n, HEADS, d, dtype=torch.bfloat16) for d in (*dims[:1], *dims))
        if ragged:
            o = backend.forward_extend(q, k, v, layer, b, save_kv_cache=False)
        else:
            forward = backend.forward_decode if mode is Mode.DECODE else backend.forward_extend
            o = forward(q[..., :512].contiguous(), None, None, layer, b, q_rope=q[..., 512:].contiguous())
        want, at = [], 0
        for i, (m, p) in enumerate(zip(lens, prefix)):
            rows = slice(at, at + m - p)
            keys, values = (k[rows], v[rows]) if ragged else (pool.k[table[i, :m]], pool.k[table[i, :m]][..., :512])
            want.append(reference(q[rows], keys, values, 192**-0.5))
            at += m - p
        return o.view(n, HEADS, dims[1]), torch.cat(want)

    return function


E, D = Mode.EXTEND, Mode.DECODE
ROUND = 1e-2  # bfloat16
case("extend, no prefix (ragged)", flow(E, [7, 33, 64], [0, 0, 0]), ROUND)
case("extend, prefix (ragged + paged, merge_state)", flow(E, [17, 40, 64], [8, 0, 32]), ROUND)
case("extend, paged only (multimodal)", flow(E, [17, 40, 64], [8, 0, 32], multimodal=True), ROUND)
case("extend, logits soft cap 30, scale 0.1", flow(E, [17, 40, 64], [8, 0, 32], cap=30.0, scale=0.1), ROUND)
# SGLang passes no window here (flashinfer_backend.py, extend_no_prefix): its result is full attention with any library.
case("extend, sliding window 16, window layer, no prefix", flow(E, [17, 40, 64], [0, 0, 0], window=16), ROUND)
case(
    "extend, sliding window 16, window layer, prefix",
    flow(E, [17, 40, 64], [8, 0, 32], window=16, layer_window=16),
    ROUND,
)
case("extend, sliding window 16, full layer, prefix", flow(E, [17, 40, 64], [8, 0, 32], window=16), ROUND)
case(
    "extend, sliding window 16, paged only",
    flow(E, [17, 40, 64], [8, 0, 32], window=16, layer_window=16, multimodal=True),
    ROUND,
)
case("decode", flow(D, [17, 1, 64], [16, 0, 63]), ROUND)
case(
    "decode, planned twice, scale 0.1, soft cap 30",
    flow(D, [17, 1, 64], [16, 0, 63], cap=30.0, scale=0.1, times=2),
    ROUND,
)
case("decode, sliding window 16, window layer", flow(D, [17, 1, 64], [16, 0, 63], window=16, layer_window=16), ROUND)
case("decode, sliding window 16, full layer", flow(D, [17, 1, 64], [16, 0, 63], window=16), ROUND)
case("decode, e4m3 cache", flow(D, [17, 1, 64], [16, 0, 63], kv_dtype=torch.float8_e4m3fn), ROUND)
DETERMINISTIC = True
case("extend, deterministic", flow(E, [17, 40, 64], [8, 0, 32]), ROUND)
case("decode, deterministic", flow(D, [17, 1, 64], [16, 0, 63]), ROUND)
DETERMINISTIC = False
case("decode in a CUDA graph's wrappers, scale 128**-0.5", flow(D, [17, 1, 64], [16, 0, 63], graph=True), ROUND)
case(
    "decode in a CUDA graph's wrappers, scale 1/sqrt(128)",
    flow(D, [17, 1, 64], [16, 0, 63], graph=True, scale=1 / 128**0.5),
    ROUND,
)
case(
    "decode in a CUDA graph's wrappers, scale 0.1, cap 30",
    flow(D, [17, 1, 64], [16, 0, 63], graph=True, cap=30.0, scale=0.1),
    ROUND,
)
DFLASH, EAGLE = SpecInputType.DFLASH_VERIFY, SpecInputType.EAGLE_VERIFY
V, DRAFT, LENS, BEFORE = Mode.VERIFY, Mode.DRAFT_EXTEND, [20, 36, 64], [16, 32, 60]
case("verify 4 tokens, tree mask", flow(V, LENS, BEFORE, spec=EAGLE, masked=True), ROUND)
case(
    "verify 4 tokens, tree mask, graph's wrappers",
    flow(V, LENS, BEFORE, spec=EAGLE, masked=True, graph=True, scale=1 / 128**0.5),
    ROUND,
)
case(
    "verify 4 tokens, causal, graph's wrappers",
    flow(V, LENS, BEFORE, spec=DFLASH, graph=True, scale=1 / 128**0.5),
    ROUND,
)
case(
    "draft extend, graph's wrappers",
    flow(DRAFT, LENS, BEFORE, spec=SpecInputType.EAGLE_DRAFT_EXTEND, graph=True, scale=1 / 128**0.5),
    ROUND,
)
case(
    "extend (full prefill graph), graph's wrappers",
    flow(E, [17, 40, 64], [8, 0, 32], graph=True, scale=1 / 128**0.5),
    ROUND,
)
case("MLA decode", mla(D, [17, 1, 64], [16, 0, 63]), ROUND)
case("MLA decode in a CUDA graph's wrappers", mla(D, [17, 1, 64], [16, 0, 63], graph=True), ROUND)
case("MLA extend, prefix (paged)", mla(E, [17, 40, 64], [8, 0, 32]), ROUND)
case("MLA extend, no prefix (ragged, 192 and 128)", mla(E, [17, 40, 64], [0, 0, 0]), ROUND)
# No kernel attends to compressed keys yet.
finish()
