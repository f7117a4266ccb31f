"""The command line: statuses, words that were meant, the cache's actions, signals, and what it must not import."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import quire
from quire import jit
from quire.cli import aot, candidates, catalogue, main, new_parser
from quire.cli import cache as cache_commands
from quire.jit import builder, events, stores
from stub_compiler import compiles, write_stub

HOST = jit.host_target()
SLUGS = [f"packbits.{HOST}.any.v1", f"append.{HOST}.u16.v1", f"append.{HOST}.u16.v8"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, a stub compiler, and a JIT that remembers nothing."""
    for name in [name for name in os.environ if name.startswith("QUIRE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("QUIRE_CXX", str(write_stub(tmp_path / "stub-g++")))
    monkeypatch.setattr(jit, "_modules", {})
    monkeypatch.setattr(stores, "_stores", {})
    monkeypatch.setattr(stores, "_private_store", None)
    monkeypatch.setattr(events, "_warned", set())
    yield tmp_path / "cache"


Quire = Callable[..., tuple[int, str, str]]


@pytest.fixture
def quire_(cache: Path, capsys: pytest.CaptureFixture[str]) -> Quire:
    """Runs a command line; returns its status, stdout and stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        try:
            status = main(words)
        except SystemExit as error:
            status = int(error.code or 0)
        return status, *capsys.readouterr()

    return run


def program(*words: str, **environment: str) -> subprocess.Popen[str]:
    """The program in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "quire", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **environment},
    )  # fmt: skip


# --- words and statuses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("cahce path", "did you mean 'cache'?"),
        ("cache lst", "did you mean 'list'?"),
        ("warmup --preseet llama", "did you mean '--preset'?"),
        ("warmup --preset lama", "did you mean 'llama'?"),
        ("warmup --backend fa4", "did you mean 'fa3'?"),
        ("warmup --mask cusal", "did you mean 'causal'?"),
        ("warmup --dtype bf61", "did you mean 'bf16'?"),
        ("warmup --arch hoper", "did you mean 'hopper'?"),
        ("warmup --arch 9.9", "sm99 is no target of nvcc"),
        ("warmup --head 64", "did you mean '--head-dim'?"),
        ("warmup --head-dim big", "expected head dims such as 128"),
        ("warmup --page-size 0", "expected page sizes such as 16"),
        ("warmup --jobs 0", "expected a whole number of at least 1"),
        ("cache gc --max-size much", "expected a size such as 500MB"),
        ("cache gc --unused-for long", "expected a time such as 30d"),
        ("cache gc", "expected --max-size, --unused-for or both"),
        ("cache why packbits.sm90a.any.v7", "expected name.target.type.vN"),
        ("warmup --manifest /nowhere", "cannot be read"),
        ("plan-for /nowhere/config.json", "there is no /nowhere"),
        ("completion csh", "expected one of bash, fish, zsh"),
        ("", "required: COMMAND"),
    ],
)
def test_a_wrong_command_line_ends_with_2_and_says_what_was_meant(line: str, hint: str, quire_: Quire) -> None:
    status, out, err = quire_(*line.split())
    assert (status, out) == (2, "")
    assert hint in err and len(err.splitlines()) <= 3, err


@pytest.mark.parametrize(
    ("line", "value", "reasons"),
    [
        ("--arch 7.5", "--arch sm75", ["attention_fa2    target sm75 has no asynchronous copies", "is not sm90a"]),
        (
            "--arch 9.0a --head-dim 64,576",
            "--head-dim 576x576",
            ["attention_decode head_dim_qk=576: expected at most 256"],
        ),
        (
            "--arch 9.0a --head-dim 576x512 --page-size ragged",
            "--head-dim 576x512",
            ["attention_mla_fa2 keys are ragged: it takes pages only"],
        ),
        ("--arch 9.0a --dtype fp32", "--dtype fp32", ["attention_fa2    q dtype fp32 is not fp16 or bf16"]),
        ("--arch 8.0 --backend fa3", "--backend fa3", ["attention_fa3    target sm80 is not sm90a"]),
        ("--arch 9.0a --backend cpu", "--backend cpu", ["no chosen backend runs on sm90a"]),
        ("--arch 9.0a --dtype bf16 --kv-dtype fp16", "--kv-dtype fp16", ["kv dtype fp16 differs from q dtype bf16"]),
    ],
)
def test_what_no_kernel_does_is_refused_before_compiling(
    line: str, value: str, reasons: list[str], quire_: Quire, cache: Path
) -> None:
    status, out, err = quire_("warmup", *line.split())
    assert (status, out) == (2, "")
    assert value in err
    assert all(reason in err for reason in reasons), err
    assert not cache.exists()


