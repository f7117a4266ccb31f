"""vLLM's backends of FlashAttention over Quire, on the CPU: python run_vllm_flash.py DIRECTORY-THAT-HOLDS-vllm

Each path is run by the backends QUIRE and QUIRE_MLA, and by vLLM's own FLASH_ATTN and FLASH_ATTN_MLA after
quire.compat.engines.install(). The functions of vLLM that are behind refuse every call.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import sys
from types import SimpleNamespace as NS

import tiny
import torch
from harness import Stubs, case, finish, reference

from quire.compat import engines

ROOT = sys.argv[1]
ATTENTION = f"{ROOT}/vllm/v1/attention"
HEADS, KV_HEADS, DIM, PAGE, PAGES = 8, 2, 128, 16, 64
REAL = (
    "backend", "backends.registry", "backends.fa_utils", "backends.flash_attn", "backends.mla.flashattn_mla", "backends.mla.prefill.base",
    "backends.mla.prefill.registry", "backends.mla.prefill.flash_attn",
)  # fmt: skip
real = {f"vllm.v1.attention.{name}": f"{ATTENTION}/{name.replace('.', '/')}.py" for name in REAL}
real["vllm.vllm_flash_attn.flash_attn_interface"] = f"{ROOT}/vllm/vllm_flash_attn/flash_attn_interface.py"


class Capability(tuple):
    major, minor = property(lambda self: self[0]), property(lambda self: self[1])

    def __new__(cls, major, minor):
        return super().__new__(cls, (major, minor))


class Generic:
    def __class_getitem__(cls, item):
        return cls


class MLABuilder(Generic):
    def __init__(self, spec, names, config, device, metadata, **ignored):
        self.kv_cache_spec, self.compilation_config, self.device = spec, config.compilation_config, device
        self.num_heads, self.dcp_world_size, self.page_size = HEADS, 1, PAGE
        self.mla_dims = NS(qk_rope_head_dim=64, kv_lora_rank=512)


class MLAImpl(Generic):
    dcp_world_size, dcp_rank, kv_lora_rank, qk_rope_head_dim = 1, 0, 512, 64
    need_to_return_lse_for_decode = True

    def __init__(self, num_heads, head_size, scale, num_kv_heads, slopes, window, kv_cache_dtype, *args, **ignored):
        self.scale, self.kv_cache_dtype = scale, kv_cache_dtype


@dataclasses.dataclass
class MLADecode:
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    dcp_tot_seq_lens: torch.Tensor | None


def write(key, value, key_cache, value_cache, slots, dtype, k_scale, v_scale):
    for new, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        if dtype.startswith("fp8"):
            new, cache = (new / scale).to(torch.float8_e4m3fn), cache.view(torch.float8_e4m3fn)
        cache[slots // PAGE, slots % PAGE] = new.to(cache.dtype)


CONFIG = NS(
    cache_config=NS(cache_dtype="auto"), kernel_config=NS(enable_jit_warmup=False), parallel_config=NS(cp_kv_cache_interleave_size=1, decode_context_parallel_size=1),
    model_config=NS(get_num_attention_heads=lambda p: HEADS, hf_config=NS(model_type="llama"), rswa_window=None, is_mm_prefix_lm=False, is_diffusion=False),
    attention_config=NS(flash_attn_max_num_splits_for_cuda_graph=32, flash_attn_version=None), scheduler_config=NS(max_num_seqs=8, max_num_batched_tokens=256),
    compilation_config=NS(cudagraph_mode=NS(has_full_cudagraphs=lambda: True), max_cudagraph_capture_size=8),
)  # fmt: skip
is_sm90 = NS(
    is_device_capability=lambda x: x in (90, (9, 0)), is_device_capability_family=lambda x: x == 90, has_device_capability=lambda x: x <= 90,
    fp8_dtype=lambda: torch.float8_e4m3fn, get_device_capability=lambda: Capability(9, 0), is_cuda=lambda: True, is_xpu=lambda: False,
    is_rocm=lambda: False, is_cpu=lambda: False,
)  # fmt: skip
ENVS = NS(VLLM_BATCH_INVARIANT=False)
QuantMode = enum.Enum("KVQuantMode", "NONE FP8_PER_TENSOR")
names = {
    "vllm": {"envs": ENVS},
    "vllm._custom_ops": {"reshape_and_cache_flash": write},
    "vllm.config": {"get_current_vllm_config_or_none": lambda: None, "get_layers_from_vllm_config": lambda *a: {}},
    "vllm.distributed.parallel_state": {"get_dcp_world_size_and_rank": lambda *a: (1, 0)},
    "vllm.logger": {"init_logger": lambda name: NS(**{n: lambda *a, **k: None for n in ("info_once", "warning_once", "debug", "info", "warning", "error")})},
    "vllm.model_executor.layers.attention.mla_attention": {
        "MLACommonBackend": None, "MLACommonMetadataBuilder": MLABuilder, "MLACommonImpl": MLAImpl, "MLACommonMetadata": Generic,
        "MLACommonDecodeMetadata": MLADecode, "QueryLenSupport": enum.Enum("QueryLenSupport", "VARLEN SINGLE_ONLY"),
    },
    "vllm.model_executor.warmup.jit_warmup": {"VllmJitKernel": Generic},
    "vllm.platforms": {"current_platform": is_sm90},
    "vllm.platforms.interface": {"DeviceCapability": Capability},
    "vllm.utils.import_utils": {"resolve_obj_by_qualname": lambda path: getattr(importlib.import_module(path.rpartition(".")[0]), path.rpartition(".")[2])},
    "vllm.utils.math_utils": {"cdiv": lambda a, b: -(-a // b), "round_up": lambda a, b: -(-a // b) * b},
    "vllm.utils.torch_utils": {"PIN_MEMORY": False, "canonicalize_singleton_dim_strides": lambda t: t},
    "vllm.v1.attention.backends.utils": {"get_num_attention_heads_from_layers": lambda *a: HEADS},
    "vllm.v1.kv_cache_interface": {"is_quantized_kv_cache": lambda d: str(d).startswith("fp8"), "KVQuantMode": QuantMode},
}  # fmt: skip
sys.meta_path.insert(0, Stubs({"vllm"}, real, names))


def theirs(*args, **kwargs):
    raise AssertionError("vLLM's own FlashAttention was called")


# vLLM's own functions take their C++ from torch.ops: none is there, and a call of one fails.
interface = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")
interface.is_fa_version_supported = lambda version: version in (2, 3)
vars(sys.modules["vllm.vllm_flash_attn"]).update(
    flash_attn_varlen_func=interface.flash_attn_varlen_func, get_scheduler_metadata=lambda batch_size, *a, **k: torch.zeros(1, dtype=torch.int32),
    compile_flash_attn_varlen_func_from_specs=theirs,
)  # fmt: skip
backend_module = importlib.import_module("vllm.v1.attention.backend")
names["vllm.model_executor.layers.attention.mla_attention"]["MLACommonBackend"] = type(
    "MLACommonBackend", (backend_module.AttentionBackend,), {"is_mla": classmethod(lambda cls: True)}
)
engines.install()
engines.vllm_plugin()
registry = importlib.import_module("vllm.v1.attention.backends.registry").AttentionBackendEnum


class Attention:
    """One layer or more of a backend, its pages, and its metadata of each batch."""

    def __init__(self, name, heads=HEADS, kv_heads=KV_HEADS, dim=DIM, layers=1, dtype=torch.bfloat16, kv="auto", scale=None, windows=(None,), cap=None, sinks=(None,), kind="DECODER", slopes=None):  # fmt: skip
        self.backend = registry[name].get_class()
        self.dtype, self.kv, self.scale = dtype, kv, scale or dim**-0.5
        CONFIG.cache_config.cache_dtype = kv
        spec = NS(
            num_kv_heads=kv_heads, dtype=dtype, head_size=dim, head_size_v=dim, block_size=PAGE, dcp_sharded=False,
            kv_quant_mode=QuantMode.NONE if kv == "auto" else QuantMode.FP8_PER_TENSOR,
        )  # fmt: skip
        self.builder = self.backend.get_builder_cls()(spec, ["0"], CONFIG, torch.device("cpu"))
        type_ = getattr(backend_module.AttentionType, kind)
        self.impls = [
            self.backend.get_impl_cls()(
                heads, dim, self.scale, kv_heads, slopes, windows[i % len(windows)], kv, cap, type_, None, sinks[i % len(sinks)]
            )
            for i in range(layers)
        ]  # fmt: skip
        stored = dtype if kv == "auto" else torch.uint8
        self.pages = [torch.zeros(PAGES, kv_heads, PAGE, 2 * dim, dtype=dtype).to(stored) for _ in range(layers)]
        self.table = torch.randperm(PAGES).view(8, -1).to(torch.int32)
        one = torch.tensor(1.0)
        self.layer = NS(_q_scale=one, _k_scale=0.5 * one, _v_scale=2 * one) if kv != "auto" else NS(_q_scale=one, _k_scale=one, _v_scale=one)  # fmt: skip

    def begin(self, batch, causal=True):
        """batch: for each request its row of the table, its tokens so far, and those of this step."""
        new, last = [n for *_, n in batch], [first + n for _, first, n in batch]
        table = self.table[[row for row, *_ in batch]]
        at = torch.cat([torch.arange(m - n, m) for m, n in zip(last, new)])
        row = torch.repeat_interleave(torch.arange(len(new)), torch.tensor(new))
        start = torch.tensor([0, *new]).cumsum(0).to(torch.int32)
        lens = torch.tensor(last, dtype=torch.int32)
        common = NS(
            num_reqs=len(new), num_actual_tokens=sum(new), causal=causal, max_seq_len=max(last), max_query_len=max(new), seq_lens=lens, block_table_tensor=table,
            query_start_loc=start, query_start_loc_cpu=start, slot_mapping=table[row, at // PAGE].long() * PAGE + at % PAGE, seq_lens_cpu_upper_bound=lens,
            mm_req_doc_ranges=None, rswa_prefix_lens=None,
        )  # fmt: skip
        self.metadata = self.builder.build(0, common)

    def attend(self, layer, q, k, v):
        """A layer's update of the cache, and its attention."""
        impl, pages, out = self.impls[layer], self.pages[layer], torch.full_like(q, torch.nan)
        if impl.attn_type in (backend_module.AttentionType.DECODER,):
            impl.do_kv_cache_update(self.layer, k, v, pages, self.metadata.slot_mapping)
        return impl.forward(self.layer, q, k, v, pages, self.metadata, out)

    def keys(self, layer, row, m):
        """What the cache holds of a request."""
        pages = self.pages[layer]
        pages = pages.view(torch.float8_e4m3fn) if self.kv != "auto" else pages
        both = pages[self.table[row].long()].float().transpose(1, 2).flatten(0, 1)[:m]
        k, v = both.tensor_split(2, -1)
        return k * self.layer._k_scale, v * self.layer._v_scale


