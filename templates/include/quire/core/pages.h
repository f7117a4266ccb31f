// Finds tokens in a paged cache. No index array can lead to an address outside the cache or outside the arrays.
#pragma once
#include "quire/core/types.h"

namespace quire {

struct Place {
  int64_t page;  // -1: the token has no place in the cache
  int token_in_page;
};

// Where token i goes: to position positions[i] of request batch_indices[i], whose pages kv_indices names. A token has
// no place if its request does not exist, its position is beyond the request's pages, the request's pages are beyond
// kv_indices, or its page number names no page of the cache. Params: AppendParams, or a struct with the same tables.
template <class Params>
QUIRE_HD Place place_of(const Params& p, int64_t token) {
  constexpr Place kNowhere = {-1, 0};
  const int request = p.batch_indices[token], position = p.positions[token];
  if (request < 0 || request >= p.batch_size || position < 0) return kNowhere;
  const int page_of_request = position / p.page_size;
  const int64_t begin = p.kv_indptr[request], end = min<int64_t>(p.kv_indptr[request + 1], p.num_indices);
  if (begin < 0 || begin + page_of_request >= end) return kNowhere;
  const int page = p.kv_indices[begin + page_of_request];
  if (page < 0 || page >= p.num_pages) return kNowhere;
  return {page, position - page_of_request * p.page_size};
}

}  // namespace quire
