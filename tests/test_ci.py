"""The scripts around the library: the lint of cubins, and the list of variants that are prebuilt."""

from __future__ import annotations

import importlib.util
import json
import platform
import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from durations import table
from quire.cli import aot
from quire.jit import Store, host_target
from quire.jit.toolchain import find_toolchain

ROOT = Path(__file__).resolve().parent.parent
CLEAN = {
    "slug": "merge.sm90a.fp16.v8", "target": "sm90a", "artifact": "variant.cubin",
    "registers": 56, "spills": 0, "warnings": [],
}  # fmt: skip


def script(path: str) -> ModuleType:
    """A script of the repository as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def store_with(root: Path, **changes: object) -> Path:
    """A store with one entry whose manifest is CLEAN but for `changes`."""
    entry = root / "entries" / "slug" / "digest"
    entry.mkdir(parents=True)
    (entry / "manifest.json").write_text(json.dumps({**CLEAN, **changes}))
    return root


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"spills": 16, "registers": 255}, "16 bytes of registers spill (255 registers)"),
        ({"spills": None}, "does not say whether registers spill"),
        ({"warnings": ["ptxas info : (C7510) Potential Performance Loss: wgmma serialized"]}, "lost performance"),
        ({"warnings": ["variant.cu(3): warning #177-D: declared but never referenced"]}, "warning: variant.cu(3)"),
    ],
)
def test_lint_names_each_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict, fault: str) -> None:
    assert script(".ci/lint_cubins.py").main(store_with(tmp_path, **changes)) == 1
    assert fault in capsys.readouterr().err


def test_lint_finds_names_that_differ_in_each_build(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = store_with(tmp_path)
    (store / "entries" / "slug" / "digest" / "variant.cubin").write_bytes(
        b"\0_ZN41_INTERNAL_e4480ce5_10_variant_cu_x\0"
    )
    assert script(".ci/lint_cubins.py").main(store) == 1
    assert "differs from build to build" in capsys.readouterr().err


def test_lint_passes_clean_code_and_looks_at_cubins_only(tmp_path: Path) -> None:
    assert script(".ci/lint_cubins.py").main(store_with(tmp_path / "a")) == 0
    assert script(".ci/lint_cubins.py").main(store_with(tmp_path / "b", target="x86-64-v3", spills=None)) == 1, "empty"


def test_lint_fails_in_ci_without_a_disassembler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lint = script(".ci/lint_cubins.py")
    monkeypatch.setattr(lint, "find_cuobjdump", lambda: None)
    monkeypatch.setenv("CI", "true")
    assert lint.main(store_with(tmp_path / "a")) == 1
    monkeypatch.delenv("CI")
    assert lint.main(store_with(tmp_path / "b")) == 0


LISTING = """
        /*6d90*/   HMMA.16816.F32.BF16 R132, R4.reuse, R128, RZ ;   /* 0x000000800484723c */
                                                                    /* 0x062fe600000418ff */
        /*6da0*/   MOV R1, 0x23c ;                                  /* 0x0000000400017c02 */
"""


def test_opcodes_are_learnt_from_a_listing() -> None:
    lint = script(".ci/lint_cubins.py")
    assert lint.opcodes_of(lint.TENSOR_CORE["attention_fa2"], LISTING) == {b"\x3c\x02"}
    assert lint.opcodes_of(lint.TENSOR_CORE["attention_fa3"], LISTING) == set()


def test_one_cubin_of_a_family_is_disassembled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And each one that lacks what the family must have."""
    lint = script(".ci/lint_cubins.py")
    cuobjdump = lint.find_cuobjdump()
    if cuobjdump is None or find_toolchain("sm80") is None:
        pytest.skip("needs a compiler for CUDA and a disassembler")
    specs = [aot.spec_of(f"merge.sm80.{dtype}.v8") for dtype in ("bf16", "fp16")]
    assert {built.status for built in aot.warm(specs, store=Store(tmp_path))} == {"built"}
    monkeypatch.setitem(lint.TENSOR_CORE, "merge", re.compile(r"\bFFMA\b"))
    instructions = lint.Instructions(cuobjdump)
    assert [instructions.missing(*found) for found in lint.manifests(tmp_path)] == [None, None]
    assert instructions.disassembled == 1
    monkeypatch.setitem(lint.TENSOR_CORE, "merge", re.compile(r"\bHMMA\."))
    instructions = lint.Instructions(cuobjdump)
    assert [instructions.missing(*found) for found in lint.manifests(tmp_path)] == ["no HMMA in its machine code"] * 2
    assert instructions.disassembled == 2


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="variants.toml has no host variants for it")
def test_prebuilt_variants_are_ones_that_warmup_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    slugs = script("jit_cache/prebuild.py").wanted_slugs()
    assert len(slugs) == len({*slugs}) > 500 and all(aot.spec_of(slug).slug == slug for slug in slugs[::20])
    assert not list(tmp_path.iterdir())


def test_every_preset_is_prebuilt() -> None:
    words = {word for call in script("jit_cache/prebuild.py").calls() for text in call for word in text.split(",")}
    assert set(aot.PRESETS) <= words