def flow(name, batch, causal=True, **options):
    """A step of a batch (requests of n tokens, of which the last are new), after one that fills the cache."""

    def function():
        torch.manual_seed(0)
        a = Attention(name, **options)
        draw = lambda n, h: torch.randn(n, h, DIM, dtype=a.dtype)  # noqa: E731
        filled = [(i, 0, n - new) for i, (n, new) in enumerate(batch) if n > new]
        if filled:
            a.begin(filled)
            total = sum(n for *_, n in filled)
            a.attend(0, draw(total, HEADS), draw(total, KV_HEADS), draw(total, KV_HEADS))
        a.begin([(i, n - new, new) for i, (n, new) in enumerate(batch)], causal)
        total = sum(new for _, new in batch)
        q, k, v = draw(total, HEADS), draw(total, KV_HEADS), draw(total, KV_HEADS)
        out, want, at = a.attend(0, q, k, v), [], 0
        window = (options.get("windows") or (None,))[0]
        for i, (n, new) in enumerate(batch):
            is_encoder = options.get("kind") == "ENCODER_ONLY"
            keys = (k[at : at + new], v[at : at + new]) if is_encoder else a.keys(0, i, n)
            want.append(reference(q[at : at + new], *keys, a.scale, causal and not is_encoder, -1 if window is None else window - 1, options.get("cap") or 0.0, (options.get("sinks") or (None,))[0]))  # fmt: skip
            at += new
        return out, torch.cat(want)

    return function


