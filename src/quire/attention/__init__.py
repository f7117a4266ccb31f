"""The wrappers with plan() and run(). As FlashInfer's module `attention` it has the wrappers for mixed batches."""

from quire.attention.batch import BatchAttention, BatchAttentionWithAttentionSinkWrapper
from quire.attention.ranges import BatchPrefillWithCausalBidirectionalRangesWrapper

__all__ = [
    "BatchAttention", "BatchAttentionWithAttentionSinkWrapper", "BatchPrefillWithCausalBidirectionalRangesWrapper",
]  # fmt: skip
