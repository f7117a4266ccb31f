"""A kernel of some instructions, interpreted or run on a GPU: a CTA whose threads each have words of three arrays."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_void_p
from functools import partial

import numpy as np
import torch

from ptx.memory import Array, GlobalMemory
from ptx.program import parse
from ptx.threads import Grid, Turns
from quire.jit import machine, module

_SOURCE = """
.version 8.0
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 smem[];
.visible .entry probe(.param .align 8 .b8 given[32])
{
  .reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<40>; .reg .b64 %rd<16>;
  ld.param.u64 %rd1, [given]; ld.param.u64 %rd2, [given+8]; ld.param.u64 %rd3, [given+16];
  ld.param.u64 %rd4, [given+24]; mov.u32 %r0, %tid.x; mul.wide.u32 %rd0, %r0, 4;
  add.s64 %rd1, %rd1, %rd0; add.s64 %rd2, %rd2, %rd0; add.s64 %rd3, %rd3, %rd0;
  mul.wide.u32 %rd5, %r0, 16; add.s64 %rd4, %rd4, %rd5;
  ld.global.u32 %r1, [%rd1]; ld.global.u32 %r2, [%rd2]; ld.global.u32 %r3, [%rd3];
  mov.u32 %r4, 0; mov.u32 %r5, 0; mov.u32 %r6, 0; mov.u32 %r7, 0;
  BODY
  st.global.v4.u32 [%rd4], {%r4, %r5, %r6, %r7};
  ret;
}
"""
SMEM = 4096  #: bytes of shared memory


def interpret(body: str, *inputs: Array, turns: Turns = Turns.NONE) -> Array:
    """uint32 [threads, 4]: registers %r4 to %r7 after `body`; %r0 is the thread, %r1 to %r3 are words of the inputs."""
    arrays, result = _arrays(inputs)
    tensors = [torch.from_numpy(a) for a in (*arrays, result)]
    memory = GlobalMemory({t.data_ptr(): t.nbytes for t in tensors})
    params = memory.relocate(_params(*(t.data_ptr() for t in tensors)))
    Grid(parse(_SOURCE.replace("BODY", body)), "probe", memory, params, 1, len(result), SMEM, turns).run()
    return result.view(np.uint32)


def run(body: str, *inputs: Array) -> Array:
    """The same on a GPU."""
    arrays, result = _arrays(inputs)
    tensors = [torch.from_numpy(a).cuda() for a in (*arrays, result)]
    api, library, kernel, function = machine.driver(), c_void_p(), c_void_p(), c_void_p()
    params = ctypes.create_string_buffer(_params(*(t.data_ptr() for t in tensors)))
    call = module._Call.from_buffer_copy(module._PLAIN)
    call.grid_x, call.block_x, call.smem, call.params = 1, len(result), SMEM, ctypes.addressof(params)
    call.stream = torch.cuda.current_stream().cuda_stream
    with api.current(0):
        text = _SOURCE.replace("BODY", body).encode()
        api.call("cuLibraryLoadData", byref(library), text, None, None, 0, None, None, 0, context=body)
        api.call("cuLibraryGetKernel", byref(kernel), library, b"probe")
        api.call("cuKernelGetFunction", byref(function), kernel)
        given = partial(byref, call)
        api.call("cuLaunchKernelEx", given(), function, given(module._Call.params.offset), None)
    torch.cuda.synchronize()
    return tensors[-1].cpu().numpy().view(np.uint32)


def _arrays(inputs: tuple[Array, ...]) -> tuple[list[Array], Array]:
    threads = len(inputs[0]) if inputs else 32
    words = [np.ascontiguousarray(given).view(np.int32).copy() for given in inputs]
    words += [np.zeros(threads, np.int32) for _ in range(3 - len(inputs))]
    return words, np.zeros((threads, 4), np.int32)


def _params(*addresses: int) -> bytes:
    return np.array(addresses, np.uint64).tobytes()
