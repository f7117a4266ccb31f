"""Operations beside attention: appending to a cache, rotary embeddings, merging states, packing bits."""