def test_a_failed_compile_ends_with_1(quire_: Quire, cache: Path, tmp_path: Path) -> None:
    write_stub(tmp_path / "stub-g++", before='echo "x.cpp:1:1: error: no" >&2; exit 1')
    status, out, _ = quire_("warmup", "--exact", SLUGS[0])
    assert status == 1
    assert "1 failed" in out and "error: no" in out


@pytest.mark.parametrize("content", ["", "# nothing\n\n"])
def test_an_empty_manifest_builds_nothing(content: str, quire_: Quire, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "manifest").write_text(content)
    status, _, err = quire_("warmup", "--manifest", str(tmp_path / "manifest"))
    assert status == 2 and "names no variant" in err
    assert not cache.exists()


@pytest.mark.parametrize("content", [b"\xff\xfe\x00x", b"[" * 100_000, b"x" * 2_000_000])
def test_a_hostile_manifest_is_refused_in_a_few_words(content: bytes, quire_: Quire, tmp_path: Path) -> None:
    (tmp_path / "manifest").write_bytes(content)
    status, _, err = quire_("warmup", "--manifest", str(tmp_path / "manifest"))
    assert status == 2 and len(err) < 2000


def test_nothing_is_built_that_would_not_be_kept(quire_: Quire, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    status, out, err = quire_("warmup", "--exact", SLUGS[0], "--store", str(tmp_path / "file"))
    assert (status, out) == (1, "")
    assert "nothing that is built would be kept" in err
    assert compiles(tmp_path / "stub-g++") == 0


def test_version_and_help(quire_: Quire) -> None:
    assert quire_("--version") == (0, f"quire {quire.__version__}\n", "")
    status, out, _ = quire_("--help")
    assert status == 0 and all(f"  {name} " in out for name in ("warmup", "cache", "doctor", "matrix", "show"))
    assert "__complete" not in out


# --- the cache -------------------------------------------------------------------------------------------------------


@pytest.fixture
def filled(quire_: Quire, cache: Path) -> Path:
    """A cache of three entries."""
    status, out, _ = quire_("warmup", "--exact", *SLUGS)
    assert status == 0 and "3 built" in out
    return cache


def test_list_is_plain_text_of_one_line_an_entry(filled: Path, quire_: Quire) -> None:
    status, out, _ = quire_("cache", "list", "append")
    lines = out.splitlines()
    assert status == 0 and out.isascii()
    assert [line.split()[0] for line in lines[1:-1]] == sorted(SLUGS[1:])
    assert lines[-1].startswith("2 entries, ")
    assert [e["slug"] for e in json.loads(quire_("cache", "list", "--json")[1])["entries"]] == sorted(SLUGS)


def test_verify_finds_damage_and_counts_as_no_use(filled: Path, quire_: Quire) -> None:
    files = list(filled.glob("entries/*/*/*"))
    for file in files:
        os.utime(file, (1, 2))
    assert quire_("cache", "verify")[0] == 0
    assert {file.stat().st_atime for file in files} == {1}
    next(filled.glob("entries/packbits*/*/*.so")).write_bytes(b"damaged")
    status, out, _ = quire_("cache", "verify")
    assert status == 1 and "3 entries, 1 bad" in out


def test_why_says_where_an_entry_is_or_what_is_missing(filled: Path, quire_: Quire) -> None:
    status, out, _ = quire_("cache", "why", SLUGS[0])
    assert status == 0 and out.startswith(f"it is there: {filled}/entries/{SLUGS[0]}/")
    status, out, _ = quire_("cache", "why", f"packbits.{HOST.replace('v4', 'v3')}.any.v1" if "v4" in HOST else SLUGS[0])
    assert status == 0
    status, out, _ = quire_("cache", "why", f"merge.{HOST}.fp16.v8")
    assert "it is not there: " in out
    line = out.splitlines()[-1].partition("quire ")[2].split()
    assert quire_(*line)[0] == 0, "the line that is printed works"
    assert "it is there" in quire_("cache", "why", f"merge.{HOST}.fp16.v8")[1]


def test_gc_removes_the_least_recently_used(filled: Path, quire_: Quire) -> None:
    for age, slug in enumerate(SLUGS):
        for file in (filled / "entries" / slug).glob("*/*"):
            os.utime(file, (time.time() - 86400 * 10 * age,) * 2)
    size = sum(file.stat().st_size for file in filled.glob(f"entries/{SLUGS[0]}/*/*"))
    assert "would remove 1 entries" in quire_("cache", "gc", "--unused-for", "15d", "--dry-run")[1]
    assert "removed 1 entries" in quire_("cache", "gc", "--unused-for", "15d")[1]
    assert [e.name for e in (filled / "entries").iterdir() if e.name == SLUGS[2]] == []
    assert quire_("cache", "gc", "--max-size", f"{size + 10}B")[0] == 0
    assert [path.name for path in (filled / "entries").iterdir()] == [SLUGS[0]]


def test_prune_removes_what_this_version_would_not_use(filled: Path, quire_: Quire) -> None:
    stale = next((filled / "entries" / SLUGS[0]).iterdir())
    shutil.copytree(stale, filled / "entries" / "gone.host" / stale.name)
    (filled / "logs" / "old.log").write_text("x")
    status, out, _ = quire_("cache", "prune", "--json")
    assert status == 0
    assert json.loads(out)["removed"] == [str(filled / "entries" / "gone.host" / stale.name)]
    assert {path.name for path in (filled / "entries").iterdir()} == set(SLUGS)
    assert list((filled / "logs").iterdir()) == []


def test_an_archive_carries_entries_to_another_machine(
    filled: Path, quire_: Quire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archives = [tmp_path / "one.tar", tmp_path / "two.tar"]
    for archive in archives:
        assert quire_("cache", "export", str(archive))[0] == 0
        for file in filled.rglob("*"):
            os.utime(file, (1, 1))
    assert archives[0].read_bytes() == archives[1].read_bytes(), "equal entries make equal archives"
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert quire_("cache", "import", str(archives[0]))[0] == 0
    before = compiles(tmp_path / "stub-g++")
    assert "3 hit" in quire_("warmup", "--exact", *SLUGS)[1]
    assert compiles(tmp_path / "stub-g++") == before


def _archive(path: Path, name: str, data: bytes = b"x", **fields: Any) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    for field, value in fields.items():
        setattr(member, field, value)
    with tarfile.open(path, "w") as archive:
        archive.addfile(member, io.BytesIO(data) if member.isreg() else None)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("../../escaped", {}),
        ("/tmp/escaped", {}),
        ("entries/../x/y", {}),
        ("entries/a/b/../../../../escaped", {}),
        ("entries/a/b", {}),
        ("entries/a/b/.hidden", {}),
        ("entries/a/b/link", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}),
        ("entries/a/b/link", {"type": tarfile.LNKTYPE, "linkname": "../../../../escaped"}),
        ("entries/a/b/fifo", {"type": tarfile.FIFOTYPE}),
        ("entries/a/b/device", {"type": tarfile.CHRTYPE}),
        ("entries/a/b/manifest.json", {}),
        ("compilers.json", {}),
    ],
)
def test_hostile_archives_are_refused(name: str, fields: dict[str, Any], quire_: Quire, cache: Path) -> None:
    _archive(cache.parent / "bad.tar", name, **fields)
    before = {path for path in cache.parent.rglob("*") if cache not in path.parents and path != cache}
    status, _, err = quire_("cache", "import", str(cache.parent / "bad.tar"))
    assert (status == 1 and "bad.tar" in err) or "manifest" in err
    assert {path for path in cache.parent.rglob("*") if cache not in path.parents and path != cache} == before
    assert [*(cache / "entries").iterdir(), *(cache / "staging").iterdir()] == []


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda _: b"no archive", lambda _: b""])
def test_damaged_archives_are_refused_whole(
    damage: Callable[[bytes], bytes], filled: Path, quire_: Quire, tmp_path: Path
) -> None:
    archive, other = tmp_path / "cache.tar", tmp_path / "other"
    assert quire_("cache", "export", str(archive))[0] == 0
    archive.write_bytes(damage(archive.read_bytes()))
    assert quire_("cache", "import", str(archive), "--store", str(other))[0] == 1
    assert list((other / "entries").iterdir()) == []


