"""Multi-head latent attention (MLA): the names of FlashInfer's flashinfer.mla, which no kernel of Quire serves yet."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from quire.errors import UnsupportedError
from quire.runtime.workspace import UserWorkspace

__all__ = ["BatchMLAPagedAttentionWrapper"]


class BatchMLAPagedAttentionWrapper:
    """MLA over a paged cache of latents. It can be constructed, so that an engine that uses it for some batches and the
    ragged prefill wrapper for others runs the latter; plan() and run() raise UnsupportedError.

    float_workspace_buffer: as of the other wrappers. The buffers and `backend` are not looked at.

    >>> wrapper = quire.BatchMLAPagedAttentionWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    >>> try:
    ...     wrapper.plan()
    ... except quire.UnsupportedError as error:
    ...     str(error).split(":")[0]
    'BatchMLAPagedAttentionWrapper'
    """

    def __init__(self, float_workspace_buffer: torch.Tensor, *_args: Any, **_options: Any) -> None:
        self._workspace = UserWorkspace(float_workspace_buffer, "float_workspace_buffer")

    def plan(self, *_args: Any, **_options: Any) -> NoReturn:
        """Raises UnsupportedError."""
        raise UnsupportedError(
            "BatchMLAPagedAttentionWrapper: no kernel attends to compressed keys (head dims 576 and 512) yet; "
            "decompress them for BatchPrefillWithRaggedKVCacheWrapper (192 and 128), or use another backend."
        )

    begin_forward = run = plan
