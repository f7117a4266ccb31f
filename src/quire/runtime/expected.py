"""What a plan expects of the tensors of run(): sizes, types, device, alignment and reach of each operand."""

from __future__ import annotations

from typing import NamedTuple

import torch

from quire.errors import ValidationError
from quire.kernels import Decision
from quire.kernels.operands import Operand, View
from quire.runtime.checks import check_contiguous_last, check_dtype, check_output, check_same_device, check_tensor
from quire.runtime.layout import span_bytes
from quire.runtime.options import PlanOptions
from quire.runtime.target import on_cuda
from quire.types import DType, KVLayout

#: The argument of plan() that says the number type of an operand.
_OPTION_OF = {"kv": "kv_data_type", "o": "o_data_type"}
_LAYOUT_HINTS = {
    KVLayout.NHD: " (read as kv_layout='NHD'; make the wrapper with 'HND' if heads come before tokens)",
    KVLayout.HND: " (shown in the order of NHD; the wrapper has kv_layout='HND')",
}


def view_of(tensor: torch.Tensor) -> View:
    """Where a tensor lies, its sizes and strides."""
    return View(tensor.data_ptr(), tuple(tensor.shape), tensor.stride())


class Expected(NamedTuple):
    """What the kernel declares of its operands, in the numbers of a plan."""

    decision: Decision
    options: PlanOptions
    layout: KVLayout
    device: torch.device

    def view(self, operand: Operand, tensor: torch.Tensor, name: str) -> View:
        """The view of a tensor with the operand's dimensions, in the order of the plan's layout."""
        (check_output if operand.name == "o" else check_tensor)(tensor, name)
        if "page_size" in operand.dims and self.layout is KVLayout.HND:
            tensor = tensor.transpose(1, 2)
        return view_of(tensor)

    def check(self, operand: Operand, tensor: torch.Tensor, name: str, view: View, nnz_qo: int) -> None:
        """Check a tensor against what the kernel declares."""
        dtype = self.options.types.kv if operand.type == "kv" else self.decision.key.type_of(operand.type)
        self._check_sizes(operand, name, view.sizes, nnz_qo)
        check_dtype(tensor, name, dtype, _OPTION_OF.get(operand.type, "q_data_type"))
        check_same_device(tensor, name, self.device)
        if len(operand.strides) < len(operand.dims):
            check_contiguous_last(tensor, name)
        self._check_alignment(view, name, dtype)
        self._check_reach(span_bytes(view.sizes, view.strides, tensor.dtype), name, operand.name)

    def _check_sizes(self, operand: Operand, name: str, sizes: tuple[int, ...], nnz_qo: int) -> None:
        options = self.options
        known = {"nnz_qo": nnz_qo, "num_pages": None, "nnz_prefix": None, "page_size": options.page_size or None}
        wanted = [known[dim] if dim in known else getattr(options, dim) for dim in operand.dims]
        if len(sizes) == len(wanted) and all(w in (None, size) for w, size in zip(wanted, sizes, strict=True)):
            return
        dims = [dim if size is None else f"{dim}={size}" for dim, size in zip(operand.dims, wanted, strict=True)]
        if dims[0] == "num_pages" and not options.page_size:
            dims, sizes = ["nnz_kv", *dims[2:]], sizes[1:]
        layout = _LAYOUT_HINTS[self.layout] if operand.type == "kv" else ""
        raise ValidationError(f"{name}: expected [{', '.join(dims)}], got {list(sizes)}{layout}.")

    def _check_alignment(self, view: View, name: str, dtype: DType) -> None:
        """GPU kernels load 16 bytes at a time."""
        if not on_cuda(self.device):
            return
        step = 128 // dtype.bits
        if view.pointer % 16 or any(stride % step for stride in view.strides if stride != 1):
            raise ValidationError(
                f"{name}: expected a 16-byte aligned tensor whose strides are multiples of {step} elements, "
                f"got address {view.pointer:#x} and strides {list(view.strides)}; call .contiguous() on it."
            )

    def _check_reach(self, num_bytes: int, name: str, operand: str) -> None:
        """Some kernels find rows by numbers of 32 bits."""
        kernel = self.decision.kernel
        most = kernel.max_bytes(self.decision.key, operand)
        if most and num_bytes > most:
            raise ValidationError(
                f"{name}: expected at most {most} bytes from its first element to its last, which {kernel.name} "
                f"reaches, got {num_bytes}; plan with another backend."
            )


def check_floats(tensor: torch.Tensor, name: str, device: torch.device) -> None:
    """Check lse, or sinks: contiguous float32 on the device of the plan."""
    check_same_device(tensor, name, device)
    if tensor.dtype is not torch.float32 or not tensor.is_contiguous():
        raise ValidationError(
            f"{name}: expected a contiguous float32 tensor, got {tensor.dtype}, strides {tuple(tensor.stride())}."
        )
