"""Launches on the host: what a status means, and what a forked process does."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

import quire
from problems import ints, workspace
from quire.engine.launch import launch
from quire.jit import HostModule

HOST = torch.device("cpu")


class Kernel(HostModule):
    """Returns a status and does nothing."""

    slug = "kernel.x86-64-v3"

    def __init__(self, status: int) -> None:
        self.function = lambda params: status


@pytest.mark.parametrize(("status", "meaning"), [(1, "out of memory"), (7, "does not know")])
def test_a_status_has_a_name(status, meaning):
    with pytest.raises(quire.QuireError, match=rf"kernel\.x86-64-v3: the kernel returned {status}: .*{meaning}"):
        launch(Kernel(status), 0, HOST, grid=1, block=1)
    launch(Kernel(0), 0, HOST, grid=1, block=1)


def _attend() -> list[float]:
    """A batch that is divided among threads, merged, appended and packed: each kernel of the host."""
    pages = 64
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    wrapper.plan(ints([0, pages], "cpu"), ints(range(pages), "cpu"), ints([4], "cpu"), 4, 1, 64, 4, q_data_type="float")
    cache = torch.linspace(-1, 1, pages * 2 * 4 * 64).reshape(pages, 2, 4, 1, 64)
    key = torch.full((1, 1, 64), 0.5)
    table = ints([0], "cpu"), ints([0, 1], "cpu"), ints([1], "cpu")
    quire.append_paged_kv_cache(key, key, ints([0], "cpu"), ints([0], "cpu"), cache, *table)
    o, lse = wrapper.run(torch.ones(1, 4, 64), cache, return_lse=True)
    quire.merge_state_in_place(o, lse, o.clone(), lse.clone())
    return [*o.flatten().tolist(), *quire.packbits(torch.ones(100, dtype=torch.bool)).tolist()]


def _child(sender) -> None:
    sender.send((_attend(), _attend(), torch.get_num_threads()))


def test_a_forked_process_computes_the_same():
    """OpenMP's threads stay behind in a fork: it hung in its first kernel."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        want = _attend()
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(sender,))
        child.start()
        assert receiver.poll(60), "the forked process hangs"
        first, second, count = receiver.recv()
        child.join()
    finally:
        torch.set_num_threads(threads)
    assert first == second == want and count == 2