def test_an_archive_with_one_changed_byte_is_refused(filled: Path, quire_: Quire, tmp_path: Path) -> None:
    archive = tmp_path / "cache.tar"
    assert quire_("cache", "export", str(archive), "packbits")[0] == 0
    data = archive.read_bytes()
    at = data.index(b"\x7fELF") + 64
    archive.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    status, _, err = quire_("cache", "import", str(archive), "--store", str(tmp_path / "other"))
    assert status == 1 and "sha256" in err


# --- what a variant is -----------------------------------------------------------------------------------------------


def test_show_and_matrix(quire_: Quire) -> None:
    status, out, _ = quire_("show", "attention_fa3.sm90a.bf16-bf16-bf16.d128-128.paged16.causal.m128")
    assert (
        status == 0 and "H100, H200" in out and "kHeadDimQk=128" in out and "entry      none: the cache is empty" in out
    )
    assert "quire_packbits" in quire_("show", SLUGS[0], "--source")[1]
    cells = json.loads(quire_("matrix", "--json")[1])["cells"]
    rows = {(c["kernel"], c["q"], c["kv"], c["target"]): c for c in cells}
    assert rows["attention_fa3", "bf16", "bf16", "sm90a"]["reason"] is None
    assert rows["attention_fa3", "bf16", "bf16", "sm90a"]["state"] == "run"
    assert rows["attention_fa2", "bf16", "bf16", "sm100a"]["state"] == "compiled"
    for kernel, q, kv in (
        ("attention_mla_fa3", "bf16", "bf16"), ("attention_mla_decode", "bf16", "e4m3"),
        ("attention_wide", "fp16", "fp16"), ("attention_fa3_fp8", "e4m3", "e4m3"),
    ):  # fmt: skip
        assert rows[kernel, q, kv, "sm90a"]["reason"] is None, "each kernel is asked for head dims that it has"
    table = quire_("matrix", "--arch", "10.0a")[1].partition("\n\n")[0]
    assert "compiled" in table and "run" not in table
    assert "no Arm machine" not in out and "no Arm machine has run it" in quire_("matrix")[1]
    assert "no Arm machine has run it" in quire_("show", "packbits.aarch64.any.v1")[1]


