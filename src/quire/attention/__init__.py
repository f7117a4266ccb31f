"""The wrappers with plan() and run(). As FlashInfer's module `attention` it has the wrappers for mixed batches."""

from quire.attention.batch import BatchAttention, BatchAttentionWithAttentionSinkWrapper

__all__ = ["BatchAttention", "BatchAttentionWithAttentionSinkWrapper"]
