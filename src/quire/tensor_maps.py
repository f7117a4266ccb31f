"""The descriptors that the copy engine of Hopper GPUs reads: encoded for a form of tensors, moved with the tensors."""

from __future__ import annotations

import ctypes

import torch

from quire.jit.driver import encode_tensor_map, move_tensor_map
from quire.kernels import Decision
from quire.kernels.attention import Geometry

__all__ = ["TensorMaps"]


class TensorMaps:
    """The tensor maps inside one parameter struct."""

    def __init__(self, decision: Decision, params: ctypes.Structure) -> None:
        self._decision = decision
        self._params = params
        self._maps: list[tuple[int, str]] = []  # address of the descriptor, tensor
        self._at: dict[str, int] = {}  # where the tensors are that the descriptors describe

    def encode(self, geometry: Geometry, pointers: dict[str, int]) -> None:
        """Describe tensors of this geometry at these addresses; "q", "k" and "v"."""
        kernel, key = self._decision.kernel, self._decision.key
        assert kernel.copies is not None
        dtypes = {"q": key.q, "k": key.kv, "v": key.kv}
        self._maps, self._at = [], dict(pointers)
        for copy in kernel.copies(key, kernel.tile(key), geometry):
            dtype = dtypes[copy.tensor]
            place = ctypes.addressof(self._params) + getattr(type(self._params), copy.field).offset
            strides = [stride * dtype.bytes for stride in copy.strides]
            name = "bf16" if dtype.torch is torch.bfloat16 else "f16"
            encode_tensor_map(place, name, pointers[copy.tensor], copy.dims, strides, copy.box)
            self._maps.append((place, copy.tensor))

    def move(self, pointers: dict[str, int]) -> None:
        """The same tensors at other addresses."""
        for place, name in self._maps:
            if self._at[name] != pointers[name]:
                move_tensor_map(place, pointers[name])
        self._at = pointers