def test_code_that_ran_as_ptx_on_another_gpu_is_called_that(quire_: Quire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "RAN_AS_PTX", {"sm86": "H200"})
    assert [catalogue.state(target) for target in ("sm90a", "sm86", "sm100a", "aarch64")] == [
        "run", "run as PTX on another GPU", "compiled", "compiled",
    ]  # fmt: skip
    table, _, legend = quire_("matrix", "--arch", "8.6,9.0a,10.0a")[1].partition("\n\n")
    rows = [line.split() for line in table.splitlines() if line.startswith("attention_fa2")]
    assert rows and all(row[3:] in (["as", "PTX", "run", "compiled"], ["no"] * 3) for row in rows)
    assert "as PTX: run as PTX on another GPU, and compared with float64, on sm86: H200" in legend
    assert "run, and compared with float64, on sm90a: H100, H200" in legend
    assert "ran on     H200, as PTX; no such card" in quire_("show", "packbits.sm86.any.v1")[1]
    from quire.compat.flashinfer.fallback import RAN_ON

    assert not {"sm86", "sm89", "sm120a"} & {*RAN_ON}, "there QUIRE_FLASHINFER=auto would take over"


# --- shells ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "some"),
    [
        ("", {"warmup", "cache", "doctor", "--version"}),
        ("cache", {"list", "gc", "import"}),
        ("cache gc", {"--max-size", "--unused-for"}),
        ("warmup --preset", {"llama", "gemma"}),
        ("completion", {"bash", "zsh", "fish"}),
    ],
)
def test_completion_knows_commands_options_and_values(before: str, some: set[str], cache: Path) -> None:
    found = candidates(new_parser(), before.split())
    assert some <= set(found)
    assert not any(word.startswith("__") for word in found)


