"""Recorded on small batches, warmed from the manifest, sealed: larger batches then compile nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import quire
from quire import jit
from quire.__main__ import main
from quire.cli import aot
from quire.engine import schedule
from quire.errors import ValidationError
from quire.jit import host_target, stores
from quire.jit.toolchain import Nvrtc, find_toolchain

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


@pytest.mark.slow
def test_a_server_that_was_recorded_on_small_batches_may_be_sealed(tmp_path):
    """Tile heights follow the lengths of a batch, and widths of operations the addresses of views."""
    manifest = tmp_path / "manifest.jsonl"
    serve("record", manifest, QUIRE_RECORD=str(manifest))
    assert any("attention" in json.loads(line)["slug"] for line in manifest.read_text().splitlines())
    assert serve("serve", manifest).strip() == "served"


def without_compilers(**environment: str) -> dict[str, str]:
    """The environment of a process that finds no nvcc, g++ or ninja."""
    return {"PATH": "", "QUIRE_NVCC": "/nowhere/nvcc", **environment}


@pytest.mark.slow
def test_a_machine_without_compilers_runs_what_was_prebuilt(tmp_path):
    """Recorded here, built into a package of prebuilt variants, served where PATH is empty; the cache stays empty."""
    manifest, package, cache = tmp_path / "manifest.jsonl", tmp_path / "site/quire_jit_cache", tmp_path / "cache"
    serve("record", manifest, QUIRE_RECORD=str(manifest))
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    warmup = ["warmup", "--manifest", str(manifest), "--cpu", host_target(), "--store", str(package / "store")]
    assert main(warmup) == 0
    path = os.pathsep.join([str(package.parent), str(Path(quire.__file__).parents[1])])
    nothing = without_compilers(PYTHONPATH=path, QUIRE_CACHE_DIR=str(cache))
    assert serve("serve", manifest, **nothing).strip() == "served"
    assert not cache.exists()


PREBUILT = """
import sys
from quire import aot, jit

print(jit.get_module(aot.spec_of(sys.argv[1])).entry.path)
"""


@pytest.mark.skipif(find_toolchain("sm90a") is None, reason="neither nvcc nor libnvrtc")
def test_a_prebuilt_cuda_variant_loads_without_compilers(tmp_path):
    slug, package = "append.sm90a.u16.v8", tmp_path / "site/quire_jit_cache"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    assert main(["warmup", "--exact", slug, "--store", str(package / "store")]) == 0
    path = os.pathsep.join([str(package.parent), str(Path(quire.__file__).parents[1])])
    environment = without_compilers(PYTHONPATH=path, QUIRE_CACHE_DIR=str(tmp_path / "cache"))
    done = subprocess.run(
        [sys.executable, "-c", PREBUILT, slug], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.stdout.startswith(str(package / "store" / "entries" / slug)), done.stderr
    assert not (tmp_path / "cache").exists()


ONLY_NVRTC = """
import sys
sys.modules["ninja"] = None
from quire import aot, jit

