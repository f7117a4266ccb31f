"""Each example runs as a user runs it, in a process of its own, and compares itself with its reference."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from own_environment import CACHE

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(cache: Path, script: str, *arguments: str) -> str:
    """The output of `python examples/script` on a cache; fails with all of it if the example does."""
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "QUIRE_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments], capture_output=True, text=True, env=offline, timeout=600
    )
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
def test_example(script: str, arguments: tuple[str, ...], package: str) -> None:
    """On the cache of the suite, which has some of the variants; the next test has an empty one."""
    pytest.importorskip(package)
    check(run(CACHE, script, *arguments))


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
