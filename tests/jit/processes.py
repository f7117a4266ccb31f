"""Child processes of a test: forks of its own, which need not import anything, under other users if need be."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import elftools.elf.elffile
import filelock
import jinja2
import ninja  # noqa: F401 - as those above: a child of another user may not be able to read them

from quire import jit


class Child:
    """A fork that runs `function` and reports what it returns."""

    def __init__(self, function: Callable[[], Any], user: int | None = None) -> None:
        self._reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._reader)
            self._run(function, writer, user)
        os.close(writer)

    def _run(self, function: Callable[[], Any], writer: int, user: int | None) -> None:
        try:
            signal.alarm(60)
            if user is not None:
                os.setgroups([])
                os.setresgid(user, user, user)
                os.setresuid(user, user, user)
            answer = json.dumps({"returned": function()})
        except BaseException:
            answer = json.dumps({"raised": traceback.format_exc()})
        try:
            os.write(writer, answer.encode())
        finally:
            os._exit(0)

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        """The exit status; negative for a signal."""
        os.close(self._reader)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def result(self) -> Any:
        """What the function returned; AssertionError with the traceback if it raised, or was ended by a signal."""
        text = b""
        while part := os.read(self._reader, 1 << 16):
            text += part
        status = self.wait()
        assert status == 0, f"ended with {status}"
        answer = json.loads(text)
        assert "raised" not in answer, answer["raised"]
        return answer["returned"]


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait until `condition` holds, at most so long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


assert jit and elftools and filelock and jinja2
