"""Processes that form a group, started once, which run functions of a test together: gloo, or NCCL with a GPU each.

They are forks of a process that has imported torch and Quire (isolation.py).
"""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from isolation import SERVER

_SECONDS, _SECONDS_OF_OTHERS = 120.0, 2.0  #: ranks wait for one that failed


def here() -> str:
    """The device of this rank."""
    return f"cuda:{dist.get_rank()}" if dist.get_backend() == "nccl" else "cpu"


def _join(backend: str, store: str, rank: int, size: int, seconds: float) -> None:
    of_gpus: dict[str, Any] = {}
    if backend == "nccl":
        torch.cuda.set_device(rank)
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        # The watchdog ends the process four times as long after a timeout: by default a minute.
        os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "1000"
        of_gpus = {"device_id": torch.device("cuda", rank), "pg_options": options}
    dist.init_process_group(
        backend, store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=seconds),
        **of_gpus,
    )  # fmt: skip


def _serve(connection: Connection, store: str, rank: int, size: int, backend: str, seconds: float) -> None:
    """Answers each (function, arguments) with None, or with the traceback of what it raised."""
    torch.set_num_threads(1)
    _join(backend, store, rank, size, seconds)
    while (call := connection.recv()) is not None:
        try:
            torch.manual_seed(0)
            call[0](*call[1])
            connection.send(None)
        except BaseException:
            connection.send(traceback.format_exc())
    dist.destroy_process_group()


def _answer(connection: Connection) -> str | None:
    try:
        answer: str | None = connection.recv()
    except EOFError:
        return "has ended"
    return answer


class Processes:
    """`size` ranks. run() calls a function of a test module on all of them, and raises what any of them raised.

    seconds: how long ranks wait for each other.
    """

    def __init__(self, size: int, backend: str = "gloo", seconds: float = 100.0) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        pipes = [SERVER.Pipe() for _ in range(size)]
        self._connections = [ours for ours, _ in pipes]
        self._processes = [
            SERVER.Process(target=_serve, args=(theirs, store, rank, size, backend, seconds), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(self._processes, pipes, strict=True):
            process.start()
            theirs.close()

    def run(self, function: Callable[..., None], *arguments: Any) -> None:
        failed = self.failures(function, *arguments)
        assert not failed, "\n".join(failed.values())

    def failures(
        self, function: Callable[..., None], *arguments: Any, patience: float = _SECONDS_OF_OTHERS
    ) -> dict[int, str]:
        """What ranks raised, by rank; of one that has ended, that it has. patience: seconds, once one has failed."""
        for connection in self._connections:
            connection.send((function, arguments))
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        failed: dict[int, str] = {}
        while waiting and (answered := wait([*waiting], patience if failed else _SECONDS)):
            for connection in answered:
                rank = waiting.pop(connection)
                answer = _answer(connection)
                failed |= {} if answer is None else {rank: f"rank {rank}: {answer}"}
        return failed | {rank: f"rank {rank} has not answered" for rank in waiting.values()}

    def close(self) -> None:
        for connection, process in zip(self._connections, self._processes, strict=True):
            if process.is_alive():
                with suppress(BrokenPipeError):
                    connection.send(None)
            process.join(2)
            process.kill()
        self._folder.cleanup()


GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


def group_of(size: int, backend: str = "gloo", is_slow: bool = False) -> Any:
    """A parameter of fixture_of_ranks()."""
    marks = [pytest.mark.gpu, pytest.mark.skipif(size > GPUS, reason=f"needs {size} GPUs")] if backend == "nccl" else []
    marks += [pytest.mark.slow] if is_slow else []
    return pytest.param((size, backend), id=f"{size} ranks, {backend}", marks=marks)


GROUPS = (
    group_of(2), group_of(4, is_slow=True), group_of(8, is_slow=True), group_of(2, "nccl"), group_of(4, "nccl"),
)  # fmt: skip


def fixture_of_ranks(groups: Sequence[Any]) -> Any:
    """The fixture `ranks` of a test module: a group of each kind, for all of its tests."""

    @pytest.fixture(scope="module", params=groups)
    def ranks(request: pytest.FixtureRequest) -> Iterator[Processes]:
        processes = Processes(*request.param)
        yield processes
        processes.close()

    return ranks
