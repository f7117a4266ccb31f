"""Replays recorded batches: the worker of `quire bench`, run by the interpreter of the Quire that is measured.

It is executed as a file, also by versions of Quire that do not have it, so it imports nothing of Quire but its public
functions. Times are those of run(): on a GPU by its own clock, on a CPU the processor time of all threads.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_WORKSPACE_BYTES = 256 << 20


class Batch:
    """A recorded batch with random tensors, planned."""

    def __init__(self, batch: dict[str, Any], device: Any, workspace: Any) -> None:
        import torch

        self._batch, self._device = batch, device
        requests = [(q, kv) for count, q, kv in batch["requests"] for _ in range(count)]
        random.Random(0).shuffle(requests)
        self._qo, self._kv = [q for q, _ in requests], [kv for _, kv in requests]
        self._types = {name: getattr(torch, batch[f"{name}_data_type"]) for name in ("q", "kv", "o")}
        self._pages = [-(-kv // max(1, batch["page_size"])) for kv in self._kv]
        kind = "mla" if batch["is_mla"] else "paged" if batch["page_size"] else "ragged"
        self._wrapper = getattr(self, f"_plan_{kind}")(workspace)
        self._tensors = getattr(self, f"_tensors_{kind}")
        self.chosen = getattr(self._wrapper.explain(), "chosen", "")
        self.renew()

    def _offsets(self, lens: Iterable[int]) -> Any:
        import torch

        return torch.tensor([0, *lens], dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32)

    def _page_numbers(self) -> Any:
        import torch

        numbers = torch.Generator("cpu").manual_seed(0)
        return torch.randperm(sum(self._pages), generator=numbers, dtype=torch.int32, device="cpu")

    def _options(self) -> dict[str, Any]:
        b = self._batch
        split = b["fixed_split_size"]
        return {
            "causal": b["mask"] == "causal", "sm_scale": b["sm_scale"], "window_left": b["window_left"],
            "logits_soft_cap": b["logits_soft_cap"] or None, "pos_encoding_mode": b["pos_encoding_mode"],
            "q_data_type": self._types["q"], "kv_data_type": self._types["kv"], "o_data_type": self._types["o"],
            "fixed_split_size": split if split > 0 else None, "disable_split_kv": split == -1,
        }  # fmt: skip

    @property
    def _promise(self) -> dict[str, Any]:
        """The argument of a wrapper whose recorded splits were its own: older versions do not know it."""
        return {"deterministic": True} if self._batch["fixed_split_size"] < -1 else {}

    def _plan_paged(self, workspace: Any) -> Any:
        import torch

        import quire

        b, options = self._batch, self._options()
        pages = self._offsets(self._pages), self._page_numbers()
        lens = [kv - (n - 1) * b["page_size"] if n else 0 for n, kv in zip(self._pages, self._kv, strict=True)]
        last = torch.tensor(lens, dtype=torch.int32, device="cpu")
        heads = b["num_qo_heads"], b["num_kv_heads"]
        if b["uniform"] and set(self._qo) == {1} and b["head_dim_qk"] == b["head_dim_vo"]:
            wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(workspace, b["layout"], **self._promise)
            options.pop("causal")
            wrapper.plan(*pages, last, *heads, b["head_dim_qk"], b["page_size"], **options)
            return wrapper
        prefill = quire.BatchPrefillWithPagedKVCacheWrapper(workspace, b["layout"], **self._promise)
        prefill.plan(self._offsets(self._qo), *pages, last, *heads, b["head_dim_qk"], b["page_size"],
                     head_dim_vo=b["head_dim_vo"], **options)  # fmt: skip
        return prefill

    def _plan_ragged(self, workspace: Any) -> Any:
        import quire

        b = self._batch
        wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace, b["layout"], **self._promise)
        wrapper.plan(self._offsets(self._qo), self._offsets(self._kv), b["num_qo_heads"], b["num_kv_heads"],
                     b["head_dim_qk"], b["head_dim_vo"], **self._options())  # fmt: skip
        return wrapper

    def _plan_mla(self, workspace: Any) -> Any:
        import torch

        import quire

        b, options = self._batch, self._options()
        wrapper = quire.mla.BatchMLAPagedAttentionWrapper(workspace, **self._promise)
        kept = ("causal", "sm_scale", "q_data_type", "kv_data_type")
        wrapper.plan(self._offsets(self._qo), self._offsets(self._pages), self._page_numbers(),
                     torch.tensor(self._kv, dtype=torch.int32, device="cpu"), b["num_qo_heads"], b["head_dim_vo"],
                     b["head_dim_qk"] - b["head_dim_vo"], b["page_size"],
                     **{name: options[name] for name in kept})  # fmt: skip
        return wrapper

    def _random(self, kind: str, *shape: int) -> Any:
        import torch

        wide = torch.randn(shape, dtype=torch.bfloat16 if self._device.type == "cuda" else torch.float32,
                           device=self._device)  # fmt: skip
        return wide.to(self._types[kind])

    def _tensors_paged(self) -> tuple[Any, ...]:
        b, pages = self._batch, max(1, sum(self._pages))
        q = self._random("q", sum(self._qo), b["num_qo_heads"], b["head_dim_qk"])
        rows = (b["page_size"], b["num_kv_heads"]) if b["layout"] == "NHD" else (b["num_kv_heads"], b["page_size"])
        return q, tuple(self._random("kv", pages, *rows, b[f"head_dim_{name}"]) for name in ("qk", "vo"))

    def _tensors_ragged(self) -> tuple[Any, ...]:
        b, tokens = self._batch, sum(self._kv)
        q = self._random("q", sum(self._qo), b["num_qo_heads"], b["head_dim_qk"])
        rows = (tokens, b["num_kv_heads"]) if b["layout"] == "NHD" else (b["num_kv_heads"], tokens)
        return (q, *(self._random("kv", *rows, b[f"head_dim_{name}"]) for name in ("qk", "vo")))

    def _tensors_mla(self) -> tuple[Any, ...]:
        b, pages = self._batch, max(1, sum(self._pages))
        dims = b["head_dim_vo"], b["head_dim_qk"] - b["head_dim_vo"]
        q = (self._random("q", sum(self._qo), b["num_qo_heads"], dim) for dim in dims)
        return (*q, *(self._random("kv", pages, b["page_size"], dim) for dim in dims))

    def renew(self) -> None:
        """Allocate the tensors anew."""
        self._given = self._tensors()

    def call(self) -> Any:
        """One run()."""
        return self._wrapper.run(*self._given)

    def seconds(self, calls: int, groups: int) -> float:
        """The least of `groups` measurements of `calls` calls, per call."""
        return min(self._time(calls) for _ in range(groups))

    def _time(self, calls: int) -> float:
        import torch

        if self._device.type == "cpu":
            start = time.process_time()
            for _ in range(calls):
                self.call()
            return (time.process_time() - start) / calls
        new_event: Any = torch.cuda.Event  # which has no types
        begin, end = (new_event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            self.call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / calls


def serve(answers: int) -> None:
    """Read questions of bench.Worker from stdin, an object a line, and write answers to the descriptor `answers`."""
    import torch

    import quire

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else _processor()
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    batches: list[Batch] = []

    def tell(**answer: Any) -> None:
        os.write(answers, (json.dumps(answer) + "\n").encode())

    tell(quire=quire.__version__, file=quire.__file__, torch=torch.__version__, device=name)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if "batch" in asked:
                batch = Batch(asked["batch"], device, workspace)
                batch.call()
                batches.append(batch)
                tell(index=len(batches) - 1, chosen=batch.chosen, seconds=batch.seconds(1, 3))
            else:
                batch = batches[asked["index"]]
                if asked["renew"]:
                    batch.renew()
                    batch.call()
                tell(seconds=batch.seconds(asked["calls"], asked["groups"]))
        except Exception as error:  # of whatever version
            tell(error=f"{type(error).__name__}: {error}"[:500].partition("\n")[0])


def _processor() -> str:
    import platform

    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__worker__":
    serve(int(sys.argv[1]))