def test_other_hosts_are_prebuilt_where_there_is_a_cross_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    prebuild = script("jit_cache/prebuild.py")

    def hosts() -> set[str]:
        return {call[i + 1] for call in prebuild.calls() for i, word in enumerate(call) if word == "--cpu"}

    monkeypatch.setattr(prebuild.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(prebuild.shutil, "which", lambda _: None)
    assert hosts() == {"x86-64-v3,x86-64-v4"}
    monkeypatch.setattr(prebuild.shutil, "which", lambda name: name)
    assert hosts() == {"x86-64-v3,x86-64-v4", "aarch64"}


def test_what_is_packed_does_not_depend_on_when_it_was_compiled(tmp_path: Path) -> None:
    prebuild, spec = script("jit_cache/prebuild.py"), aot.spec_of(f"packbits.{host_target()}.any.v1")
    packed = []
    for name in ("one", "two"):
        (built,) = aot.warm([spec], store=Store(tmp_path / name))
        assert built.status == "built"
        prebuild.settle(Path(built.path))
        packed.append({file.name: file.read_bytes() for file in Path(built.path).iterdir()})
        assert [built.status for built in aot.warm([spec], store=Store(tmp_path / name))] == ["hit"]
    assert packed[0] == packed[1]
    assert sorted(packed[0]) == ["manifest.json", "variant.so"]


def test_what_the_tests_compiled_is_not_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prebuild, slugs = script("jit_cache/prebuild.py"), [f"packbits.{host_target()}.any.v1", "packbits.sm80.any.v1"]
    monkeypatch.setattr(prebuild, "TESTED", tmp_path / "tests")
    monkeypatch.setattr(prebuild, "STORE", tmp_path / "store")
    aot.warm([aot.spec_of(slugs[0])], store=Store(tmp_path / "tests"))
    prebuild.borrow(slugs)
    assert [built.status for built in aot.warm([aot.spec_of(slugs[0])], store=Store(tmp_path / "store"))] == ["hit"]
    assert [path.name for path in (tmp_path / "store/entries").iterdir()] == slugs[:1]


def test_variants_of_hosts_are_compiled_last() -> None:
    """When tests beside which they are compiled have made some of them."""
    slugs = ["merge.x86-64-v4.fp16.v8", "merge.sm80.fp16.v8", "packbits.aarch64.any.v1"]
    parts = script("jit_cache/prebuild.py").cuda_before_host
    assert parts(slugs) == [slugs[1:2], [slugs[0], slugs[2]]] and parts(slugs[:1]) == [slugs[:1]]


def test_too_large_a_package_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prebuild = script("jit_cache/prebuild.py")
    entries = [tmp_path / f"merge.{target}.fp16.v8" / "digest" for target in ("sm80", "sm90a")]
    for entry, size in zip(entries, (10_000, 20_000), strict=True):
        entry.mkdir(parents=True)
        (entry / "variant.cubin").write_bytes(bytes(size))
    prebuild.report(entries)
    said = capsys.readouterr().out
    assert "    20000  merge.sm90a.fp16.v8" in said and "sm80: 1 variants, 0.0 MB of at most 30" in said
    monkeypatch.setattr(prebuild, "LARGEST_MB", 0.015)
    with pytest.raises(SystemExit, match=r"more than 0\.015 MB"):
        prebuild.report(entries)


@pytest.mark.parametrize(
    ("targets", "tag"),
    [
        (["sm80"], "py3-none-any"),
        (["sm80", "x86-64-v3", "x86-64-v4"], "py3-none-linux_x86_64"),
        (["sm80", "aarch64"], "py3-none-linux_aarch64"),
        (["sm80", "x86-64-v3", "aarch64"], "py3-none-any"),
    ],
)
def test_the_wheel_is_for_the_machines_of_its_host_code(tmp_path: Path, targets: list[str], tag: str) -> None:
    assert wheel_of(tmp_path, targets)["tag"] == tag


def test_native_code_does_not_go_into_the_wheel(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="native, which other machines cannot run"):
        wheel_of(tmp_path, ["sm80", "native"])


def wheel_of(root: Path, targets: list[str]) -> dict[str, object]:
    """What the build hook decides for a store with an entry for each target."""
    for target in targets:
        entry = root / "src/quire_jit_cache/store/entries" / f"slug.{target}" / "digest"
        entry.mkdir(parents=True)
        (entry / "manifest.json").write_text(json.dumps({**CLEAN, "target": target}))
    hook = script("jit_cache/hatch_build.py").PrebuiltEntries(str(root), {}, None, None, str(root), "wheel")
    data: dict[str, object] = {}
    hook.initialize("standard", data)
    return data


def test_durations_are_those_of_files_and_then_of_tests() -> None:
    lines = table(Counter({"a.py::one": 0.5, "a.py::two": 0.05, "b.py::one": 2.0})).splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "2.55 s in all, 3 tests", "", "2.00 s b.py (1)", "0.55 s a.py (2)", "", "2.00 s b.py::one", "0.50 s a.py::one",
    ]  # fmt: skip
