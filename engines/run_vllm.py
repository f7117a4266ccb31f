"""vLLM's own FlashInfer backend over Quire, on the CPU: python run_vllm.py DIRECTORY-THAT-HOLDS-vllm"""

from __future__ import annotations

import enum
import sys
from types import SimpleNamespace as NS

import torch
from harness import Stubs, case, finish, reference

ROOT = sys.argv[1]
FILE = f"{ROOT}/vllm/v1/attention/backends/flashinfer.py"
HEADS, KV_HEADS, DIM, PAGE, PAGES = 8, 2, 128, 16, 64
SETTINGS = NS(xqa=True, invariant=False, graphs=False)


class Builder:
    def __class_getitem__(cls, item):
        return cls

    def __init__(self, spec, names, config, device):
        self.kv_cache_spec, self.layer_names, self.vllm_config, self.device = spec, names, config, device

    def _init_reorder_batch_threshold(self, threshold, **ignored):
        self.reorder_batch_threshold = threshold


class Impl:
    dcp_world_size, need_to_return_lse_for_decode = 1, False


class CpuGpuBuffer:
    def __init__(self, size, dtype, device, pin_memory=False):
        self.cpu, self.gpu = torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype)
        self.np = self.cpu.numpy()

    def copy_to_gpu(self, n):
        return self.gpu[:n].copy_(self.cpu[:n])


class Copy:  # in place of the Triton kernel
    def __getitem__(self, grid):
        def copy(out, table, stride, indptr, BLOCK_SIZE):
            for i in range(grid[0]):
                n = int(indptr[i + 1] - indptr[i])
                out[int(indptr[i]) : int(indptr[i + 1])] = table[i, :n]

        return copy


def xqa(*args, **kwargs):
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    return xqa_batch_decode_with_kv_cache(*args, **kwargs)


