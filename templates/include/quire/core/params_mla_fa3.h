// The parameters of the MLA kernel for Hopper. AttentionMlaFa3Params in quire/kernels/params.py mirrors them.
#pragma once
#include "quire/core/params_fa3.h"

namespace quire {

// As in AttentionMlaParams q is q_pe, k is kpe and v is ckv, of `base` and of the tensor maps; tensor_q is not read.
struct AttentionMlaFa3Params : AttentionFa3Params {
  const void* q_nope;  // [nnz_qo, num_qo_heads, head_dim_vo], by strides
  int64_t q_nope_token_stride, q_nope_head_stride;
  int32_t num_pages;  // where tokens are gathered: page numbers below 0 or from here on are of no token
  // As in AttentionMlaParams.
  const float* ckv_scales;
  int64_t ckv_scales_page_stride, ckv_scales_token_stride, ckv_scales_head_stride;
};

}  // namespace quire
