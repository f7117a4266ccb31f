"""SGLang's backend of FlashAttention-3 over Quire, on the CPU: python run_sglang_flash.py DIRECTORY-THAT-HOLDS-sglang

`--attention-backend quire` is this backend after quire.compat.engines.install(). The functions of sgl_kernel that are
behind refuse every call.
"""

from __future__ import annotations

import enum
import importlib
import sys
from types import ModuleType
from types import SimpleNamespace as NS

import tiny
import torch
from harness import Stubs, case, finish, reference

import quire
from quire.compat import engines

ROOT = sys.argv[1]
SRT, KERNELS = f"{ROOT}/sglang/srt", f"{ROOT}/sglang/kernels/ops/attention"
HEADS, KV_HEADS, DIM, SLOTS, CONTEXT = 8, 2, 128, 512, 128
SPEC = NS(speculative_eagle_topk=0, speculative_num_draft_tokens=4, speculative_algorithm=None)
EXEC = NS(deterministic=NS(enable_deterministic_inference=False))


class Mode(enum.IntEnum):  # ForwardMode, as far as the backend asks
    EXTEND, DECODE, VERIFY, DRAFT_EXTEND = 1, 2, 3, 4


for _name, _modes in {
    "is_decode_or_idle": {2}, "is_target_verify": {3}, "is_extend_or_draft_extend_or_mixed": {1, 4}, "is_draft_extend_v2": {4}, "is_idle": set(),
    "is_extend": {1, 3, 4}, "is_decode": {2},
}.items():  # fmt: skip
    setattr(Mode, _name, lambda self, *a, __modes=_modes, **k: int(self) in __modes)


class Pool:
    def __init__(self, k, v):
        self.k, self.v = k, v

    def get_kv_buffer(self, layer_id):
        return self.k[layer_id], self.v[layer_id]

    def get_key_buffer(self, layer_id):
        return self.k[layer_id]

    def set_kv_buffer(self, layer, loc, k, v, k_scale=None, v_scale=None):
        for cache, new, scale in ((self.k[layer.layer_id], k, k_scale), (self.v[layer.layer_id], v, v_scale)):
            cache[loc] = (new if scale is None else new / scale).view(cache[loc].shape).to(cache.dtype)

    def set_mla_kv_buffer(self, layer, loc, k, k_rope):
        self.k[layer.layer_id][loc] = torch.cat([k, k_rope], -1).to(self.k[layer.layer_id].dtype)


def theirs(*args, **kwargs):
    raise AssertionError("sgl_kernel's own FlashAttention was called")


def flash_attn_with_kvcache(*args, **kwargs):
    theirs()


def flash_attn_varlen_func(*args, **kwargs):
    theirs()


