"""Tensor maps (TMA descriptors) of Hopper: encoded once per signature of tensors, patched when addresses change."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from quire.jit.driver import encode_tensor_map, move_tensor_map
from quire.kernels import Decision
from quire.kernels.operands import View
from quire.kernels.params import TensorMap


class EncodedMaps(NamedTuple):
    """Encoded tensor maps, which can be copied into any parameter struct of the same kernel."""

    maps: tuple[tuple[int, int, bytes], ...]  #: offset in the struct, index of the operand, the map
    pointers: tuple[int, ...]  #: where the operands lay


class TensorMaps:
    """The tensor maps inside one parameter struct."""

    def __init__(self, decision: Decision, params: ctypes.Structure, device: int) -> None:
        self._decision, self._device = decision, device
        self._params = params
        self._address = ctypes.addressof(params)
        self._maps: list[tuple[int, int]] = []  # offset of each map in the struct, index of its operand
        self._pointers: tuple[int, ...] = ()  # of the operands that the maps describe

    def encode(self, views: Mapping[str, View]) -> None:
        """Encode tensor maps for these operands."""
        kernel, key = self._decision.kernel, self._decision.key
        assert kernel.copies is not None
        operands = self._decision.tensors
        names = [operand.name for operand in operands if operand.name in views]
        self._maps, self._pointers = [], tuple(views[name].pointer for name in names)
        for copy in kernel.copies(key, kernel.tile(key), views):
            index = names.index(copy.operand)
            dtype = key.type_of(operands[index].type)
            offset, strides = (
                getattr(type(self._params), copy.field).offset,
                [s * dtype.bits // 8 for s in copy.strides],
            )
            out, pointer = self._address + offset, self._pointers[index]
            encode_tensor_map(
                out, dtype.tensor_map, pointer, copy.dims, strides, copy.box, device=self._device,
                promotion=copy.promotion,
            )  # fmt: skip
            self._maps.append((offset, index))

    def encoded(self) -> EncodedMaps:
        """A copy of the maps."""
        size = ctypes.sizeof(TensorMap)
        maps = ((offset, index, ctypes.string_at(self._address + offset, size)) for offset, index in self._maps)
        return EncodedMaps(tuple(maps), self._pointers)

    def copy_from(self, encoded: EncodedMaps) -> None:
        """Take the maps of another plan of the same kernel, for operands of the same signature."""
        for offset, _, tensor_map in encoded.maps:
            ctypes.memmove(self._address + offset, tensor_map, len(tensor_map))
        self._maps, self._pointers = [(offset, index) for offset, index, _ in encoded.maps], encoded.pointers

    def move(self, pointers: Sequence[int]) -> None:
        """Patch the tensor maps for other addresses of the same operands."""
        pointers = tuple(pointers)
        if pointers == self._pointers:
            return
        for offset, index in self._maps:
            if self._pointers[index] != pointers[index]:
                move_tensor_map(self._address + offset, pointers[index], self._device)
        self._pointers = pointers
