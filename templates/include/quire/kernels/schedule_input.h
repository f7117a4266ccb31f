// The input of the host's scheduler, and its results.
#pragma once
#include "quire/core/params.h"

namespace quire {

enum class ScheduleError : int32_t {
  kNone = 0,
  kQoIndptrStart,  // qo_indptr[0] != 0
  kQoIndptrOrder,  // qo_indptr decreases at `error_request`
  kKvIndptrStart,  // kv_indptr[0] < 0
  kKvIndptrOrder,
  kLastPageLen,   // kv_last_page_len[error_request] not in 1..page_size (0 is allowed for a request without pages)
  kTooManyRows,   // query tokens times group_size exceed 2^31 - 1 with error_request
  kCapacity,      // more row tiles than tile_capacity
  kMemory,        // malloc failed
  kPages,         // fewer page numbers than kv_indptr[batch_size]
  kTooManyTiles,  // row tiles times KV heads exceed kMaxTiles with error_request
  kTooManyUnits,  // work units, or rows of partial results, exceed 2^31 - 1
  kTooLong,       // error_request has more than 2^31 - 1 tokens of keys
  kSeqLens,       // seq_lens[error_request] is not what the other arrays say
};

struct ScheduleInput {
  const int32_t* qo_indptr;         // [batch_size + 1]; null: qo_len rows per request; cascade: [batch_size, 2]
  const int32_t* kv_indptr;         // [batch_size + 1] tokens, or pages with kv_last_page_len
  const int32_t* kv_last_page_len;  // [batch_size]; null: ragged
  const int32_t* kv_indices;        // [nnz_kv] page numbers that travel in the buffer; null: none do
  const int32_t* seq_lens;          // [batch_size] tokens, which repeat the arrays above; null: they are not repeated
  const int32_t* prefix_indptr;     // a cascade whose shared keys lie in separate tensors: [num_shared_nodes + 1]
                                    // their rows there, and kv_indptr has no pages or tokens of these nodes; else null
  int32_t* kept;                    // capacity for kv_indptr, qo_indptr and kv_last_page_len, one after another
  void* buffer;                     // filled if it holds staged_bytes
  int64_t capacity;                 // bytes of it
  int64_t num_pages;                // page numbers that there are, here or on the device; -1: ragged
  int32_t batch_size;
  int32_t qo_len;  // rows per request when qo_indptr is null
  int32_t num_kv_heads;
  int32_t group_size;
  int32_t page_size;
  int32_t tile_rows;  // packed rows of a row tile
  int32_t tile_kv;    // tokens of a KV tile
  int32_t mask_mode;
  int32_t window_left;       // -1: none
  int32_t start_cost;        // of a work tile, in sixteenths of a unit; see WorkSequence
  int32_t max_ctas;          // CTAs that fill the machine: as many partitions at most
  int32_t fixed_split_size;  // tokens, a multiple of tile_kv: row tiles are divided there and nowhere else; 0:
                             // automatic; -1: never divided
  int32_t splits_by_length;  // with fixed_split_size: splits of a request have as many tokens as splits_of() says,
                             // which fixed_split_size divides
  int32_t has_tile_counter;  // CTAs stay, and take whole row tiles as they get to them
  int32_t l2_tokens;         // with tile counter: tokens of one KV head that may lie in L2 at a time
  // A cascade: the entries of the batch are its nodes, level by level, with the begin and end of each one's rows; so
  // many of them are those of shared levels. 0: no cascade.
  int32_t num_shared_nodes;
  int32_t arrives_late;   // a cascade's CTAs arrive at requests' merge groups when they have nothing else to do
  int32_t tile_capacity;  // 0: exact; else for a CUDA graph: max_ctas partitions and arrays at fixed places, always
};

struct ScheduleOutput {
  int32_t error;  // ScheduleError
  int32_t error_request;
  int32_t has_kept;  // the index arrays lie in `kept`
  int32_t num_tiles;
  int32_t num_ctas;            // partitions, or row tiles times KV heads
  int32_t is_partitioned;      // there are partitions
  int32_t is_dynamic;          // they say that CTAs take whole row tiles from the tile counter
  int32_t heads_per_l2_group;  // with tile counter: KV heads whose keys and values stay in L2, a divisor of all
  int32_t work_per_head;       // work units of one KV head
  int32_t nnz_qo;
  int64_t nnz_kv;  // ragged: rows of k; paged: entries of kv_indices
  int64_t num_partials;
  int64_t num_groups;  // merge groups
  int64_t mask_bytes;  // of the packed custom mask
  int64_t kv_tokens;
  int32_t least_page;    // of kv_indices; 0 without any
  int32_t largest_page;  // of kv_indices; -1 without any
  // The packed buffer: byte offsets of its arrays, its size, how much of that is filled, and with page numbers behind
  // it.
  int64_t tile_counter_offset, groups_offset, partitions_offset, mask_indptr_offset, tiles_offset;
  int64_t buffer_bytes, filled_bytes, staged_bytes;
};

struct ScheduleParams {
  ScheduleInput input;
  ScheduleOutput output;
};

}  // namespace quire