jit.prebuilt_stores = lambda: ()  # a package may have it
status, entry = jit.build(aot.spec_of("append.sm90a.u16.v8"))
assert jit.get_module(aot.spec_of("append.sm90a.u16.v8")).slug == entry.slug
print(status, entry.manifest.toolchain["toolchain"])
"""


@pytest.mark.skipif(Nvrtc.find() is None, reason="no libnvrtc: pip install nvidia-cuda-nvrtc")
def test_nvrtc_is_all_that_a_cuda_variant_needs(tmp_path):
    environment = without_compilers(QUIRE_TOOLCHAIN="nvrtc", QUIRE_CACHE_DIR=str(tmp_path / "cache"))
    done = subprocess.run(
        [sys.executable, "-c", ONLY_NVRTC], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.stdout.split() == ["built", "nvrtc"], done.stderr


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """An empty cache, and a process that has loaded nothing."""
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(jit, "_modules", {})
    monkeypatch.setattr(stores, "prebuilt_stores", lambda: ())
    schedule._scheduler.cache_clear()
    yield tmp_path / "cache"
    schedule._scheduler.cache_clear()


def masked_call() -> torch.Tensor:
    q, kv = torch.zeros(3, 2, 64), torch.zeros(5, 2, 64)
    return quire.single_prefill_with_kv_cache(q, kv, kv, custom_mask=torch.ones(3, 5, dtype=torch.bool))


def test_a_refusal_names_all_that_the_call_needs_and_its_line_works(empty, monkeypatch):
    monkeypatch.setenv("QUIRE_JIT", "deny")
    with pytest.raises(quire.CacheMissError) as raised:
        masked_call()
    text = str(raised.value)
    target = host_target()
    named = {line.split()[0] for line in text.splitlines() if "is not in the cache" in line}
    assert {slug.partition(".")[0] for slug in named} == {"attention_cpu", "schedule_attention", "packbits"}
    assert all(target in slug for slug in named)
    monkeypatch.delenv("QUIRE_JIT")
    line = text.rpartition("to do:")[2].split()
    assert line[0] == "quire"
    assert main(line[1:]) == 0
    monkeypatch.setenv("QUIRE_JIT", "deny")
    assert masked_call().shape == (3, 2, 64)


def test_a_warmup_that_keeps_nothing_fails(empty, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    slug = f"packbits.{host_target()}.any.v1"
    assert main(["warmup", "--store", str(tmp_path / "file/store"), slug]) != 0
    assert "cannot be written" in "".join(capsys.readouterr())
    empty.mkdir(mode=0o777)
    empty.chmod(0o777)
    with pytest.raises(
        quire.errors.CompileError, match=r"cannot be written: cache may be written by others \(mode 0777\)"
    ):
        quire.warmup([slug])


SOURCE = Path(quire.__file__).parent
TEXTS = [path.read_text() for path in (*SOURCE.rglob("*.py"), SOURCE.parents[1] / "README.md")]
COMMANDS = {found for text in TEXTS for found in re.findall(r"(?:`|to do:  |^)quire ([a-z-]+(?: [a-z]+)?)", text, re.M)}


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_commands_that_messages_name_exist(command, capsys):
    words = command.split() if command.startswith("cache ") else command.split()[:1]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0


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
    assert {"rope.x86-64-v4.bf16.v8", "rope_append.x86-64-v4.bf16.v1"} < slugs


def test_hosts_get_their_own_planner_and_cpu_variants():
    gpu = "attention_decode.sm90a.bf16-bf16-bf16.d128-128.paged.causal.m16"
    host = f"attention_cpu.{host_target()}.fp32-fp32-fp32.d64-64.ragged.none.m16"
    hosts = ("x86-64-v3", "x86-64-v4", "aarch64")
    found = aot.for_hosts([aot.spec_of(gpu), aot.spec_of(host)], hosts)
    assert sorted(spec.slug for spec in found) == sorted(
        [gpu]
        + [f"attention_cpu.{name}.fp32-fp32-fp32.d64-64.ragged.none.m16" for name in hosts]
        + [f"schedule_attention.{name}.any.v1" for name in hosts]
    )


def test_an_unknown_host_is_refused():
    with pytest.raises(ValidationError, match=r"--cpu: expected some of x86-64-v3(.|\n)*got 'z80'"):
        aot.for_hosts([], ["z80"])


def test_warmup_names_the_hosts_that_it_builds_for(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    options = ["--arch", "9.0a", "--backend", "decode", "--cpu", "x86-64-v3,aarch64", "--dry-run", "--json"]
    assert main(["warmup", *options]) == 0
    slugs = {variant["slug"] for variant in json.loads(capsys.readouterr().out)["variants"]}
    planners = {"schedule_attention.x86-64-v3.any.v1", "schedule_attention.aarch64.any.v1"}
    assert {slug for slug in slugs if ".sm90a." not in slug} == planners
    assert any(slug.startswith("attention_decode.sm90a.") for slug in slugs)