def page_table(req_to_token, rows, lens, out, page_size, *swa):
    for i, row in enumerate(rows.tolist()):
        n = -(-int(lens[i]) // page_size)
        out[i, :n] = req_to_token[row, : n * page_size : page_size] // page_size


def decode_metadata(
    lens, cu_seqlens, table, req_to_token, rows, pages, seq_lens, delta, page_size, swa_table, **ignored
):
    lens.copy_(seq_lens + delta)
    cu_seqlens[1:] = lens.cumsum(0)
    page_table(req_to_token, rows, lens, table, page_size)


AttentionType = enum.Enum("AttentionType", "DECODER DECODER_BIDIRECTIONAL ENCODER_ONLY")
names = {
    "sglang.kernels.jit.utils": {"cache_once": lambda f: f},
    "sglang.kernels.kernel_api_logging": {"debug_kernel_api": lambda f: f},
    "sglang.kernels.ops.attention.metadata": {"normal_decode_set_metadata": decode_metadata},
    "sglang.kernels.ops.attention.trtllm_mha_page_table": {"build_trtllm_mha_page_table": page_table},
    "sglang.srt.configs.model_config": {"AttentionArch": enum.Enum("AttentionArch", "MHA MLA")},
    "sglang.srt.environ": {"envs": NS(SGLANG_USE_SGL_FA3_KERNEL=NS(get=lambda: True))},
    "sglang.srt.layers.attention.kv_shard_hooks": {"get_kv_shard_pool": lambda pool: None},
    "sglang.srt.layers.attention.verify_mask": {"maybe_create_verify_mask": lambda *a, **k: None},
    "sglang.srt.layers.cp.utils": {"is_cp_active": lambda b: False},
    "sglang.srt.layers.radix_attention": {"AttentionType": AttentionType},
    "sglang.srt.mem_cache.layout.paged_view": {
        "paged_kv_view": lambda cache, page, heads, dim: cache.view(-1, page, heads, dim), "paged_view": lambda x, page: x.unflatten(0, (-1, page)),
    },
    "sglang.srt.mem_cache.memory_pool": {"KVWriteLoc": NS(for_layer=lambda b, layer, swa_loc=None: b.out_cache_loc)},
    "sglang.srt.mem_cache.swa_memory_pool": {"SWAKVPool": type("SWAKVPool", (), {})},
    "sglang.srt.model_executor.forward_batch_info": {"ForwardMode": Mode},
    "sglang.srt.runtime_context": {
        "get_exec": lambda: EXEC, "get_parallel": lambda: NS(attn_cp_size=1, attn_tp_size=1, enable_prefill_cp=False, attn_dp_enabled=False), "get_spec": lambda: SPEC,
        "get_model": lambda: NS(is_embedding=EMBEDDING), "get_schedule": lambda: NS(chunked_prefill_size=-1, disable_chunked_prefix_cache=False), "get_memory": lambda: NS(disable_radix_cache=True),
    },
    "sglang.srt.utils": {"get_device_capability": lambda *a: (9, 0), "is_musa": lambda: False, "get_compiler_backend": lambda: "eager"},
    "sglang.srt.utils.common": {"get_device_capability": lambda *a: (9, 0)},
}  # fmt: skip
EMBEDDING = False
real = {
    "sglang.srt.layers.attention.flashattention_backend": f"{SRT}/layers/attention/flashattention_backend.py",
    "sglang.kernels.ops.attention.flash_attention": f"{KERNELS}/flash_attention.py",
    "sglang.kernels.ops.attention.flash_attention_v3": f"{KERNELS}/flash_attention_v3.py",
}
sys.meta_path.insert(0, Stubs({"sglang"}, real, names))
kernel, functions = ModuleType("sgl_kernel"), ModuleType("sgl_kernel.flash_attn")
kernel.__path__, kernel.merge_state_v2 = [], quire.merge_state_v2
functions.flash_attn_with_kvcache, functions.flash_attn_varlen_func = flash_attn_with_kvcache, flash_attn_varlen_func
functions.get_scheduler_metadata = lambda batch_size, **more: torch.zeros(1, dtype=torch.int32)
sys.modules |= {"sgl_kernel": kernel, "sgl_kernel.flash_attn": functions}
torch.version.cuda = torch.version.cuda or "12.8"
engines.install()


class Backend:
    """SGLang's backend, its pool of slots, and its batches."""

    def __init__(self, page=1, layers=1, heads=HEADS, kv_heads=KV_HEADS, dim=DIM, dtype=torch.bfloat16, kv=None, mla=False, windows=(-1,), cap=0.0, scale=None, sinks=(None,), scales=False):  # fmt: skip
        arch = importlib.import_module("sglang.srt.configs.model_config").AttentionArch
        self.page, self.mla, self.dtype, self.sinks = page, mla, dtype, sinks
        self.dims = (1, 576) if mla else (kv_heads, dim)
        stored = kv or dtype
        draw = lambda: torch.randn(SLOTS, *self.dims, dtype=dtype).to(stored)  # noqa: E731
        self.pool = Pool([draw() for _ in range(layers)], [draw() for _ in range(layers)])
        rows = torch.randperm(SLOTS // page)[: 4 * CONTEXT // page].view(4, -1)
        self.table = (rows[:, :, None] * page + torch.arange(page)).flatten(1).to(torch.int32)
        config = NS(
            is_encoder_decoder=False, context_len=CONTEXT, attention_arch=arch.MLA if mla else arch.MHA, is_local_attention_model=False, head_dim=dim,
            hf_text_config=NS(num_attention_heads=heads), get_num_kv_heads=lambda size: kv_heads, hf_config=NS(architectures=["LlamaForCausalLM"]),
        )  # fmt: skip
        window = max(windows)
        runner = NS(
            sliding_window_size=window if window >= 0 else None, model_config=config, device="cpu", token_to_kv_pool=self.pool, kv_cache_dtype=stored,
            req_to_token_pool=NS(size=4, req_to_token=self.table), kv_cache_dtype_str="auto" if kv is None else "fp8_e4m3", page_size=page,
            kv_index_translator=NS(is_translating=False, reads_are_translated=False), is_draft_worker=False,
        )  # fmt: skip
        module = importlib.import_module("sglang.srt.layers.attention.flashattention_backend")
        self.backend = module.FlashAttentionBackend(runner)
        one = torch.tensor(0.5) if scales else None
        self.layers = [
            NS(
                layer_id=i, logit_cap=cap, scaling=scale or dim**-0.5, tp_q_head_num=heads, tp_k_head_num=self.dims[0], tp_v_head_num=self.dims[0],
                head_dim=self.dims[1], v_head_dim=512 if mla else dim, sliding_window_size=windows[i % len(windows)], is_cross_attention=False,
                attn_type=AttentionType.DECODER, k_scale=one, v_scale=one,
            )
            for i in range(layers)
        ]  # fmt: skip

    def begin(self, batch, mode=None, spec=None, graph=False):
        """batch: for each request its row of the table, its tokens so far, and those of this step."""
        new, last = [n for *_, n in batch], [first + n for _, first, n in batch]
        rows = [row for row, *_ in batch]
        mode = mode or (Mode.DECODE if max(new) == 1 and min(last) > 1 else Mode.EXTEND)
        loc = torch.cat([self.table[row, m - n : m] for row, m, n in zip(rows, last, new)]).long()
        lens = torch.tensor(last)
        if mode is Mode.VERIFY:  # its lengths do not count the drafts
            lens = lens - torch.tensor(new)
        self.batch = NS(
            forward_mode=mode, batch_size=len(new), req_pool_indices=torch.tensor(rows), seq_lens=lens, seq_lens_cpu=lens, seq_lens_sum=sum(last),
            extend_prefix_lens_cpu=[m - n for m, n in zip(last, new)], extend_seq_lens=torch.tensor(new), extend_seq_lens_cpu=new, encoder_lens=None, spec_info=spec,
            kv_loc_plan=None, out_cache_loc=loc, attn_attend_prefix_cache=None, dcp_kv_mask=None, extend_num_tokens=sum(new), mha_return_lse=False, mha_one_shot=False,
            positions=lens - 1, spec_algorithm=NS(is_uno=lambda: False), _attn_output=None,
        )  # fmt: skip
        if graph:
            self.backend.init_forward_metadata_out_graph(self.batch, in_capture=graph == "capture")
        else:
            self.backend.init_forward_metadata(self.batch)

    def attend(self, i, q, k, v):
        """One layer."""
        forward = self.backend.forward_decode if self.batch.forward_mode is Mode.DECODE else self.backend.forward_extend
        more = {} if self.sinks[i % len(self.sinks)] is None else {"sinks": self.sinks[i % len(self.sinks)]}
        if self.mla:
            more["k_rope"], k = k[..., 512:], k[..., :512]
            v = k
            if i:
                q, more["q_rope"] = q[..., :512].contiguous(), q[..., 512:].contiguous()
        out = forward(q, k, v, self.layers[i], self.batch, **more)
        return out.view(len(q), self.layers[i].tp_q_head_num, -1)

    def keys(self, row, m):
        """What the first layer's cache holds of a request."""
        slots, layer = self.table[row, :m].long(), self.layers[0]
        k, v = self.pool.k[0][slots].float(), self.pool.v[0][slots].float()
        return (k, k[..., :512]) if self.mla else (k * (layer.k_scale or 1.0), v * (layer.v_scale or 1.0))


def flow(batch, mode=None, masked=False, graph=False, **options):
    """A step of a batch (requests of n tokens, of which the last are new)."""

    def function():
        torch.manual_seed(0)
        SPEC.speculative_eagle_topk = 2 if masked else 0
        b = Backend(**options)
        rows = [(i, n - new, new) for i, (n, new) in enumerate(batch)]
        spec, total = None, sum(new for _, new in batch)
        if mode is Mode.VERIFY:
            parts = [torch.arange(n)[None] <= torch.arange(n - new, n)[:, None] for n, new in batch]
            spec = NS(ragged_verify_layout=None, custom_mask=torch.cat([part.flatten() for part in parts]))
        draw = lambda h, d: torch.randn(total, h, d, dtype=b.dtype)  # noqa: E731
        q, k, v = draw(HEADS, b.dims[1]), draw(*b.dims), draw(*b.dims)
        if graph:  # as the CUDA graph runner has it, without a graph: capture, then a replay with other lengths
            b.backend.init_cuda_graph_state(len(batch), total)
            b.begin([(i, 1, new) for i, (_, new) in enumerate(batch)], mode, spec, "capture")
            b.attend(0, q, k, v)
            b.begin(rows, mode, spec, "replay")
        else:
            b.begin(rows, mode, spec)
        out, want, at, layer = b.attend(0, q, k, v), [], 0, b.layers[0]
        for i, (n, new) in enumerate(batch):
            want.append(reference(q[at : at + new], *b.keys(i, n), layer.scaling, True, layer.sliding_window_size, layer.logit_cap, b.sinks[0]))  # fmt: skip
            at += new
        return out, torch.cat(want)

    return function


def named():
    """What `--attention-backend quire` becomes, and what SGLang's registry has under the name."""
    from quire.compat.engines import resolve_sglang

    arguments = NS(attention_backend="quire", prefill_attention_backend=None, decode_attention_backend="quire", speculative_draft_attention_backend=None)  # fmt: skip
    resolve_sglang(arguments)
    assert (arguments.attention_backend, arguments.decode_attention_backend) == ("fa3", "fa3")
    return torch.ones(1), torch.ones(1)


def embeddings():
    global EMBEDDING
    EMBEDDING = True
    try:
        b = Backend()
        b.begin([(0, 0, 7), (1, 0, 40)])
        q, k, v = (torch.randn(47, h, DIM, dtype=b.dtype) for h in (HEADS, KV_HEADS, KV_HEADS))
        out = b.attend(0, q, k, v)
        return out, torch.cat([reference(q[rows], k[rows], v[rows], DIM**-0.5) for rows in (slice(0, 7), slice(7, 47))])
    finally:
        EMBEDDING = False


ROUND = 1e-2
DECODES, PREFILLS, VERIFY = [(17, 1), (2, 1), (64, 1)], [(17, 9), (40, 40), (64, 32)], [(20, 4), (36, 4), (64, 4)]
SINKS = (torch.randn(HEADS),)
case("the name", named)
for page in (1, 16):
    case(f"extend, pages of {page}", flow(PREFILLS, page=page), ROUND)
    case(f"decode, pages of {page}", flow(DECODES, page=page), ROUND)
    case(f"verify 4 tokens, pages of {page}", flow(VERIFY, Mode.VERIFY, page=page), ROUND)
    case(f"MLA extend, pages of {page}", flow(PREFILLS, mla=True, page=page, scale=192**-0.5), ROUND)
    case(f"MLA decode, pages of {page}", flow(DECODES, mla=True, page=page, scale=192**-0.5), ROUND)
    case(
        f"MLA verify 4 tokens, pages of {page}", flow(VERIFY, Mode.VERIFY, mla=True, page=page, scale=192**-0.5), ROUND
    )
case("verify 4 tokens of a tree (two passes, merge_state_v2)", flow(VERIFY, Mode.VERIFY, masked=True), ROUND)
case("MLA verify 4 tokens of a tree", flow(VERIFY, Mode.VERIFY, masked=True, mla=True, scale=192**-0.5), ROUND)
case("draft extend", flow(VERIFY, Mode.DRAFT_EXTEND), ROUND)
case("extend, window 16, soft cap 30, scale 0.1", flow(PREFILLS, windows=(16,), cap=30.0, scale=0.1), ROUND)
case("decode, window 16, soft cap 30, scale 0.1", flow(DECODES, windows=(16,), cap=30.0, scale=0.1), ROUND)
case("extend, window 16 and sinks (gpt-oss)", flow(PREFILLS, windows=(16,), sinks=SINKS), ROUND)
case("decode, sinks (gpt-oss)", flow(DECODES, sinks=SINKS), ROUND)
# Queries are rounded to e4m3 as well, by SGLang.
case("extend, e4m3 cache with scales", flow(PREFILLS, kv=torch.float8_e4m3fn, scales=True), 8e-2)
case("decode, e4m3 cache", flow(DECODES, kv=torch.float8_e4m3fn), 8e-2)
EXEC.deterministic.enable_deterministic_inference = True
case("extend, deterministic", flow(PREFILLS), ROUND)
case("decode, deterministic", flow(DECODES), ROUND)
EXEC.deterministic.enable_deterministic_inference = False
case("decode in a CUDA graph's buffers", flow(DECODES, Mode.DECODE, graph=True), ROUND)
case("decode in a CUDA graph's buffers, pages of 16", flow(DECODES, Mode.DECODE, graph=True, page=16), ROUND)
case("MLA decode in a CUDA graph's buffers", flow(DECODES, Mode.DECODE, graph=True, mla=True, scale=192**-0.5), ROUND)
case("embeddings, without a cache", embeddings, ROUND)


def tiny_model(model):
    return Backend(
        4, model.num_layers, model.heads, model.kv_heads, model.dim, model.dtype, None, model.mla, model.windows, model.cap, model.scale, model.sinks,
    )  # fmt: skip


SPEC.speculative_eagle_topk = 0
for kind in tiny.KINDS:
    case(f"greedy tokens of a tiny {kind}", tiny.agree(kind, tiny_model), 1e-9)
finish()