CGMode = enum.Enum("CUDAGraphMode", "NONE FULL")
CGMode.decode_mode = lambda self: self
QuantMode = enum.Enum("KVQuantMode", "NONE FP8")
Type = enum.Enum("AttentionType", "DECODER ENCODER")
is_sm90 = NS(
    is_device_capability=lambda x: x == 90, is_device_capability_family=lambda x: x == 90, has_device_capability=lambda x: x <= 90,
    fp8_dtype=lambda: torch.float8_e4m3fn, get_device_capability=lambda: NS(major=9, minor=0), is_cuda=lambda: True,
)  # fmt: skip
names = {
    "vllm": {"envs": NS(VLLM_BATCH_INVARIANT=False, VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE=64 << 20)},
    "vllm.config": {"CUDAGraphMode": CGMode, "get_current_vllm_config_or_none": lambda: None},
    "vllm.distributed.parallel_state": {"get_dcp_world_size_and_rank": lambda *a: (1, 0)},
    "vllm.logger": {"init_logger": lambda name: NS(**{n: lambda *a, **k: None for n in ("info_once", "warning_once", "debug", "info")})},
    "vllm.platforms": {"current_platform": is_sm90},
    "vllm.triton_utils": {"triton": NS(jit=lambda f: Copy()), "tl": NS(constexpr=int)},
    "vllm.utils.flashinfer": {
        "can_use_trtllm_attention": lambda *a, is_prefill=False, **k: SETTINGS.xqa and not is_prefill, "use_trtllm_attention": lambda *a, **k: False,
        "supports_trtllm_attention": lambda is_prefill=False: SETTINGS.xqa and not is_prefill, "force_use_trtllm_attention": lambda: None,
        "pin_host_range_buf": lambda n: None, "flashinfer_xqa_batch_decode_with_kv_cache": xqa,
    },
    "vllm.utils.math_utils": {"cdiv": lambda a, b: -(-a // b), "round_up": lambda a, b: -(-a // b) * b},
    "vllm.utils.torch_utils": {"PIN_MEMORY": False, "canonicalize_singleton_dim_strides": lambda t: t, "is_strictly_contiguous": lambda t: True},
    "vllm.v1.attention.backend": {"AttentionMetadataBuilder": Builder, "AttentionImpl": Impl, "AttentionType": Type},
    "vllm.v1.attention.backends.utils": {
        "get_flashinfer_layout_string": lambda layout: layout.name, "get_num_attention_heads_from_layers": lambda *a: HEADS, "get_per_layer_parameters": lambda *a: None,
        "infer_global_hyperparameters": lambda p: NS(**SETTINGS.hyper, has_same_window_lefts=True, has_same_all_params=True),
        "split_decodes_and_prefills": lambda common, **k: common.split,
    },
    "vllm.v1.kv_cache_interface": {"KVQuantMode": QuantMode, "is_quantized_kv_cache": lambda d: str(d).startswith("fp8")},
    "vllm.v1.utils": {"CpuGpuBuffer": CpuGpuBuffer},
}  # fmt: skip
sys.meta_path.insert(0, Stubs({"vllm"}, {"vllm.v1.attention.backends.flashinfer": FILE}, names))


def flow(
    lens,
    new,
    layout="HND",
    window=None,
    cap=None,
    scale=DIM**-0.5,
    dtype=torch.bfloat16,
    kv="auto",
    xqa=True,
    sinks=False,
    graphs=False,
    invariant=False,
):
    """Requests of `lens` tokens of which the last `new` are new; those with one new token first."""

    def function():
        import vllm.v1.attention.backends.flashinfer as backend

        torch.manual_seed(0)
        names["vllm"]["envs"].VLLM_BATCH_INVARIANT = invariant
        SETTINGS.xqa = xqa and not invariant
        SETTINGS.hyper = {
            "sm_scale": scale,
            "window_left": -1 if window is None else window - 1,
            "logits_soft_cap": cap,
            "has_sinks": sinks,
        }
        order = (0, 1, 2, 3) if layout == "HND" else (0, 2, 1, 3)
        config = NS(
            cache_config=NS(cache_dtype=kv, get_resolved_kv_cache_layout=lambda: NS(name=layout, layer_view_order=order)),
            model_config=NS(max_model_len=128, dtype=dtype, get_num_attention_heads=lambda p: HEADS),
            attention_config=NS(use_trtllm_attention=None, disable_flashinfer_q_quantization=True, use_non_causal=False),
            num_speculative_tokens=0, compilation_config=NS(cudagraph_mode=CGMode.FULL if graphs else CGMode.NONE, max_cudagraph_capture_size=8),
            scheduler_config=NS(max_num_batched_tokens=256, max_num_seqs=8), speculative_config=None,
            parallel_config=NS(cp_kv_cache_interleave_size=1, decode_context_parallel_size=1, dcp_comm_backend=""),
        )  # fmt: skip
        quant = QuantMode.NONE if kv == "auto" else QuantMode.FP8
        spec = NS(
            block_size=PAGE, dcp_sharded=False, num_kv_heads=KV_HEADS, head_size=DIM, kv_quant_mode=quant, dtype=dtype
        )
        backend.FlashInferBackend.supports_sink = classmethod(lambda cls: True)
        builder = backend.FlashInferMetadataBuilder(spec, ["0"], config, torch.device("cpu"))
        impl = backend.FlashInferImpl(
            HEADS,
            DIM,
            scale,
            KV_HEADS,
            None,
            window,
            kv,
            cap,
            Type.DECODER,
            None,
            torch.randn(HEADS) if sinks else None,
        )
        decodes = [n for n in new if n == 1]
        prefills = [n for n in new if n != 1]
        physical = torch.randn(PAGES, *((KV_HEADS, PAGE) if layout == "HND" else (PAGE, KV_HEADS)), 2 * DIM).to(dtype)
        cache = physical if layout == "HND" else physical.permute(0, 2, 1, 3)
        if kv != "auto":
            cache = cache.to(torch.float8_e4m3fn)
        table = torch.randperm(PAGES)[: len(lens) * 8].view(len(lens), 8).to(torch.int32)
        for extra in (0, 3) if graphs else (0,):
            last = [n + extra for n in lens]
            start = torch.tensor([0, *new], dtype=torch.int32).cumsum(0).to(torch.int32)
            common = NS(
                num_reqs=len(lens), num_actual_tokens=sum(new), causal=True, max_seq_len=max(last), seq_lens=torch.tensor(last, dtype=torch.int32),
                block_table_tensor=table, query_start_loc=start, query_start_loc_cpu=start, slot_mapping=None, max_query_len=max(new),
                seq_lens_cpu_upper_bound=torch.tensor(last, dtype=torch.int32), split=(len(decodes), len(prefills), sum(decodes), sum(prefills)),
            )  # fmt: skip
            metadata = builder.build(0, common)
            q = torch.randn(sum(new), HEADS, DIM, dtype=dtype)
            layer = NS(
                _q_scale=None,
                _q_scale_float=1.0,
                _k_scale_float=1.0,
                _v_scale_float=1.0,
                _o_scale_float=None,
                _k_scale=None,
                _v_scale=None,
            )
            out = torch.zeros(sum(new), HEADS, DIM, dtype=dtype)
            out = impl.forward(layer, q, None, None, cache, metadata, out)
        want, at = [], 0
        for i, (m, n) in enumerate(zip(last, new)):
            both = cache[table[i].long()].to(torch.float32).permute(0, 2, 1, 3).reshape(-1, KV_HEADS, 2 * DIM)[:m]
            want.append(
                reference(
                    q[at : at + n],
                    both[..., :DIM],
                    both[..., DIM:],
                    scale,
                    True,
                    SETTINGS.hyper["window_left"],
                    cap or 0.0,
                    impl.sinks,
                )
            )
            at += n
        return out, torch.cat(want)

    return function


ROUND = 1e-2
case(
    "import of the backend",
    lambda: __import__("vllm.v1.attention.backends.flashinfer") and (torch.ones(1), torch.ones(1)),
)
for layout in ("HND", "NHD"):
    case(f"prefill, {layout}", flow([17, 40, 64], [9, 40, 32], layout), ROUND)
    case(f"decode by XQA (Hopper's default), {layout}", flow([17, 1, 64], [1, 1, 1], layout), ROUND)
    case(f"decode by the wrapper, {layout}", flow([17, 1, 64], [1, 1, 1], layout, xqa=False), ROUND)
case("decodes and prefills in one batch", flow([17, 40, 64], [1, 1, 32], xqa=False), ROUND)
case(
    "prefill, window 16, soft cap 30, scale 0.1", flow([17, 40, 64], [9, 40, 32], window=16, cap=30.0, scale=0.1), ROUND
)
case(
    "decode by the wrapper, window 16, soft cap 30",
    flow([17, 40, 64], [1, 1, 1], window=16, cap=30.0, xqa=False),
    ROUND,
)
case("prefill, sinks (gpt-oss)", flow([17, 40, 64], [9, 40, 32], sinks=True), ROUND)
case("decode by XQA, sinks (gpt-oss)", flow([17, 40, 64], [1, 1, 1], sinks=True), ROUND)
case("prefill, e4m3 cache", flow([17, 40, 64], [9, 40, 32], kv="fp8"), ROUND)
case("decode by XQA, e4m3 cache", flow([17, 40, 64], [1, 1, 1], kv="fp8"), ROUND)
case("decode in a CUDA graph's wrappers, planned twice", flow([17, 1, 64], [1, 1, 1], xqa=False, graphs=True), ROUND)
case("batch invariant: prefill", flow([17, 40, 64], [9, 40, 32], invariant=True), ROUND)
case("batch invariant: decode", flow([17, 40, 64], [1, 1, 1], invariant=True), ROUND)
finish()
