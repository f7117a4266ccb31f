"""Processes that form a gloo group, started once, which run functions of a test together.

They are forks of a process that has imported torch and Quire (isolation.py).
"""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from isolation import SERVER

_SECONDS, _SECONDS_OF_OTHERS = 120.0, 2.0  #: ranks wait for one that failed


def _serve(connection: Connection, store: str, rank: int, size: int) -> None:
    """Answers each (function, arguments) with None, or with the traceback of what it raised."""
    torch.set_num_threads(1)
    store_of_all = dist.FileStore(store, size)
    dist.init_process_group("gloo", store=store_of_all, rank=rank, world_size=size, timeout=timedelta(seconds=100))
    while (call := connection.recv()) is not None:
        try:
            torch.manual_seed(0)
            call[0](*call[1])
            connection.send(None)
        except BaseException:
            connection.send(traceback.format_exc())
    dist.destroy_process_group()


class Processes:
    """`size` ranks. run() calls a function of a test module on all of them, and raises what any of them raised."""

    def __init__(self, size: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        pipes = [SERVER.Pipe() for _ in range(size)]
        self._connections = [ours for ours, _ in pipes]
        self._processes = [
            SERVER.Process(target=_serve, args=(theirs, store, rank, size), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(self._processes, pipes, strict=True):
            process.start()
            theirs.close()

    def run(self, function: Callable[..., None], *arguments: Any) -> None:
        for connection in self._connections:
            connection.send((function, arguments))
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        failed = []
        while waiting and (answered := wait([*waiting], _SECONDS_OF_OTHERS if failed else _SECONDS)):
            for connection in answered:
                rank, answer = waiting.pop(connection), connection.recv()
                failed += [f"rank {rank}: {answer}"] if answer is not None else []
        failed += [f"rank {rank} has not answered" for rank in waiting.values()]
        assert not failed, "\n".join(failed)

    def close(self) -> None:
        for connection, process in zip(self._connections, self._processes, strict=True):
            if process.is_alive():
                connection.send(None)
            process.join(2)
            process.kill()
        self._folder.cleanup()