def test_completion_of_slugs(filled: Path, quire_: Quire) -> None:
    assert quire_("__complete", "cache", "why", "pack")[1].split() == [SLUGS[0]]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_scripts(shell: str, quire_: Quire) -> None:
    status, out, _ = quire_("completion", shell)
    assert status == 0 and "quire __complete" in out
    if program := shutil.which(shell):
        assert subprocess.run([program, "-n"], input=out, text=True, check=False).returncode == 0


# --- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line", ["--help", "--version", "cache list", "cache path", "doctor", "matrix", "warmup --help"]
)
def test_torch_is_not_imported(line: str, cache: Path) -> None:
    code = (
        "import sys\nfrom quire.cli import main\n"
        f"try: main({line.split()!r})\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'rich', 'fsspec'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else len(sys.modules) > 400)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("line", ["--help", "cache list"])
def test_an_answer_without_torch_takes_little_time(line: str, cache: Path) -> None:
    """The least of three: other tests run beside this one."""
    command, seconds = [sys.executable, "-m", "quire", *line.split()], []
    for _ in range(3):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert status == 0
        seconds.append(usage.ru_utime + usage.ru_stime)
    assert min(seconds) <= 0.4


def test_a_closed_pipe_is_no_error(filled: Path) -> None:
    with program("show", SLUGS[0], "--source") as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


@pytest.mark.parametrize("group", [False, True], ids=["process", "terminal"])
def test_ctrl_c_stops_at_once_and_keeps_what_is_built(group: bool, cache: Path, tmp_path: Path) -> None:
    def hears_ctrl_c() -> None:
        """Also where the suite runs in the background of a shell, which makes its children ignore Ctrl-C."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    stub = write_stub(tmp_path / "stub-g++", before=f'[ -e "{tmp_path}/one" ] && sleep 60; touch "{tmp_path}/one"')
    process = subprocess.Popen(
        [sys.executable, "-m", "quire", "warmup", "--exact", "--jobs", "1", *SLUGS],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=group,
        preexec_fn=hears_ctrl_c,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while compiles(stub) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT) if group else process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)  # half as long as the compiler sleeps
    assert process.returncode == 130
    assert "1 of 3 variants are built and stay in" in err and "Traceback" not in err
    assert len(list((cache / "entries").iterdir())) == 1


def test_no_log_line_breaks_the_bar(cache: Path) -> None:
    """On a terminal of 80 columns: neither lines of progress nor slugs, only the bar with the variant in words, then
    the results on stdout.
    """
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "quire", "warmup", "--exact", *SLUGS],
        stdout=subprocess.PIPE, stderr=follower, env={**os.environ, "COLUMNS": "80", "TERM": "xterm"},
    )  # fmt: skip
    os.close(follower)
    shown = b""
    while chunk := _read(leader):
        shown += chunk
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and b"3 built" in out
    assert b"3/3" in shown
    assert b"compiling" not in shown and b"append." not in shown
    assert f", for {HOST}".encode() in shown  # the last one, at least


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except OSError:  # the other end is closed
        return b""


# --- operating -------------------------------------------------------------------------------------------------------


def _counters() -> dict[str, float]:
    """The lines of quire.metrics() that are no comments."""
    lines = [line.rpartition(" ") for line in quire.metrics().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def test_metrics_count_hits_misses_and_compiles(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit.events, "_counted", {})
    quire.warmup([SLUGS[0]])
    quire.warmup([SLUGS[0]])
    write_stub(tmp_path / "stub-g++", before="exit 1")
    with pytest.raises(quire.CompileError):
        quire.warmup([f"merge.{HOST}.fp16.v8"])
    counted = _counters()
    assert counted['quire_cache_misses_total{kernel="packbits"}'] == 1
    assert counted['quire_compiles_total{kernel="packbits"}'] == 1
    assert counted['quire_cache_hits_total{kernel="packbits"}'] == 1
    assert counted['quire_compile_failures_total{kernel="merge"}'] >= 1
    assert 0 < counted['quire_cache_lookup_seconds_total{kernel="packbits"}'] < 5
    assert 0 < counted['quire_compile_seconds_total{kernel="packbits"}'] < 60
    for name in {name.partition("{")[0] for name in counted}:
        assert f"# TYPE {name} counter" in quire.metrics()


def test_waits_are_counted_with_their_seconds(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit.events, "_counted", {})
    stub = write_stub(tmp_path / "stub-g++", before="sleep 2")
    with program("warmup", "--exact", SLUGS[0]) as other:
        while not compiles(stub):
            time.sleep(0.05)
        quire.warmup([SLUGS[0]])
        other.communicate()
    assert compiles(stub) == 1
    counted = _counters()
    assert counted['quire_waits_total{kernel="packbits"}'] == 1
    assert 0 < counted['quire_wait_seconds_total{kernel="packbits"}'] < 30


def test_all_processes_of_the_machine_share_one_budget(cache: Path, tmp_path: Path) -> None:
    """Four processes, four caches, two permits: never more than two compilers at a time."""
    log = tmp_path / "times"
    write_stub(tmp_path / "stub-g++", before=f'echo + >> "{log}"; sleep 0.5; echo - >> "{log}"')
    caches = [str(tmp_path / f"cache{i}") for i in range(4)]
    both = {"QUIRE_MAX_JOBS": "2", "XDG_RUNTIME_DIR": str(tmp_path)}
    processes = [program("warmup", "--exact", SLUGS[0], QUIRE_CACHE_DIR=root, **both) for root in caches]
    for process in processes:
        process.communicate(timeout=120)
        assert process.returncode == 0
    running = [0]
    for word in log.read_text().split():
        running.append(running[-1] + (1 if word == "+" else -1))
    assert len(running) == 9 and max(running) <= 2


def test_a_runtime_directory_of_others_is_not_used(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = jit.user_store()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    root = tmp_path / f"quire-permits-{os.geteuid()}"
    assert builder.permits_directory(store) == root / "permits"
    root.chmod(0o777)
    assert builder.permits_directory(store) == store.root / "permits"
    shutil.rmtree(root)
    root.symlink_to(tmp_path)
    assert builder.permits_directory(store) == store.root / "permits"


@pytest.mark.parametrize(("peak", "memory", "compilers"), [(None, 3, 3), (200 << 20, 3, 8), (4 << 30, 3, 1), (1, 1, 8)])
def test_compilers_by_memory(peak: int | None, memory: int, compilers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit.machine, "_processors", lambda: 8)
    monkeypatch.setattr(jit.machine, "available_bytes", lambda: memory << 30)
    assert jit.machine.default_jobs(peak) == compilers


# --- sealing ---------------------------------------------------------------------------------------------------------


def test_the_line_of_a_miss_works_when_pasted(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sealed run names the line that builds what it lacks; after it the run passes."""
    server = f"from quire import aot, jit; jit.get_module(aot.spec_of('append.{HOST}.u16.v8'))"
    denied = {**os.environ, "QUIRE_JIT": "deny"}
    first = subprocess.run([sys.executable, "-c", server], env=denied, capture_output=True, text=True, check=False)
    assert first.returncode == 1 and "CacheMissError" in first.stderr
    (line,) = re.findall(r"^ +to do: +(quire warmup .*)$", first.stderr, re.MULTILINE)
    subprocess.run(f"{sys.executable} -m {line}", shell=True, check=True, capture_output=True)
    again = subprocess.run([sys.executable, "-c", server], env=denied, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize("name", ["decode", "fa2", "fa3", "cpu"])
def test_the_line_of_each_kernel_names_its_variant(name: str, quire_: Quire) -> None:
    """What a miss prints is understood, and selects the variant that was missed."""
    target = HOST if name == "cpu" else "sm90a"
    for mask in ("causal", "none+window", "custom+cap"):
        for spec in aot.select(aot.Selection(backends=(name,), masks=(mask,), targets=(target,))):
            status, out, err = quire_("warmup", "--dry-run", "--json", *spec.warmup.split())
            assert status == 0, err
            assert spec.slug in {variant["slug"] for variant in json.loads(out)["variants"]}


# --- what costs something is asked for -------------------------------------------------------------------------------


@pytest.fixture
def small_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """A default list of two variants."""
    monkeypatch.setattr(cache_commands, "select", lambda *_, **__: [aot.spec_of(slug) for slug in SLUGS])


def test_the_default_list_is_built_on_request_alone(quire_: Quire, cache: Path, small_list: None) -> None:
    status, out, err = quire_("warmup")
    assert (status, out) == (2, "") and not cache.exists()
    assert f"the default list: {len(SLUGS)} variants, " in err and "s of one core" in err and "--yes" in err
    assert quire_("warmup", "--json")[0] == 2
    assert quire_("warmup", "--dry-run")[0] == 0
    assert quire_("warmup", "--yes")[0] == 0
    assert quire_("warmup")[0] == 0, "nothing is left to build"


@pytest.mark.parametrize(("answer", "status"), [("y", 0), ("Yes", 0), ("", 2), ("n", 2)])
def test_a_terminal_is_asked(
    answer: str, status: int, quire_: Quire, small_list: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or answer)
    assert quire_("warmup")[0] == status
    assert asked == ["Build it? [y/N] "]


@pytest.mark.parametrize(
    ("slug", "words"),
    [
        ("attention_fa3.sm90a.bf16-e4m3-bf16.d192-128.paged16.causal-window.m128",
         "fa3 bf16 over e4m3, 192/128 dims, pages of 16, causal + window, for sm90a"),
        ("attention_decode.sm80.fp16-fp16-fp16.d64-64.paged.none.m16",
         "decode fp16, 64 dims, pages, no mask, for sm80"),
        ("attention_cpu.x86-64-v4.fp32-fp32-fp32.d64-64.ragged.none-cap.m16",
         "cpu fp32, 64 dims, ragged, no mask + cap, for x86-64-v4"),
        ("append_nvfp4.sm90a.bf16.v8", "append nvfp4, for sm90a"),
    ],
)  # fmt: skip
def test_variants_in_words(slug: str, words: str) -> None:
    assert catalogue.in_words(slug) == words


def test_the_schedule_is_drawn(quire_: Quire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.delenv("QUIRE_CXX")
    place = tmp_path / "schedule.html"
    status, out, _ = quire_("viz", "--no-timeline", "--kv-lens", "300,20", "--threads", "1", "--out", str(place))
    assert status == 0 and f"wrote {place}" in out and "<svg" in place.read_text()
    assert quire_("viz", "--heads", "many")[0] == 2
