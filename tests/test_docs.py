"""The shell blocks of docs/ run as they stand there; those of cache.md with a compiler that takes no time."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from quire import jit
from quire.cli import new_parser
from stub_compiler import compiles, write_stub

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs/cache.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)

#: A server: it uses three variants. The library of the stub computes nothing, so none is called.
SERVER = f"""
from quire import aot, jit
for slug in ("packbits.{jit.host_target()}.any.v1", "append.{jit.host_target()}.u16.v8"):
    jit.get_module(aot.spec_of(slug))
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with what the recipes name: quire, srun, a server, a config; and no cache."""
    for name in [name for name in os.environ if name.startswith("QUIRE_")]:
        monkeypatch.delenv(name)
    (tmp_path / "bin").mkdir()
    for name, text in (("quire", f'exec {sys.executable} -m quire "$@"'), ("python", f'exec {sys.executable} "$@"'),
                       ("srun", 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"')):  # fmt: skip
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    shutil.copy(ROOT / "tests/configs/gpt-oss-120b.json", tmp_path / "config.json")
    (tmp_path / "serve.py").write_text(SERVER)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("QUIRE_CXX", str(write_stub(tmp_path / "stub-g++")))
    return tmp_path


def run(script: str, place: Path) -> str:
    """What a shell prints; the absolute paths of the recipes are led into `place`."""
    script = re.sub(r"(?<![\w.])/(tmp|opt|cache|archive)(?=/)", rf"{place}/\1", script)
    done = subprocess.run(["bash", "-euc", script], cwd=place, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_every_line_is_one_that_the_command_line_knows() -> None:
    for _, block in BLOCKS:
        for line in re.findall(r"(?<![\w/-])quire ((?:warmup|cache|doctor|plan-for)[^#\n&\"|]*)", block):
            if "config.json" not in line:
                assert new_parser().parse_args(shlex.split(line)).run


@pytest.mark.slow
def test_shell_recipes_in_order(place: Path) -> None:
    """Record, warm up elsewhere, run sealed, move, keep small: one after the other, as a reader would."""
    for kind, block in BLOCKS:
        if kind in ("sh", "bash"):
            run(block, place)
    families = 3  # packbits has one variant, append two
    assert compiles(place / "stub-g++") == 3 * families, "for the cache, Slurm's own, a host of the shared tier"


def test_the_image_of_the_dockerfile_compiles_nothing_more(place: Path) -> None:
    run("QUIRE_RECORD=used.jsonl python serve.py", place)
    (place / "tmp").mkdir()
    (block,) = (block for kind, block in BLOCKS if kind == "dockerfile")
    lines = []
    for line in block.splitlines():
        word, _, rest = line.partition(" ")
        lines.append({"FROM": "true", "COPY": f"cp {rest}", "ENV": f"export {rest}", "RUN": rest}[word])
    before = compiles(place / "stub-g++")
    run("\n".join([*lines, "unset QUIRE_CXX", "python serve.py"]), place)
    assert compiles(place / "stub-g++") > before
    assert (place / "opt/quire/entries").is_dir()


@pytest.mark.slow
def test_the_init_container_of_kubernetes(place: Path) -> None:
    run("QUIRE_RECORD=used.jsonl python serve.py && mkdir archive && quire cache export archive/cache.tar.gz", place)
    (block,) = (block for kind, block in BLOCKS if kind == "yaml")
    command = re.search(r'command: \[sh, -c, "(.*)"\]', block)
    assert command is not None
    run(
        f"export QUIRE_CACHE_DIR=/cache/quire\n{command.group(1)}\nQUIRE_JIT=deny QUIRE_CXX=/nowhere python serve.py",
        place,
    )


# --- other pages -----------------------------------------------------------------------------------------------------

SHELL = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OTHERS = {
    str(page.relative_to(ROOT)): blocks
    for page in sorted((ROOT / "docs").rglob("*.md"))
    if page.name != "cache.md" and (blocks := SHELL.findall(page.read_text(encoding="utf-8")))
}
SERVER_PAGE = "docs/tutorial/server.md"
#: A program that says how it was called, and what FlashInfer is to it.
PROGRAM = "import sys, flashinfer\nprint(*sys.argv, flashinfer.single_prefill_with_kv_cache.__module__)\n"
#: A server whose batches can be replayed.
ATTENDS = """
import quire, torch
k = torch.randn(70, 2, 64)
quire.single_prefill_with_kv_cache(torch.randn(70, 4, 64), k, k, causal=True)
"""


def add_stubs(place: Path) -> None:
    """pip, make and nsys that note their arguments; the CI installs by the first two, and the third takes a GPU."""
    for name in ("pip", "make", "nsys"):
        (place / "bin" / name).write_text(f'#!/bin/sh\necho {name} "$@" >>{place}/called\n')
        (place / "bin" / name).chmod(0o755)
    (place / ".venv/bin").mkdir(parents=True)
    (place / ".venv/bin/python").symlink_to(place / "bin/python")
    shutil.copytree(ROOT / "examples", place / "examples")
    (place / "tests").symlink_to(ROOT / "tests")


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in OTHERS if page != SERVER_PAGE])
def test_shell_blocks_of_other_pages(page: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run as they stand there; of pytest, only the collection."""
    monkeypatch.delenv("QUIRE_CXX")
    monkeypatch.setenv("PYTEST_ADDOPTS", "--collect-only -q -p no:cacheprovider")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    add_stubs(place)
    (place / "serve.py").write_text(ATTENDS if page == "docs/upgrades.md" else PROGRAM)
    for block in OTHERS[page]:
        said = run(block, place)
        assert "quire.compat.flashinfer serve.py" not in block or said.startswith("serve.py --port 8000 quire")
        assert "schedule.html" not in block or "</html>" in (place / "schedule.html").read_text()
    asked = "".join(OTHERS[page])
    called = (place / "called").read_text() if (place / "called").exists() else ""
    assert [word for word in ("pip", "make", "nsys") if f"{word} " in asked] == [
        word for word in ("pip", "make", "nsys") if f"{word} " in called
    ]


@pytest.mark.slow
def test_the_server_of_the_tutorial_answers(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("uvicorn")
    monkeypatch.delenv("QUIRE_CXX")
    add_stubs(place)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    start, ask = (block.replace("8000", port) for block in OTHERS[SERVER_PAGE])
    with subprocess.Popen(["bash", "-euc", start], cwd=place, start_new_session=True) as server:
        try:
            said = run(ask.replace("curl ", "curl --silent --retry 60 --retry-delay 1 --retry-connrefused "), place)
        finally:
            os.killpg(server.pid, signal.SIGTERM)
    assert json.loads(said)["usage"]["completion_tokens"] == 20
