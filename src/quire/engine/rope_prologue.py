"""A prologue is a launch before the kernel. This one rotates queries and keys of long prompts, which fa3 cannot.

A kernel that rotates keys as it reads them rotates a key again for each row tile that sees it. For long prompts it is
faster to write rotated queries and keys once and to read them again. Rotated queries are stored in the output tensor,
which has their shape: all queries of a row tile are read before any of its results is stored. Rotated keys are stored
in the workspace, request after request, and so are values of a paged cache.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch

from quire.engine.device import Workspace, current_stream
from quire.engine.options import PlanOptions
from quire.engine.rotate import Angles, Heads, Rotation
from quire.engine.schedule import Indices, measure_schedule, schedule_input
from quire.engine.spec import AttentionSpec
from quire.errors import ValidationError
from quire.kernels import PIN, Decision
from quire.kernels.attention import OWN_SPLITS
from quire.kernels.features import PosEncodingMode, View
from quire.kernels.operation import RopeParams

ALIGNMENT = 256  #: bytes
#: Of the workspace that copies may take: partial results need the rest.
MOST_OF_WORKSPACE = 0.75


class Prologue(ABC):
    """The part of a plan that launches before the kernel, and the batch that the kernel is planned on.

    `indices` are the caller's, as plan() read them; `planned` and `options` describe the copies. `end`: the end of the
    tokens of ragged keys. `largest_page`: the caller's largest page number, -1 if only the device knows it.
    """

    def __init__(
        self, indices: Indices, planned: Indices, options: PlanOptions, workspace: Workspace, end: int,
        largest_page: int,
    ) -> None:  # fmt: skip
        self.indices, self.planned, self.options, self.workspace = indices, planned, options, workspace
        self.end, self.largest_page = end, largest_page

    @abstractmethod
    def bind(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, views: Mapping[str, View], /
    ) -> dict[str, View]:
        """Take shapes and strides of the caller's tensors, of which k and v are [page, token, head, dim]; `views` has
        those of all operands. Returns the tensors that the kernel is given instead.
        """

    @abstractmethod
    def launch(self, pointers: list[int]) -> list[int]:
        """Launch on torch's current stream. Turns the addresses of q, k, v, out, ... into those for the kernel."""

    def _use(self, *tensors: torch.Tensor) -> None:
        """Memory that each launch reads or writes, `tensors[0]` on the device of the call."""
        self._tensors, self._streams = tensors, {current_stream(tensors[0].device)}

    def _record_stream(self) -> None:
        """Tell torch's allocator of another stream that uses these tensors."""
        device = self._tensors[0].device
        if (stream := current_stream(device)) not in self._streams:
            for tensor in self._tensors:
                tensor.record_stream(torch.cuda.current_stream(device))
            self._streams.add(stream)


def least_bytes(num_bytes: int) -> int:
    """Of a workspace of which `num_bytes` are set aside."""
    return math.ceil((num_bytes + ALIGNMENT) / MOST_OF_WORKSPACE)