class MLA:
    """Layers over latents."""

    def __init__(self, name, heads=HEADS, layers=1, dtype=torch.bfloat16, scale=192**-0.5):
        backend = registry[name].get_class()
        spec = NS(dtype=dtype)
        self.builder = backend.get_builder_cls()(spec, ["0"], CONFIG, torch.device("cpu"))
        kind = backend_module.AttentionType.DECODER
        self.impls = [
            backend.get_impl_cls()(heads, 576, scale, 1, None, None, "auto", None, kind, None) for _ in range(layers)
        ]
        self.pages = [torch.zeros(PAGES, PAGE, 576, dtype=dtype) for _ in range(layers)]
        self.table = torch.randperm(PAGES).view(8, -1).to(torch.int32)

    def begin(self, batch):
        """As Attention.begin()."""
        new, last = [n for *_, n in batch], [first + n for _, first, n in batch]
        table = self.table[[row for row, *_ in batch]]
        at = torch.cat([torch.arange(m - n, m) for m, n in zip(last, new)])
        row = torch.repeat_interleave(torch.arange(len(new)), torch.tensor(new))
        start = torch.tensor([0, *new]).cumsum(0).to(torch.int32)
        self.slots = table[row, at // PAGE].long(), at % PAGE
        lens = torch.tensor(last, dtype=torch.int32)
        decode = self.builder._build_decode(table, lens, max(last), start, start, sum(new), max(new), None)
        self.metadata = NS(decode=decode)

    def attend(self, layer, q, k, v):
        """A layer's rows, and its attention."""
        self.pages[layer][self.slots] = k[:, 0]
        parts = torch.split(q, [512, 64], dim=-1)
        out, lse = self.impls[layer].forward_mqa(parts if layer else q, self.pages[layer], self.metadata, None)
        assert lse.shape == q.shape[:2]
        return out


def latents(name, batch):
    def function():
        torch.manual_seed(0)
        a = MLA(name)
        total = sum(n for _, n in batch)
        for pages in a.pages:
            pages.copy_(torch.randn(pages.shape))
        a.begin([(i, n - new, new) for i, (n, new) in enumerate(batch)])
        q, k = torch.randn(total, HEADS, 576, dtype=torch.bfloat16), torch.randn(total, 1, 576, dtype=torch.bfloat16)
        out, want, at = a.attend(0, q, k, None), [], 0
        for i, (n, m) in enumerate(batch):
            rows = a.pages[0][a.table[i].long()].flatten(0, 1)[:n, None]
            want.append(reference(q[at : at + m], rows, rows[..., :512], 192**-0.5))
            at += m
        return out, torch.cat(want)

    return function


def prefill(causal):
    """DeepSeek's prefill: keys of 192 dims, values of 128."""

    def function():
        cls = importlib.import_module("quire.compat.engines.vllm").QuireMLAPrefillBackend
        backend = cls(num_heads=HEADS, scale=192**-0.5, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, vllm_config=CONFIG)  # fmt: skip
        lens, context = [7, 20], [33, 40]
        start, of_context = (torch.tensor([0, *x]).cumsum(0).to(torch.int32) for x in (lens, context))
        backend._prefill_metadata = NS(query_start_loc=start, max_query_len=max(lens))
        q = torch.randn(sum(lens), HEADS, 192, dtype=torch.bfloat16)
        n = sum(lens) if causal else sum(context)
        k, v = (
            torch.randn(n, HEADS, 192, dtype=torch.bfloat16),
            torch.randn(n, HEADS, 256, dtype=torch.bfloat16)[..., :128],
        )
        if causal:
            out, lse = backend.run_prefill_new_tokens(
                q, k, v, True, out=torch.empty(sum(lens), HEADS, 128, dtype=q.dtype)
            )
        else:
            chunk = NS(query_start_loc=start, cu_seq_lens=of_context, max_query_len=max(lens), max_seq_len=max(context))
            out, lse = backend.run_prefill_context_chunk(chunk, q, k, v)
        ends = start if causal else of_context
        want = [
            reference(q[start[i] : start[i + 1]], k[ends[i] : ends[i + 1]], v[ends[i] : ends[i + 1]], 192**-0.5, causal)
            for i in range(2)
        ]
        assert lse.shape == (HEADS, sum(lens))
        return out, torch.cat(want)

    return function


def validated(name, expected=(), **more):
    """What vLLM asks before it takes a backend."""

    def function():
        asked = dict(
            head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=16, use_mla=False, has_sink=False, use_sparse=False, use_mm_prefix=False,
            use_per_head_quant_scales=False, device_capability=Capability(9, 0), attn_type="decoder", has_sliding_window=False, use_non_causal=False, use_batch_invariant=False,
            use_kv_connector=False, use_pcp=False, use_adaptive_verification=False, use_dcp=False, use_rswa=False,
        ) | more  # fmt: skip
        reasons = registry[name].get_class().validate_configuration(**asked)
        assert list(reasons) == list(expected), reasons
        return torch.ones(1), torch.ones(1)

    return function


ROUND = 1e-2
DECODES, PREFILLS, MIXED, VERIFY = [(17, 1), (1, 1), (64, 1)], [(17, 9), (40, 40), (64, 32)], [(17, 1), (40, 1), (64, 32)], [(20, 4), (36, 4), (64, 4)]  # fmt: skip
SINKS = (torch.randn(HEADS),)
case("QUIRE is taken", validated("QUIRE"))
case("QUIRE is taken: gpt-oss with a cache of 8 bits", validated("QUIRE", has_sink=True, has_sliding_window=True, head_size=64, kv_cache_dtype="fp8_e5m2"))  # fmt: skip
case("QUIRE is taken: batch invariance, bidirectional, Ampere", validated("QUIRE", use_batch_invariant=True, use_non_causal=True, device_capability=Capability(8, 0)))  # fmt: skip
for name in ("QUIRE", "FLASH_ATTN"):
    case(f"{name}: decode", flow(name, DECODES), ROUND)
    case(f"{name}: prefill, chunked", flow(name, PREFILLS), ROUND)
    case(f"{name}: decodes and a prefill", flow(name, MIXED), ROUND)
    case(f"{name}: verify 4 tokens", flow(name, VERIFY), ROUND)
    case(f"{name}: window 16, soft cap 30, scale 0.1", flow(name, MIXED, windows=(16,), cap=30.0, scale=0.1), ROUND)
    case(f"{name}: window 16 and sinks (gpt-oss)", flow(name, MIXED, windows=(16,), sinks=SINKS), ROUND)
    case(f"{name}: not causal", flow(name, PREFILLS, causal=False), ROUND)
    case(f"{name}: e4m3 cache with scales", flow(name, MIXED, kv="fp8"), 2e-2 if name == "QUIRE" else 5e-2)
    case(f"{name}: encoder", flow(name, [(9, 9), (40, 40)], kind="ENCODER_ONLY"), ROUND)
    ENVS.VLLM_BATCH_INVARIANT = True
    case(f"{name}: batch invariant", flow(name, MIXED), ROUND)
    ENVS.VLLM_BATCH_INVARIANT = False
for name in ("QUIRE_MLA", "FLASH_ATTN_MLA"):
    case(f"{name}: decode", latents(name, DECODES), ROUND)
    case(f"{name}: decodes and short prefills", latents(name, MIXED), ROUND)
    case(f"{name}: verify 4 tokens", latents(name, VERIFY), ROUND)
case("QUIRE: DeepSeek's prefill of new tokens", prefill(True), ROUND)
case("QUIRE: DeepSeek's prefill of a chunk of context", prefill(False), ROUND)


def tiny_model(name):
    def make(model):
        if model.mla:
            return MLA(f"{name}_MLA", model.heads, model.num_layers, model.dtype, model.scale)
        windows = tuple(None if window < 0 else window + 1 for window in model.windows)
        return Attention(name, model.heads, model.kv_heads, model.dim, model.num_layers, model.dtype, "auto", model.scale, windows, model.cap or None, model.sinks)  # fmt: skip

    return make


for kind in tiny.KINDS:
    for name in ("QUIRE", "FLASH_ATTN"):
        case(f"{name}: greedy tokens of a tiny {kind}", tiny.agree(kind, tiny_model(name)), 1e-9)
finish()
