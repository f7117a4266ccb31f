"""Tensor maps of Hopper's copy engine: encoded once for a signature of tensors, patched when addresses change."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from quire.jit.driver import encode_tensor_map, move_tensor_map
from quire.kernels import Decision
from quire.kernels.attention import Geometry
from quire.kernels.params import TensorMap

__all__ = ["Described", "Pointers", "TensorMaps"]

Pointers = tuple[int, int, int]  #: of q, k and v


class Described(NamedTuple):
    """Descriptors that any parameter struct of a kernel may hold."""

    maps: tuple[tuple[int, int, bytes], ...]  #: offset in the struct, which of the tensors, the descriptor
    at: Pointers  #: where the tensors were


class TensorMaps:
    """The tensor maps inside one parameter struct."""

    def __init__(self, decision: Decision, params: ctypes.Structure) -> None:
        self._decision = decision
        self._params = params
        self._address = ctypes.addressof(params)
        self._maps: list[tuple[int, int]] = []  # offset of the descriptor, which of the tensors
        self._at: Pointers = (0, 0, 0)  # where the tensors are that the descriptors describe

    def encode(self, geometry: Geometry, pointers: Pointers) -> None:
        """Describe tensors of this geometry at these addresses."""
        kernel, key = self._decision.kernel, self._decision.key
        assert kernel.copies is not None
        self._maps, self._at = [], pointers
        for copy in kernel.copies(key, kernel.tile(key), geometry):
            dtype = key.q if copy.tensor == "q" else key.kv
            offset = getattr(type(self._params), copy.field).offset
            strides = [stride * dtype.bytes for stride in copy.strides]
            name, which = "bf16" if dtype.torch is torch.bfloat16 else "f16", "qkv".index(copy.tensor)
            encode_tensor_map(self._address + offset, name, pointers[which], copy.dims, strides, copy.box)
            self._maps.append((offset, which))

    def described(self) -> Described:
        """A copy of the descriptors."""
        size = ctypes.sizeof(TensorMap)
        maps = ((offset, which, ctypes.string_at(self._address + offset, size)) for offset, which in self._maps)
        return Described(tuple(maps), self._at)

    def take(self, described: Described) -> None:
        """The descriptors of another plan of the same kernel, for tensors of the same geometry."""
        for offset, _, descriptor in described.maps:
            ctypes.memmove(self._address + offset, descriptor, len(descriptor))
        self._maps, self._at = [(offset, which) for offset, which, _ in described.maps], described.at

    def move(self, pointers: Pointers) -> None:
        """The same tensors at other addresses."""
        if pointers == self._at:
            return
        for offset, which in self._maps:
            if self._at[which] != pointers[which]:
                move_tensor_map(self._address + offset, pointers[which])
        self._at = pointers
