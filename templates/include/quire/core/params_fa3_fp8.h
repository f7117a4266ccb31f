// The parameters of the fa3 kernel for 8-bit queries: those of fa3, and scales of query heads. AttentionFa3Fp8Params in
// quire/kernels/params.py mirrors them.
#pragma once
#include "quire/core/params_fa3.h"

namespace quire {

// The tensor maps are of 8-bit elements, and a row of a box has 128. v has boxes of half a KV tile.
struct AttentionFa3Fp8Params : AttentionFa3Params {
  const float* q_scales;  // [num_qo_heads] factors of each head's logits, by stride; or null
  int64_t q_scales_head_stride;
  unsigned char to_64[48];
};

}  // namespace quire