def set_aside(workspace: Workspace, num_bytes: int) -> tuple[tuple[Workspace, torch.Tensor] | None, int]:
    """What is left of a workspace and `num_bytes` of it, rounded up, and how many those are. Where it is too small:
    None, and how many bytes it would need.
    """
    num_bytes = -(-num_bytes // ALIGNMENT) * ALIGNMENT
    parts = workspace.set_aside(num_bytes, MOST_OF_WORKSPACE, ALIGNMENT)
    return parts, num_bytes if parts is not None else least_bytes(num_bytes)


def kept(indices: Indices) -> Indices:
    """`indices` with copies of the arrays on the host, which the caller may change."""
    pages = indices.kv_indices
    return indices._replace(
        qo_indptr=_clone(indices.qo_indptr), kv_indptr=indices.kv_indptr.clone(),
        kv_last_page_len=_clone(indices.kv_last_page_len), kv_indices=_clone(pages) if _on_host(pages) else pages,
        seq_lens=None,
    )  # fmt: skip


def largest_page(indices: Indices) -> int:
    """The largest page number, if they are on the host, where negative ones are refused; else -1."""
    pages = indices.kv_indices
    if pages is None or not pages.is_cpu:
        return -1
    used = pages[int(indices.kv_indptr[0]) : int(indices.kv_indptr[-1])]
    least, largest = (int(x) for x in used.aminmax()) if used.numel() else (0, -1)
    if least < 0:
        raise ValidationError(f"paged_kv_indices: expected page numbers from 0 on, got {least}.")
    return largest


def view_of(tensor: torch.Tensor) -> View:
    """A tensor as described to kernels."""
    return View(tensor.data_ptr(), tuple(tensor.shape), tensor.stride())


def _clone(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone()


def _on_host(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.is_cpu


#: Rows of a request from which on a pass over its keys and values takes less time than it saves.
_LEAST_ROWS = 1024


def _plain_options(options: PlanOptions) -> PlanOptions:
    """The options of attention over ragged keys that are already rotated."""
    logits = options.logits._replace(pos_encoding=PosEncodingMode.NONE, rope_scale=0.0, rope_theta=0.0)
    return options._replace(logits=logits, page_size=0)


def plain_decision(spec: AttentionSpec, _: Decision, device: torch.device, backend: str) -> Decision:
    """The kernel over ragged keys that are already rotated."""
    return spec._replace(options=_plain_options(spec.options)).decide(device, backend)


def may_pay(options: PlanOptions, decision: Decision, backend: str) -> bool:
    """Whether a separate rotation is possible and may be faster: the options ask for RoPE, prompts are long, the caller
    has forced no kernel, and results may depend on the rest of the batch, as the choice of the kernel then does. With
    splits of the kernel's own every batch but decode is rotated ahead, however few its rows are.
    """
    may_depend = not options.fixed_split_size and decision.problem.rows >= _LEAST_ROWS
    return (
        not backend.startswith(PIN)
        and decision.problem.on_cuda
        and (may_depend or (options.fixed_split_size == OWN_SPLITS and not options.decodes))
        and options.types.q == options.types.kv == options.types.o
        and options.head_dim_qk == options.head_dim_vo
    )


def is_faster(plain: Decision, decision: Decision) -> bool:
    """Whether the kernel for rotated keys is one that cannot rotate; any other would have been chosen anyway."""
    return plain.kernel.refusal(decision.problem) is not None


class _Batch(NamedTuple):
    """Lengths of a batch, on the host."""

    qo_lens: torch.Tensor
    kv_lens: torch.Tensor
    largest_page: int  #: -1 where only the device knows

    @classmethod
    def of(cls, indices: Indices, options: PlanOptions, plain: Decision) -> _Batch:
        """Checked as every plan's."""
        tile = plain.kernel.tile(plain.key)
        measure_schedule(
            indices,
            schedule_input(
                num_kv_heads=options.num_kv_heads, group_size=options.group_size, page_size=options.page_size or 1,
                tile=tile, mask=plain.key.mask, window_left=options.logits.window_left, max_ctas=1, fixed_split_size=-1,
            ),
        )  # fmt: skip
        return cls(indices.qo_lens().int(), indices.kv_lens().int(), largest_page(indices))


def _copied_bytes(batch: _Batch, options: PlanOptions) -> int:
    """Of rotated keys, and of the values of a paged cache."""
    tensors = 2 if options.page_size else 1
    token_bytes = tensors * options.num_kv_heads * options.head_dim_qk * options.types.kv.bits // 8
    return max(1, int(batch.kv_lens.sum())) * token_bytes


def least_workspace(indices: Indices, options: PlanOptions, plain: Decision, partials: int = 0) -> int:
    """The bytes of a workspace that holds rotated keys and so many bytes of partial results."""
    copied = -(-_copied_bytes(_Batch.of(indices, options, plain), options) // ALIGNMENT) * ALIGNMENT
    return max(least_bytes(copied), copied + ALIGNMENT + partials)


class RopePrologue(Prologue):
    """The part of a plan that rotates: the memory of rotated keys, and the batch that the kernel is planned on."""

    def __init__(
        self, batch: _Batch, indices: Indices, options: PlanOptions, rest: Workspace, memory: torch.Tensor
    ) -> None:
        indices = kept(indices)
        is_paged = options.page_size > 0
        self._first = 0 if is_paged else int(indices.kv_indptr[0])  # of the tokens of ragged keys
        token_indptr = torch.cat((batch.kv_lens.new_zeros(1), batch.kv_lens.cumsum(0))).to(torch.int32)
        ragged = indices._replace(kv_indptr=token_indptr, kv_last_page_len=None, kv_indices=None, page_size=1)
        nnz_kv = int(batch.kv_lens.sum())
        super().__init__(indices, ragged, _plain_options(options), rest, self._first + nnz_kv, batch.largest_page)
        self._logits, self._is_paged = options.logits, is_paged
        self._arrays = _upload(_positions(batch, indices), memory.device)
        shape = (nnz_kv, options.num_kv_heads, options.head_dim_qk)
        count = nnz_kv * options.num_kv_heads * options.head_dim_qk
        numbers = memory.view(options.types.kv.torch)
        self._k, self._v = (numbers[:count].view(shape), numbers[count : 2 * count].view(shape) if is_paged else None)
        self._use(memory, *self._arrays.values())

    @classmethod
    def fit_workspace(
        cls, workspace: Workspace, indices: Indices, options: PlanOptions, plain: Decision
    ) -> tuple[RopePrologue | None, str]:
        """The launch, or None if rotated keys do not fit into the workspace; and a note for explain()."""
        batch = _Batch.of(indices, options, plain)
        parts, num_bytes = set_aside(workspace, _copied_bytes(batch, options))
        if parts is None:
            return None, (
                f"queries and keys are rotated in the kernel: {num_bytes} bytes of workspace would hold rotated keys "
                f"for {plain.kernel.name}, which is faster"
            )
        note = f"queries are rotated into the output, keys into {num_bytes} bytes of the workspace, ahead of the kernel"
        return cls(batch, indices, options, *parts), note

    def bind(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, _views: Mapping[str, View]
    ) -> dict[str, View]:
        positions, pages = self._arrays, self.indices.kv_indices
        self._queries = Rotation("rope", [Heads(q, None, out, None)], self._angles(positions["q"]))
        angles = self._angles(positions["kv"])
        if self._is_paged:
            assert self._v is not None and pages is not None
            self._pages = pages = positions["pages"] if pages.is_cpu else pages
            params = RopeParams(
                batch_indices=positions["request"].data_ptr(), positions=positions["kv"].data_ptr(),
                kv_indices=pages.data_ptr(), kv_indptr=positions["page_indptr"].data_ptr(), num_indices=pages.shape[0],
                batch_size=self.indices.batch_size, page_size=k.shape[1],
                num_pages=min(k.shape[0], v.shape[0], 2**31 - 1),  # page numbers have 32 bits
            )  # fmt: skip
            heads = [Heads(k, None, self._k, None), Heads(None, v, None, self._v)]
            self._keys, values = Rotation("rope_pages", heads, angles, params), self._v
        else:
            self._keys = Rotation("rope", [Heads(k[0, self._first : self.end], None, self._k, None)], angles)
            values = v[0, self._first : self.end]
        self._skipped = [0 if self._is_paged else self._first * t.stride(1) * t.element_size() for t in (k, v)]
        return {"q": view_of(out), "k": view_of(self._k[None]), "v": view_of(values[None])}

    def launch(self, pointers: list[int]) -> list[int]:
        q, k, v, out, *others = pointers
        self._record_stream()
        self._queries.move(rope=[q], rope_out=[out])
        self._queries.start()
        k, v = k + self._skipped[0], v + self._skipped[1]
        if self._v is None:
            self._keys.move(rope=[k])
        else:
            self._keys.move(rope=[k, 0], nope=[0, v])
            v = self._v.data_ptr()
        self._keys.start()
        return [out, self._k.data_ptr(), v, out, *others]

    def _angles(self, positions: torch.Tensor) -> Angles:
        return Angles(positions, None, None, None, False, self._logits.rope_scale, self._logits.rope_theta)


fit_workspace = RopePrologue.fit_workspace


def _positions(batch: _Batch, indices: Indices) -> dict[str, torch.Tensor]:
    """Positions of queries and keys in their requests, and the page of each key: int32, on the host."""
    requests = torch.arange(indices.batch_size, dtype=torch.int32, device="cpu")
    arrays = {
        "q": _within(batch.qo_lens) + (batch.kv_lens - batch.qo_lens).repeat_interleave(batch.qo_lens),
        "kv": _within(batch.kv_lens),
    }
    if indices.kv_indices is not None:
        arrays |= {"request": requests.repeat_interleave(batch.kv_lens), "page_indptr": indices.kv_indptr}
        if indices.kv_indices.is_cpu:
            arrays["pages"] = indices.kv_indices
    return {name: array.to(torch.int32) for name, array in arrays.items()}


def _within(lens: torch.Tensor) -> torch.Tensor:
    """0, 1, ... of each request."""
    begin = lens.cumsum(0) - lens
    return torch.arange(int(lens.sum()), device="cpu") - begin.repeat_interleave(lens)


def _upload(arrays: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Copies to the device asynchronously, in one copy."""
    sizes = [array.shape[0] for array in arrays.values()]
    packed = torch.cat([torch.nn.functional.pad(array, (0, -array.shape[0] % 4)) for array in arrays.values()])
    if device.type != "cpu":
        packed = packed.pin_memory().to(device, non_blocking=True)
    parts = torch.split(packed, [-(-size // 4) * 4 for size in sizes])
    return {name: part[:size] for name, part, size in zip(arrays, parts, sizes, strict=True)}
