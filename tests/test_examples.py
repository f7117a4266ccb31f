"""Each example runs as a user runs it, in a process of its own, and compares itself with its reference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from own_environment import CACHE

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


#: Imports what examples do, which takes longer than most of them, and runs each in a fork.
SERVER = """
import contextlib, json, os, runpy, signal, sys, traceback
with contextlib.suppress(ImportError):
    import quire
    from transformers import AutoModelForCausalLM, BertModel
    import sentence_transformers
for line in sys.stdin:
    output, *sys.argv = json.loads(line)
    if (child := os.fork()) == 0:
        file = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1), os.dup2(file, 2)
        signal.alarm(600)
        sys.path[0], status = os.path.dirname(sys.argv[0]), 1
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def offline(cache: Path) -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "QUIRE_CACHE_DIR": str(cache)}


@pytest.fixture(scope="module")
def run_fork() -> Iterator[Callable[..., str]]:
    """run() on the cache of the suite, but for the seconds of importing."""
    command = [sys.executable, "-c", SERVER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=offline(CACHE), **pipes) as server:

        def run(output: Path, script: str, *arguments: str) -> str:
            print(json.dumps([str(output), str(EXAMPLES / script), *arguments]), file=server.stdin, flush=True)
            status, said = server.stdout.readline().strip(), output.read_text()
            assert status == "0", f"{script} exited with {status}\n{said}"
            return said

        yield run
        server.stdin.close()


def run(cache: Path, script: str, *arguments: str) -> str:
    """The output of `python examples/script` on a cache; fails with all of it if the example does."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        capture_output=True, text=True, env=offline(cache), timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, f"{script} exited with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def line(output: str, label: str) -> str:
    """The one line of a report that begins with `label`."""
    found = [text for text in output.splitlines() if text.startswith(label)]
    assert len(found) == 1, f"expected one line {label!r} in\n{output}"
    return found[0]


def check(output: str, *, cold: bool | None = None) -> None:
    """On an empty cache the first call compiles; later ones do not, nor does the job. None: the cache may be empty."""
    if cold is not None:
        assert ("cold first call" in output) == cold
    assert "cold first call" not in output or not line(output, "cold first call").endswith(" 0 compiled")
    assert line(output, "warm first call").endswith(" 0 compiled")
    assert line(output, "job").endswith(" 0 compiled")
    assert line(output, "largest error")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments", "package"),
    [
        ("paged_prefill.py", ("--layers", "2"), "torch"),
        ("beam_search.py", (), "transformers"),
        ("embed.py", (), "sentence_transformers"),
        ("generate.py", (), "transformers"),
        ("speculative.py", (), "transformers"),
    ],
)
def test_example(
    script: str, arguments: tuple[str, ...], package: str, run_fork: Callable[..., str], tmp_path: Path
) -> None:
    """On the cache of the suite, which has some of the variants; the next test has an empty one."""
    pytest.importorskip(package)
    check(run_fork(tmp_path / "output", script, *arguments))


@pytest.mark.slow
def test_a_repeated_example_compiles_nothing(tmp_path: Path) -> None:
    outputs = [run(tmp_path, "batch_inference.py", "--layers", "2") for _ in range(2)]
    for output, cold in zip(outputs, (True, False), strict=True):
        check(output, cold=cold)
        assert line(output, "cache").endswith(str(tmp_path))


def test_each_example_is_run_here() -> None:
    scripts = {path.name for path in EXAMPLES.glob("*.py")} - {"first_call.py"}
    scripts -= {"paged_engine.py", "paged_model.py", "serve.py"}  # by test_serve.py
    assert scripts == {
        "batch_inference.py", "beam_search.py", "embed.py", "generate.py", "paged_prefill.py", "speculative.py",
    }  # fmt: skip
