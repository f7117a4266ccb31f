"""Attention over ranks as torch, diffusers, xDiT and FlashInfer call it, against the oracle."""

from __future__ import annotations

import enum
import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import oracle
import quire
from quire.compat import context_parallel as module
from quire.compat.context_parallel import context_parallel, context_parallel_unshard, register_diffusers, register_xdit
from quire.compat.flashinfer import parallel_attention as fi
from rank_processes import GROUPS, Processes, fixture_of_ranks, here

ranks = fixture_of_ranks(GROUPS)


def tokens(batch: int, length: int, heads: tuple[int, int] = (8, 8), seed: int = 3) -> list[torch.Tensor]:
    """q, k and v [batch, length, heads, 64], equal on all ranks, on the host."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float32 if here() == "cpu" else torch.bfloat16
    return [torch.randn(batch, length, n, 64, generator=generator).to(dtype) for n in (heads[0], heads[1], heads[1])]


def check(
    o: torch.Tensor, qkv: list[torch.Tensor], rows: Any, what: str, lse: torch.Tensor | None = None, **logits: Any
) -> None:
    """o [batch, rows, heads, 64] of some rows of each sequence."""
    q, k, v = (x.flatten(0, 1) for x in qkv)
    batch, ends = len(qkv[0]), [oracle.indptr_of([x.shape[1]] * len(x)) for x in qkv[:2]]
    ref, own = oracle.attention(q, k, v, *ends, **logits), oracle.torch_error(q, k, v, *ends, **logits)
    whole, torchs = (x.unflatten(0, (batch, -1))[:, rows].flatten(0, 1) for x in (ref.o, own))
    oracle.assert_close(o.flatten(0, 1), whole, torchs, what=what)
    if lse is not None:
        wanted = ref.lse.unflatten(0, (batch, -1))[:, rows].flatten(0, 1)
        oracle.assert_lse_close(lse.flatten(0, 1) / torch.log(torch.tensor(2.0)).item(), wanted, magnitude=60.0)


def kind() -> str:
    return "cpu" if here() == "cpu" else "cuda"


# --- torch -----------------------------------------------------------------------------------------------------------


def check_torch() -> None:
    size = dist.get_world_size()
    meshes = [init_device_mesh(kind(), (size,)), init_device_mesh(kind(), (size,), mesh_dim_names=("ulysses",)),
              init_device_mesh(kind(), (size // 2, 2), mesh_dim_names=("ring", "ulysses"))]  # fmt: skip
    theirs = functional.scaled_dot_product_attention
    for mesh in meshes:
        heads = (8, 2) if size == 2 else (8, 8)
        qkv = tokens(2, 75, heads)
        buffers = [x.transpose(1, 2).contiguous().to(here()) for x in qkv]
        positions, before = torch.arange(75, device=here()), [x.clone() for x in buffers]
        for causal in (False, True):
            with context_parallel(
                mesh, buffers=[*buffers, positions], buffer_seq_dims=[2, 2, 2, 0], no_restore_buffers=set()
            ):
                rows = positions.cpu().clone()
                o = functional.scaled_dot_product_attention(
                    *buffers, is_causal=causal, scale=0.2, enable_gqa=heads[0] != heads[1]
                )
                whole, ordered = context_parallel_unshard(mesh, [o, positions], [2, 0])
            check(o.transpose(1, 2), qkv, rows, f"{mesh}", causal=causal, sm_scale=0.2)
            check(whole.transpose(1, 2), qkv, slice(None), f"{mesh}, whole", causal=causal, sm_scale=0.2)
            assert torch.equal(ordered.cpu(), torch.arange(75)) and torch.equal(positions, ordered)
            assert all(torch.equal(x, y) for x, y in zip(buffers, before, strict=True)), "restored"
    assert functional.scaled_dot_product_attention is theirs
    base = torch.randn(2, 75, 4, 64)
    view, before = base.transpose(1, 2), base.clone()
    with context_parallel(meshes[0], buffers=[view, base], buffer_seq_dims=[2, 1]):
        assert torch.equal(view, base.transpose(1, 2)) and base.shape[1] < 75
    assert torch.equal(base, before) and view.stride() == before.transpose(1, 2).stride(), "views are restored"


def test_like_torch(ranks: Processes) -> None:
    ranks.run(check_torch)


def check_torch_variant() -> None:
    mesh, slopes = init_device_mesh(kind(), (dist.get_world_size(),)), quire.get_alibi_slopes(8)
    qkv = tokens(1, 61)
    buffers, positions = [x.transpose(1, 2).contiguous().to(here()) for x in qkv], torch.arange(61)
    with context_parallel(
        mesh, buffers=[*buffers, positions], buffer_seq_dims=[2, 2, 2, 0], no_restore_buffers={positions},
        variant=quire.variants.alibi, slopes=slopes.to(here()),
    ):  # fmt: skip
        o = functional.scaled_dot_product_attention(*buffers, is_causal=True)
    check(o.transpose(1, 2), qkv, positions, "alibi", causal=True, pos_encoding_mode="ALIBI")


def test_like_torch_with_a_variant(ranks: Processes) -> None:
    ranks.run(check_torch_variant)


def check_streams() -> None:
    """Layers share a plan, but for those on another stream: two runs of a plan must not overlap."""
    mesh, x = init_device_mesh("cpu", (dist.get_world_size(),)), torch.randn(1, 4, 12, 64)
    made = []
    for stream in (0, 0, 7, 0):
        with pytest.MonkeyPatch.context() as patched, context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
            patched.setattr(module, "current_stream", lambda _, stream=stream: stream)
            functional.scaled_dot_product_attention(x, x, x)
        made.append(module._planned.cache_info().misses)
    assert [after - made[0] for after in made] == [0, 0, 1, 1]


def test_each_stream_has_a_plan() -> None:
    processes = Processes(2)
    processes.run(check_streams)
    processes.close()


def check_torch_errors() -> None:
    mesh, x = init_device_mesh("cpu", (dist.get_world_size(),)), torch.randn(1, 4, 10, 64)
    inside = functional.scaled_dot_product_attention
    for arguments, text in (
        ({"buffers": [], "buffer_seq_dims": []}, "buffers: expected at least one"),
        ({"buffers": [x], "buffer_seq_dims": [2, 2]}, "buffers: expected at least one"),
        ({"buffers": [x, x], "buffer_seq_dims": [2, 1]}, "buffers: expected one length"),
        ({"buffers": [x], "buffer_seq_dims": [2], "no_restore_buffers": {x.clone()}}, "no_restore_buffers"),
    ):
        with pytest.raises(quire.ValidationError, match=text), context_parallel(mesh, **arguments):
            pass
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
        call = functional.scaled_dot_product_attention
        for arguments, text in (
            ({"attn_mask": torch.ones(1)}, "attn_mask"), ({"dropout_p": 0.1}, "dropout_p")
        ):  # fmt: skip
            with pytest.raises(quire.UnsupportedError, match=text):
                call(x, x, x, **arguments)
        for tensors, text in (((x, x[:, :, :1], x), "key: expected"), ((x, x[:, :2], x[:, :2]), "enable_gqa")):
            with pytest.raises(quire.ValidationError, match=text):
                call(*tensors)
    assert functional.scaled_dot_product_attention is inside and x.shape[2] == 10


def test_errors_of_torchs_name_what() -> None:
    processes = Processes(2)
    processes.run(check_torch_errors)
    processes.close()


# --- diffusers and xDiT ----------------------------------------------------------------------------------------------


def stand_in_of_diffusers() -> ModuleType:
    """diffusers.models.attention_dispatch, or where it is not installed its registry, with its names."""
    if importlib.util.find_spec("diffusers") is not None:
        return importlib.import_module("diffusers.models.attention_dispatch")
    module = ModuleType("diffusers.models.attention_dispatch")

    class AttentionBackendName(str, enum.Enum):
        NATIVE = "native"

    class Registry:
        backends: dict[Any, Any] = {}  # noqa: RUF012
        parallel: set[str] = set()  # noqa: RUF012

        @classmethod
        def register(cls, backend: Any, constraints: Any = None, supports_context_parallel: bool = False) -> Any:
            assert constraints is None and supports_context_parallel

            def decorator(function: Any) -> Any:
                cls.backends[backend] = function
                cls.parallel.add(backend.value)
                return function

            return decorator

    def dispatch_attention_fn(*args: Any, backend: str, parallel_config: Any = None, **kwargs: Any) -> Any:
        return Registry.backends[AttentionBackendName(backend)](*args, **kwargs, _parallel_config=parallel_config)

    module.AttentionBackendName, module._AttentionBackendRegistry = AttentionBackendName, Registry  # type: ignore[attr-defined]
    module.dispatch_attention_fn = dispatch_attention_fn  # type: ignore[attr-defined]
    for name in ("diffusers", "diffusers.models"):
        sys.modules[name] = ModuleType(name)
    sys.modules[module.__name__] = module
    return module


def config_of(ring: int, ulysses: int, any_lengths: bool) -> Any:
    """A ParallelConfig after setup()."""
    mesh = init_device_mesh(kind(), (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    return SimpleNamespace(
        context_parallel_config=SimpleNamespace(
            ring_degree=ring, ulysses_degree=ulysses, _ring_mesh=mesh["ring"], _ulysses_mesh=mesh["ulysses"],
            ring_anything=any_lengths and ulysses == 1, ulysses_anything=any_lengths and ring == 1,
        )
    )  # fmt: skip


def check_diffusers() -> None:
    dispatch = stand_in_of_diffusers()
    register_diffusers()
    register_diffusers()
    assert "quire" in {each.value for each in dispatch.AttentionBackendName.__members__.values()}
    rank, size = dist.get_rank(), dist.get_world_size()
    call = dispatch.dispatch_attention_fn
    whole = tokens(2, 40)
    check(call(*(x.to(here()) for x in whole), scale=0.3, backend="quire"), whole, slice(None), "alone", sm_scale=0.3)
    for ring, ulysses in ((size, 1), (1, size), (size // 2, 2)):
        for any_lengths in (False, True) if 1 in (ring, ulysses) else (False,):
            heads = 6 if any_lengths and ulysses > 1 else 8  # not divisible by 4 and 8
            qkv = tokens(2, 8 * size + 3 * any_lengths, (heads, heads))
            begin, end = 8 * rank, 8 * rank + 8 + (3 if any_lengths and rank == size - 1 else 0)
            own = (x[:, begin:end].to(here()) for x in qkv)
            o = call(*own, backend="quire", parallel_config=config_of(ring, ulysses, any_lengths))
            check(o, qkv, slice(begin, end), f"{ring} x {ulysses}, any lengths: {any_lengths}")
    with pytest.raises(quire.UnsupportedError, match="attn_mask"):
        call(*(x.to(here()) for x in whole), attn_mask=torch.ones(2, 40), backend="quire")


def test_in_diffusers(ranks: Processes) -> None:
    ranks.run(check_diffusers)


def test_in_xdit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function that its rings and Ulysses call: o and a natural lse, of all keys or of packed ones."""
    module, registry = ModuleType("xfuser.core.distributed.attention_backend"), {}
    module.AttentionBackendType = enum.Enum("AttentionBackendType", "SDPA FLASH_3")  # type: ignore[attr-defined]
    module.register_attention_function = lambda name: lambda function: registry.setdefault(name, function)  # type: ignore[attr-defined]
    for name in ("xfuser", "xfuser.core", "xfuser.core.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(quire.ValidationError, match="backend: expected one of SDPA, FLASH_3"):
        register_xdit("FLASH_9")
    register_xdit()
    (function,) = registry.values()
    q, k, v = torch.randn(3, 2, 30, 8, 64)
    tensors = [x.transpose(1, 2) for x in (q, k, v)]
    o, lse = function(*tensors, dropout_p=0.0, is_causal=False, attention_kwargs=None)
    ends = oracle.indptr_of([30, 30])
    ref = oracle.attention(*(x.flatten(0, 1) for x in (q, k, v)), ends, ends)
    torch.testing.assert_close(o.transpose(1, 2).flatten(0, 1).double(), ref.o, atol=1e-5, rtol=0)
    natural = ref.lse.unflatten(0, (2, 30)).transpose(1, 2) * torch.log(torch.tensor(2.0)).double()
    torch.testing.assert_close(lse.double(), natural, atol=1e-5, rtol=0)
    kept = torch.cat([torch.arange(20), 30 + torch.arange(7)])
    packed = {"indices_k": kept, "cu_seqlens_k": torch.tensor([0, 20, 27]).int(), "max_seqlen_k": 20}
    o, lse = function(*tensors, dropout_p=0.0, is_causal=False, attention_kwargs=packed)
    ref = oracle.attention(q.flatten(0, 1), k.flatten(0, 1)[kept], v.flatten(0, 1)[kept], ends, [0, 20, 27])
    torch.testing.assert_close(o.transpose(1, 2).flatten(0, 1).double(), ref.o, atol=1e-5, rtol=0)
    assert lse.shape == (2, 8, 30)
    with pytest.raises(quire.UnsupportedError, match="dropout_p"):
        function(*tensors, 0.5, False)


# --- FlashInfer ------------------------------------------------------------------------------------------------------

#: [heads, tokens, head_dim], as FlashInfer's tests have them, and how sequences are divided.
PACKED = [61, 64, 67, 30, 26]


def flashinfer_groups() -> list[tuple[int, int]]:
    size = dist.get_world_size()
    return [(size, 1), (1, size), (2, size // 2)]


def check_flashinfer() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for ulysses, ring in flashinfer_groups():
        ring_group, ulysses_group = fi.get_parallel_groups(ulysses, ring, device_type=kind())
        for attn_type, layout, fuse in (("flash-attn3", "HND", False), ("cutlass", "NHD", True)):
            for missing in (0, size - 1):
                qkv = tokens(1, 12 * size)
                part = slice(12 * rank, 12 * rank + 12)
                own = [x[0, part].to(here()) for x in qkv]
                qkv = [x[:, : 12 * size - missing] for x in qkv]
                uneven, real = None, 12 - (missing if rank == size - 1 else 0)
                if missing:
                    ring_lens = fi.uneven_cp_config(12 * size - missing, 12 * size, real, ulysses_group, ring_group)
                    assert (ring_lens is None) == (ring == 1)
                    assert ring_lens is None or int(ring_lens.sum()) == 12 * size - missing
                    uneven = fi.UnevenCPConfig(12 * size - missing, 12 * size, ring_lens)
                attention = fi.ParallelAttention(attn_type, ulysses_group, ring_group, uneven, fuse_qkv=fuse)
                for causal in (False, True):
                    tensors = own if layout == "NHD" else [x.transpose(0, 1) for x in own]
                    o = attention.run(*tensors, layout, is_causal=causal)
                    o = o if layout == "NHD" else o.transpose(0, 1)
                    assert o.shape == own[0].shape and not o[real:].any()
                    rows = slice(12 * rank, 12 * rank + real)
                    check(o[None, :real], qkv, rows, f"{ulysses} x {ring}, {missing} missing", causal=causal)


def test_flashinfers_parallel_attention(ranks: Processes) -> None:
    ranks.run(check_flashinfer)


def check_packed() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    qkv = [x[0] for x in tokens(1, sum(PACKED))]
    ends = oracle.indptr_of(PACKED)
    ref, own = oracle.attention(*qkv, ends, ends), oracle.torch_error(*qkv, ends, ends)
    # Ulysses: consecutive tokens of the whole, padded behind
    config = fi.VarlenCPConfig()
    _, group = fi.get_parallel_groups(size, 1, device_type=kind())
    config.set_varlen_cp_config(*fi.ulysses_varlen_config(PACKED, PACKED), group, None)
    for part in (-(-sum(PACKED) // size), 2 * sum(PACKED) // size):  # padded as little as can be, and more
        begin = part * rank
        whole = (functional.pad(x, (0, 0, 0, 0, 0, part * size - len(x))) for x in qkv)
        padded = [x[begin : begin + part].to(here()) for x in whole]
        o = fi.ParallelAttention("flash-attn3", group, None, None, config).run(*padded, "NHD")
        rows = slice(min(begin, sum(PACKED)), min(begin + part, sum(PACKED)))
        count = rows.stop - rows.start
        oracle.assert_close(o[:count], ref.o[rows], own[rows], what="ulysses")
        assert not o[count:].any()
    short = [x[: part // 4] for x in padded]
    with pytest.raises(quire.ValidationError, match="cu_seqlens_q_cur_ulysses_group: expected at most"):
        fi.ParallelAttention("flash-attn3", group, None, None, config).run(*short, "NHD")
    # a ring: a part of each sequence
    config = fi.VarlenCPConfig()
    group, _ = fi.get_parallel_groups(1, size, device_type=kind())
    config.set_varlen_cp_config(*fi.ring_varlen_config(PACKED, torch.tensor(PACKED), group), None, group)
    parts = [fi.split_varlen_input(x, PACKED, size, rank, "NHD").to(here()) for x in qkv]
    o = fi.ParallelAttention("flash-attn3", None, group, None, config).run(*parts, "NHD")
    count = int(config.cu_seqlens_q_cur_ring_group[rank, -1])
    wanted, torchs = (fi.split_varlen_input(x, PACKED, size, rank, "NHD")[:count] for x in (ref.o, own))
    oracle.assert_close(o[:count], wanted, torchs, what="ring")
    assert not o[count:].any()
    swapped = fi.split_varlen_input(qkv[0].transpose(0, 1), PACKED, size, rank)
    assert torch.equal(swapped.transpose(0, 1), parts[0].cpu())


def test_flashinfers_packed_sequences(ranks: Processes) -> None:
    ranks.run(check_packed)


def check_flashinfer_errors() -> None:
    ring, ulysses = fi.get_parallel_groups(1, 2, device_type="cpu")
    attention, x = fi.ParallelAttention("cutlass", ulysses, ring), torch.randn(4, 8, 64)
    for call, text in (
        (lambda: fi.ParallelAttention("sage", None, ring), "attn_type"),
        (lambda: attention.run(x, x, x, "DHN"), "tensor_layout"),
        (lambda: attention.run(x, x, x, "NHD", attn_mask=x), "attn_mask"),
        (lambda: attention.run(x, x, x, "NHD", return_lse=True), "return_lse"),
        (lambda: fi.get_parallel_groups(3, 1, "cpu"), "ulysses_size"),
        (lambda: fi.split_varlen_input(x, [4], 2, 0, "DHN"), "tensor_layout"),
        (lambda: fi.uneven_cp_config(9, 8, 4, None, ring), "seq_len"),
        (
            lambda: fi.ParallelAttention("cutlass", ulysses, ring, fi.UnevenCPConfig(9, 16)).run(x, x, x, "NHD"),
            "seq_len: expected at most 2 ranks",
        ),
        (lambda: fi.VarlenCPConfig().set_varlen_cp_config(x, x, 1, 1, ring, ring), "ring_group"),
    ):
        with pytest.raises(quire.QuireError, match=text):
            call()
    config = fi.UnevenCPConfig(3, 4)
    config.reset()
    assert config == fi.UnevenCPConfig()


def test_errors_of_flashinfers_name_what() -> None:
    processes = Processes(2)
    processes.run(check_flashinfer_errors)
    processes.close()
