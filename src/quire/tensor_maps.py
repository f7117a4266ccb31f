"""The descriptors that the copy engine of Hopper GPUs reads: encoded for a form of tensors, moved with the tensors."""

from __future__ import annotations

import ctypes

import torch

from quire.jit.driver import encode_tensor_map, move_tensor_map
from quire.kernels import Decision
from quire.kernels.attention import Geometry

__all__ = ["TensorMaps"]

Pointers = tuple[int, int, int]  #: of q, k and v


class TensorMaps:
    """The tensor maps inside one parameter struct."""

    def __init__(self, decision: Decision, params: ctypes.Structure) -> None:
        self._decision = decision
        self._params = params
        self._maps: list[tuple[int, int]] = []  # address of the descriptor, which tensor
        self._at: Pointers = (0, 0, 0)  # where the tensors are that the descriptors describe

    def encode(self, geometry: Geometry, pointers: Pointers) -> None:
        """Describe tensors of this geometry at these addresses."""
        kernel, key = self._decision.kernel, self._decision.key
        assert kernel.copies is not None
        self._maps, self._at = [], pointers
        for copy in kernel.copies(key, kernel.tile(key), geometry):
            dtype = key.q if copy.tensor == "q" else key.kv
            place = ctypes.addressof(self._params) + getattr(type(self._params), copy.field).offset
            strides = [stride * dtype.bytes for stride in copy.strides]
            name, which = "bf16" if dtype.torch is torch.bfloat16 else "f16", "qkv".index(copy.tensor)
            encode_tensor_map(place, name, pointers[which], copy.dims, strides, copy.box)
            self._maps.append((place, which))

    def move(self, pointers: Pointers) -> None:
        """The same tensors at other addresses."""
        if pointers == self._at:
            return
        for place, which in self._maps:
            if self._at[which] != pointers[which]:
                move_tensor_map(place, pointers[which])
        self._at = pointers
