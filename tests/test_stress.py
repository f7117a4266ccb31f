"""Many plans and runs at once, each wrapper on a stream and a workspace of its own: as if one after another."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import quire
from problems import ints

HEADS = (8, 2)
HEAD_DIM = 64
PAGE_SIZE = 16
NUM_PAGES = 64
MOST_ROWS = 256
WORKSPACE_BYTES = 64 << 20


@dataclass(frozen=True)
class Job:
    """A batch: index arrays on the host, as a serving engine has them."""

    decode: bool
    qo_indptr: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor

    @property
    def rows(self) -> int:
        return int(self.qo_indptr[-1])


def any_job(seed: int) -> Job:
    random_ = random.Random(seed)
    batch, decode = random_.randint(1, 16), random_.random() < 0.6
    qo_lens = [1 if decode else random_.choice((0, 1, 3, 16)) for _ in range(batch)]
    kv_lens = [qo_len + random_.choice((0, 5, 100, 900)) for qo_len in qo_lens]
    pages = [-(-n // PAGE_SIZE) for n in kv_lens]
    qo_indptr, indptr = [0], [0]
    for rows, count in zip(qo_lens, pages, strict=True):
        qo_indptr.append(qo_indptr[-1] + rows)
        indptr.append(indptr[-1] + count)
    last = [n - max(0, count - 1) * PAGE_SIZE for n, count in zip(kv_lens, pages, strict=True)]
    indices = [random_.randrange(NUM_PAGES) for _ in range(indptr[-1])]
    return Job(decode, ints(qo_indptr, "cpu"), ints(indptr, "cpu"), ints(indices, "cpu"), ints(last, "cpu"))


class Worker:
    """A decode and a prefill wrapper, each with its own workspace, that take jobs in turn."""

    def __init__(self, q: Tensor, cache: Tensor, backend: str) -> None:
        self._q, self._cache = q, cache
        self._options = {"q_data_type": q.dtype}
        first, second = (torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device) for _ in range(2))
        self._decode = quire.BatchDecodeWithPagedKVCacheWrapper(first, backend=backend)
        self._prefill = quire.BatchPrefillWithPagedKVCacheWrapper(second, backend=backend)

    def do(self, job: Job) -> Tensor:
        """Plan and run."""
        return self.plan(job).run(self._q[: job.rows], self._cache)

    def plan(self, job: Job):
        """The wrapper that took it."""
        table = (job.indptr, job.indices, job.last_page_len, *HEADS, HEAD_DIM, PAGE_SIZE)
        wrapper = self._decode if job.decode else self._prefill
        if job.decode:
            self._decode.plan(*table, **self._options)
        else:
            self._prefill.plan(job.qo_indptr, *table, causal=True, **self._options)
        return wrapper


def tensors(device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """q for the largest job, and a cache whose pages all jobs partition."""
    q = torch.randn(MOST_ROWS, HEADS[0], HEAD_DIM).to(dtype)
    return q.to(device), torch.randn(NUM_PAGES, 2, PAGE_SIZE, HEADS[1], HEAD_DIM).to(dtype).to(device)


@contextmanager
def threads(count: int, body) -> Iterator[None]:
    """Runs body(0), body(1), ... in threads; the first exception is raised here."""
    errors: list[BaseException] = []

    def guarded(i: int) -> None:
        try:
            body(i)
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    for thread in running:
        thread.start()
    yield
    for thread in running:
        thread.join()
    if errors:
        raise errors[0]


def stress(device: str, backend: str, dtype: torch.dtype, *, num_workers: int, num_jobs: int, rounds: int) -> None:
    """`num_workers` threads, each through `rounds` rounds of `num_jobs` jobs in an order of its own."""
    q, cache = tensors(device, dtype)
    jobs = [any_job(seed) for seed in range(num_jobs)]
    alone = Worker(q, cache, backend)
    expected = [alone.do(job).clone() for job in jobs]
    assert all(torch.isfinite(o).all() for o in expected)
    on_gpu = q.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
    wrong = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(num_workers)]

    def work(which: int) -> None:
        random_ = random.Random(which)
        stream = torch.cuda.Stream() if on_gpu else None
        with torch.cuda.stream(stream) if stream else nullcontext():
            worker = Worker(q, cache, backend)
            for _ in range(rounds):
                for i in random_.sample(range(num_jobs), num_jobs):
                    if on_gpu:  # the upload waits on the device while the host is at the next plans
                        torch.cuda._sleep(random_.choice((0, 10_000, 100_000)))
                    wrong[which] += (worker.do(jobs[i]).view(torch.int16) != expected[i].view(torch.int16)).sum()
            if stream:
                stream.synchronize()

    with threads(num_workers, work):
        pass
    assert [int(count) for count in wrong] == [0] * num_workers


def test_threads_on_the_cpu():
    stress("cpu", "quire:cpu", torch.bfloat16, num_workers=3, num_jobs=40, rounds=5)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("kernels", ["auto", "quire:fa2"])
def test_streams(kernels):
    stress("cuda:0", kernels, torch.bfloat16, num_workers=3, num_jobs=500, rounds=20)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_run_on_another_stream_than_its_plans():
    """The next plans come while it has yet to begin, and must leave alone what it will read."""
    q, cache = tensors("cuda:0", torch.bfloat16)
    jobs = [any_job(seed) for seed in range(40)]
    expected = [Worker(q, cache, "auto").do(job).clone() for job in jobs]
    worker, other = Worker(q, cache, "auto"), torch.cuda.Stream()
    torch.cuda.synchronize()
    got = []
    for job in jobs:
        wrapper = worker.plan(job)
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            torch.cuda._sleep(200_000)
            got.append(wrapper.run(q[: job.rows], cache))
        worker.plan(jobs[0])
    torch.cuda.synchronize()
    assert [torch.equal(g, e) for g, e in zip(got, expected, strict=True)] == [True] * len(jobs)
