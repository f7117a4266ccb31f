"""What becomes of each argument that the manual's pages show: declared here, written to docs/surface.md.

    python tests/surface.py   # writes docs/surface.md

A line of TABLE is `names: how test`: `used` (the test compares the effect with tests/oracle.py), `checked` (a
repetition or a permission with an effect: the test shows that it is taken, and wrong values refused), or `foreign`: the
function declares with @foreign (engine/options.py) what becomes of it. A function stands before the lines of its
arguments, and `shown` before those that a page has.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import quire
import quire.compat.flash_mla
from quire.engine.options import Policy

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "surface.md"
HEAD = """# What becomes of each argument

The functions of the pages of FlashInfer's manual that Quire follows, with all of their arguments. *used*: the test
compares the argument's effect with `tests/oracle.py`, in float64. *checked*: something that repeats other arguments, or
a permission that some kernels make use of; the test shows that it is taken and that wrong values are refused.
*permission*: its type is checked, and it has no effect, for the reason that follows. *refused*: anything but the
default raises an error that names the argument. *older name*: of a keyword. **Bold** arguments are those of the pages;
the others came later, or are Quire's own. `python tests/surface.py` writes this page from the signatures and from what
functions declare with `@foreign`, and `tests/test_surface.py` compares them.
"""
#: Stands before the functions that no page shows.
MORE = """
## Other functions

What becomes of further arguments that these functions take for the sake of other libraries' callers:

| function | argument | |
|---|---|---|
"""


def named(path: str) -> Any:
    """A function or class of quire."""
    return reduce(getattr, path.split("."), quire)


def policy_of(value: Any) -> Policy:
    """What a function, or the constructor of a class, declares."""
    return getattr(value.__init__ if inspect.isclass(value) else value, "policy", Policy({}, {}, {}))


def names_of(policy: Policy) -> tuple[str, ...]:
    """All arguments that it declares."""
    return (*policy.refused, *policy.permissions, *policy.older_names)


def words_of(policy: Policy, name: str) -> str:
    """What becomes of an argument."""
    if name in policy.older_names:
        return f"older name of {policy.older_names[name]}"
    what, why = ("refused", policy.refused) if name in policy.refused else ("permission", policy.permissions)
    return f"{what}: {why[name]}" if why[name] else what


class Row(NamedTuple):
    """An argument: what becomes of it, and the test that shows it."""

    argument: str
    how: str  #: used, checked or refused
    test: str
    words: str  #: what becomes of it, with the reason


class Function(NamedTuple):
    """A function of the surface, and what a page shows of it."""

    path: str
    shown: tuple[str, ...]  #: the arguments of the page
    rows: tuple[Row, ...]

    @property
    def parameters(self) -> set[str]:
        """All names that its arguments have."""
        value = named(self.path)
        parameters = inspect.signature(value).parameters.values()
        names = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name != "self"}
        return names | set(policy_of(value).older_names)


#: function: shown by the pages / arguments of the page / what becomes of which
TABLE = """
xqa.xqa
  shown q k_cache v_cache page_table seq_lens output workspace_buffer semaphores num_kv_heads page_size sinks q_scale
  shown kv_scale sliding_win_size sm_count head_dim sliding_window_size pos_encoding_mode rope_scale rope_theta
  q k_cache v_cache page_table seq_lens output num_kv_heads page_size: used test_xqa_function.py::test_the_oldest_page
  kv_layout: used test_xqa_function.py::test_page_sizes
  sinks: used test_xqa_function.py::test_sinks_in_both_shapes
  q_scale kv_scale: used test_xqa_function.py::test_scales
  sliding_win_size sliding_window_size: used test_xqa_function.py::test_windows
  rcp_out_scale: used test_xqa_function.py::test_e4m3_in_and_out
  q_seq_len mask: used test_xqa_function.py::test_drafts
  q_cu_seq_lens: used test_padded_queries.py::test_xqa_and_trtllm_take_them_too
  pos_encoding_mode rope_scale rope_theta: used test_xqa_function.py::test_position_encodings
  workspace_buffer semaphores sm_count enable_pdl: checked test_xqa_function.py::test_permissions_are_not_needed
  head_dim: checked test_xqa_function.py::test_wrong_arguments
  k_sf_cache v_sf_cache: used test_nvfp4.py::test_xqa
  backend: used test_xqa_function.py::test_page_sizes
  variant: used test_variants.py::test_xqa
xqa_mla
  shown q k_cache v_cache page_table seq_lens head_dim page_size num_kv_heads
  q k_cache v_cache page_table seq_lens output q_scale kv_scale: used test_mla.py::test_xqa_mla
  head_dim page_size num_kv_heads: used test_seed_pages.py::test_xqa_pages_by_keyword
  workspace_buffer semaphores sm_count enable_pdl: checked test_mla.py::test_xqa_mla
  backend: used test_mla.py::test_xqa_mla
mla.BatchMLAPagedAttentionWrapper
  shown float_workspace_buffer use_cuda_graph qo_indptr kv_indptr kv_indices kv_len_arr backend
  float_workspace_buffer backend: used test_mla.py::test_page_sizes_and_forms
  use_cuda_graph qo_indptr kv_indptr kv_indices kv_len_arr: used test_mla.py::test_cuda_graphs_follow_new_lengths
  variant: used test_mla_variants.py::test_scores_and_masks
  deterministic: used test_determinism.py::test_latents
mla.BatchMLAPagedAttentionWrapper.plan
  shown qo_indptr kv_indptr kv_indices kv_len_arr num_heads head_dim_ckv head_dim_kpe page_size causal sm_scale
  shown q_data_type kv_data_type use_profiler metadata cum_seq_lens_q block_tables seq_lens max_q_len
  qo_indptr: used test_mla.py::test_ragged_queries
  kv_indptr kv_indices kv_len_arr page_size q_data_type kv_data_type: used test_mla.py::test_page_sizes_and_forms
  num_heads: used test_mla.py::test_heads
  causal sm_scale: used test_mla.py::test_several_queries
  metadata cum_seq_lens_q block_tables seq_lens: used test_mla.py::test_metadata
  max_q_len: checked test_mla.py::test_metadata
  lse_mode: checked test_mla.py::test_lse_of_both_bases
  head_dim_ckv head_dim_kpe: checked test_mla.py::test_arguments_are_used_or_refused
  query_layout kv_cache_layout: foreign test_mla.py::test_arguments_are_used_or_refused
  output_dtype output_scale scale_mode: checked test_mla.py::test_arguments_are_used_or_refused
  enable_pdl use_sinks: checked test_mla.py::test_what_plan_says_of_sinks
  use_profiler skip_softmax: foreign test_mla.py::test_arguments_are_used_or_refused
  fixed_split_size disable_split_kv: used test_mla.py::test_fixed_splits_do_not_depend_on_neighbours
mla.BatchMLAPagedAttentionWrapper.run
  shown q_nope q_pe ckv_cache kpe_cache out lse return_lse profiler_buffer kv_len page_table return_lse_base_on_e
  shown o_scale query kv_cache ckv_scale ckv_scale_arr kpe_scale
  q_nope q_pe ckv_cache kpe_cache out lse return_lse: used test_mla.py::test_page_sizes_and_forms
  return_lse_base_on_e: used test_mla.py::test_lse_of_both_bases
  query kv_cache: used test_mla.py::test_queries_and_cache_as_one_tensor_or_a_pair
  kv_len page_table: used test_mla.py::test_run_without_a_plan
  ckv_scale kpe_scale: used test_mla.py::test_arguments_are_used_or_refused
  ckv_scale_arr: used test_packed_latents.py::test_scales_beside_the_cache
  sinks: used test_mla.py::test_sinks
  enable_pdl: checked test_mla.py::test_arguments_are_used_or_refused
  profiler_buffer o_scale: foreign test_mla.py::test_arguments_are_used_or_refused
  bmm1_scale bmm2_scale skip_softmax_threshold_scale_factor: foreign test_mla.py::test_what_plan_says_of_sinks
mla.trtllm_batch_decode_with_kv_cache_mla
  shown query kv_cache workspace_buffer qk_nope_head_dim kv_lora_rank qk_rope_head_dim block_tables seq_lens
  shown max_seq_len out bmm1_scale bmm2_scale sinks enable_pdl backend
  query kv_cache block_tables seq_lens out lse return_lse sinks: used test_mla.py::test_trtllm_decode
  workspace_buffer max_seq_len: used test_mla.py::test_trtllm_decode
  bmm1_scale bmm2_scale: used test_mla.py::test_trtllm_decode
  cum_seq_lens_q max_q_len: used test_mla.py::test_trtllm_decode_of_ragged_queries
  return_lse_base: used test_mla.py::test_base_of_a_call_on_tables
  qk_nope_head_dim kv_lora_rank qk_rope_head_dim backend: checked test_mla.py::test_trtllm_decode_refuses_by_name
  is_var_seq cute_dsl_impl kv_scale_format: foreign test_mla.py::test_trtllm_decode_refuses_by_name
  enable_pdl: checked test_mla.py::test_trtllm_decode_refuses_by_name
  multi_ctas_kv_counter_buffer: foreign test_mla.py::test_trtllm_decode_refuses_by_name
  sparse_mla_top_k sparse_mla_top_k_lens: used test_mla.py::test_sparse_decode
  enable_dcp: foreign test_mla.py::test_trtllm_decode_refuses_by_name
  skip_softmax_threshold_scale_factor uses_shared_paged_kv_idx: foreign test_mla.py::test_trtllm_decode_refuses_by_name
  cp_world cp_rank causal_seqlens_kv_global: foreign test_mla.py::test_trtllm_decode_refuses_by_name
  use_fp16_softmax: foreign test_mla.py::test_trtllm_decode_refuses_by_name
xqa_batch_decode_with_kv_cache
  shown query kv_cache workspace_buffer block_tables seq_lens max_seq_len bmm1_scale bmm2_scale window_left out sinks
  shown kv_layout enable_pdl q_len_per_req o_scale mask kv_cache_sf
  query kv_cache block_tables out: used test_xqa.py::test_cache_forms
  seq_lens: used test_xqa.py::test_seq_lens
  max_seq_len o_scale enable_pdl: checked test_xqa.py::test_wrong_arguments
  workspace_buffer: checked test_xqa.py::test_workspace_may_hold_anything
  bmm1_scale bmm2_scale: used test_xqa.py::test_scales
  window_left: used test_xqa.py::test_windows
  sinks: used test_xqa.py::test_sinks
  kv_layout: used test_xqa.py::test_page_sizes
  q_len_per_req: used test_xqa.py::test_several_queries_are_causal
  mask: used test_xqa.py::test_draft_trees
  q_cu_seq_lens: used test_padded_queries.py::test_drafts_are_causal
  kv_cache_sf: used test_nvfp4.py::test_calls_over_block_tables
  variant: used test_variants.py::test_decode_on_tables_of_pages
  backend: used test_xqa.py::test_page_sizes
cudnn_batch_decode_with_kv_cache
  q k_cache v_cache scale actual_seq_lens_kv block_tables out return_lse lse: used test_cudnn.py::test_decode
  q_len_per_req window_left sinks backend: used test_cudnn.py::test_decode
  workspace_buffer max_sequence_kv: checked test_cudnn.py::test_wrong_arguments_of_decode
  batch_offsets_q batch_offsets_o: checked test_cudnn.py::test_lengths_and_offsets_of_decode
  is_cuda_graph_compatible: foreign test_cudnn.py::test_lengths_and_offsets_of_decode
  batch_offsets_k batch_offsets_v: foreign test_cudnn.py::test_wrong_arguments_of_decode
cudnn.cudnn_batch_prefill_with_kv_cache
  q k_cache v_cache scale actual_seq_lens_q actual_seq_lens_kv block_tables: used test_cudnn.py::test_prefill
  causal return_lse out lse lse_base backend: used test_cudnn.py::test_prefill
  q_scale k_scale v_scale o_data_type: used test_cudnn.py::test_eight_bits_and_their_scales
  batch_offsets_stats batch_offsets_units: used test_cudnn.py::test_offsets
  batch_offsets_q batch_offsets_k batch_offsets_v batch_offsets_o: checked test_cudnn.py::test_offsets
  workspace_buffer max_token_per_sequence max_sequence_kv: checked test_cudnn.py::test_wrong_arguments_of_prefill
  is_cuda_graph_compatible: foreign test_cudnn.py::test_wrong_arguments_of_prefill
single_prefill_with_kv_cache
  shown q k v
  q k v causal: used test_single.py::test_prefill_lengths
  o_dtype return_lse: used test_single.py::test_prefill_returns
  custom_mask packed_custom_mask: used test_single.py::test_prefill_custom_mask
  variant: used test_variants.py::test_single_calls
  kv_layout: used test_single.py::test_prefill_layouts
  sm_scale window_left logits_soft_cap: used test_single.py::test_prefill_window_soft_cap_scale
  k_scale v_scale: used test_single.py::test_prefill_scales
  pos_encoding_mode rope_scale rope_theta: used test_positions.py::test_positions_of_single_calls
  use_fp16_qk_reduction allow_fp16_qk_reduction: foreign test_surface.py::test_permissions_of_single_prefill
  scale_q scale_k scale_v: used test_fp8.py::test_queries_of_eight_bits
  kv_cache_sf: used test_nvfp4.py::test_single_prefill
  deterministic: used test_determinism.py::test_one_call_is_the_wrapper
  backend: used test_single.py::test_prefill_lengths
BatchPrefillWithPagedKVCacheWrapper
  shown float_workspace_buffer kv_layout use_cuda_graph qo_indptr_buf paged_kv_indptr_buf paged_kv_indices_buf
  shown paged_kv_last_page_len_buf custom_mask_buf qk_indptr_buf backend
  float_workspace_buffer: used test_workspace.py::test_exactly_what_is_needed
  kv_layout: used test_prefill.py::test_page_sizes
  use_cuda_graph qo_indptr_buf paged_kv_indptr_buf paged_kv_indices_buf: used test_graph.py::test_paged_prefill
  paged_kv_last_page_len_buf: used test_graph.py::test_paged_prefill
  custom_mask_buf: used test_graph.py::test_paged_prefill_with_masks
  mask_indptr_buf qk_indptr_buf: checked test_prefill.py::test_buffers_by_both_names
  variant_owns_mask: foreign test_prefill.py::test_bases_and_layouts_of_an_lse
  backend: used test_prefill.py::test_backend_is_chosen_by_itself
  jit_args jit_kwargs variant: used test_variants.py::test_jit_args
  deterministic: used test_determinism.py::test_chunks_of_prompts
BatchPrefillWithPagedKVCacheWrapper.plan
  shown qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads num_kv_heads head_dim page_size
  shown custom_mask packed_custom_mask causal pos_encoding_mode allow_fp16_qk_reduction sm_scale window_left
  shown logits_soft_cap rope_scale rope_theta q_data_type kv_data_type non_blocking
  qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len page_size: used test_prefill.py::test_page_sizes
  num_qo_heads num_kv_heads: used test_prefill.py::test_group_sizes
  head_dim head_dim_qk: used test_prefill.py::test_head_dims
  head_dim_vo: used test_prefill.py::test_values_narrower_than_keys
  custom_mask packed_custom_mask causal window_left logits_soft_cap: used test_prefill.py::test_masks
  sm_scale: used test_prefill.py::test_sm_scale
  pos_encoding_mode: used test_positions.py::test_positions_under_masks
  rope_scale rope_theta: used test_positions.py::test_rope_scale_and_theta
  q_data_type: used test_prefill.py::test_dtype_is_float16_unless_said
  kv_data_type: used test_fp8.py::test_prefill
  o_data_type: checked test_checks.py::test_each_argument_of_plan_arrives_under_its_name
  use_fp16_qk_reduction allow_fp16_qk_reduction non_blocking: foreign test_surface.py::test_permissions_of_plan
  prefix_len_ptr token_pos_in_items_ptr: used test_multi_item.py::test_items_do_not_see_each_other
  token_pos_in_items_len: used test_multi_item.py::test_items_do_not_see_each_other
  max_item_len_ptr: checked test_multi_item.py::test_wrong_arguments
  seq_lens seq_lens_q block_tables: checked test_engines.py::test_lengths_are_taken_and_compared
  max_token_per_sequence max_sequence_kv: checked test_engines.py::test_lengths_are_taken_and_compared
  fixed_split_size disable_split_kv: used test_surface.py::test_fixed_splits
  attention_chunk_size: used test_prefill.py::test_chunks_in_prefill
  uniform_q_len: foreign test_prefill.py::test_bases_and_layouts_of_an_lse
BatchPrefillWithPagedKVCacheWrapper.run
  shown q paged_kv_cache k_scale v_scale return_lse
  q paged_kv_cache: used test_prefill.py::test_cache_forms
  q_scale k_scale v_scale: used test_prefill.py::test_run_scales
  scales: used test_prefill.py::test_run_scales_in_place_of_the_first_release
  out lse return_lse: used test_prefill.py::test_results_are_allocated_if_not_given
  sinks: used test_prefill.py::test_sinks
  enable_pdl window_left: checked test_surface.py::test_permissions_of_run
  kv_cache_sf: used test_nvfp4.py::test_cache_forms
  lse_base lse_layout: used test_prefill.py::test_bases_and_layouts_of_an_lse
  skip_softmax_threshold_scale_factor: foreign test_prefill.py::test_bases_and_layouts_of_an_lse
  use_fp16_softmax uses_spcompress: foreign test_prefill.py::test_bases_and_layouts_of_an_lse
BatchPrefillWithPagedKVCacheWrapper.reset_workspace_buffer
  shown float_workspace_buffer int_workspace_buffer
  float_workspace_buffer: used test_surface.py::test_another_workspace
  int_workspace_buffer: checked test_surface.py::test_another_workspace
BatchPrefillWithRaggedKVCacheWrapper
  shown float_workspace_buffer kv_layout use_cuda_graph qo_indptr_buf kv_indptr_buf custom_mask_buf qk_indptr_buf
  shown backend
  float_workspace_buffer: used test_workspace.py::test_exactly_what_is_needed
  kv_layout: used test_prefill.py::test_ragged_layouts
  use_cuda_graph qo_indptr_buf kv_indptr_buf: used test_graph.py::test_ragged_prefill
  custom_mask_buf: used test_surface.py::test_masks_of_ragged_graphs
  mask_indptr_buf qk_indptr_buf: checked test_prefill.py::test_buffers_by_both_names
  variant_owns_mask: foreign test_prefill.py::test_bases_and_layouts_of_an_lse
  backend: used test_prefill.py::test_backend_is_chosen_by_itself
  jit_args jit_kwargs variant: used test_variants.py::test_jit_args
  deterministic: used test_determinism.py::test_chunks_of_prompts
BatchPrefillWithRaggedKVCacheWrapper.plan
  shown qo_indptr kv_indptr num_qo_heads num_kv_heads head_dim custom_mask packed_custom_mask causal pos_encoding_mode
  shown allow_fp16_qk_reduction window_left logits_soft_cap sm_scale rope_scale rope_theta q_data_type kv_data_type
  qo_indptr kv_indptr: used test_prefill.py::test_lengths
  num_qo_heads num_kv_heads: used test_prefill.py::test_group_sizes
  head_dim head_dim_qk: used test_prefill.py::test_head_dims
  head_dim_vo: used test_prefill.py::test_values_narrower_than_keys
  custom_mask packed_custom_mask causal window_left logits_soft_cap: used test_prefill.py::test_masks
  sm_scale: used test_prefill.py::test_sm_scale
  pos_encoding_mode: used test_positions.py::test_positions_under_masks
  rope_scale rope_theta: used test_positions.py::test_rope_scale_and_theta
  q_data_type: used test_prefill.py::test_dtype_is_float16_unless_said
  kv_data_type: used test_fp8.py::test_prefill
  o_data_type: checked test_checks.py::test_each_argument_of_plan_arrives_under_its_name
  use_fp16_qk_reduction allow_fp16_qk_reduction non_blocking: foreign test_surface.py::test_permissions_of_plan
  prefix_len_ptr token_pos_in_items_ptr: used test_multi_item.py::test_items_do_not_see_each_other
  token_pos_in_items_len: used test_multi_item.py::test_items_do_not_see_each_other
  max_item_len_ptr: checked test_multi_item.py::test_wrong_arguments
  seq_lens seq_lens_q max_token_per_sequence max_sequence_kv: checked test_engines.py::test_lengths_of_ragged_keys
  fixed_split_size disable_split_kv: used test_surface.py::test_fixed_splits
  attention_chunk_size: used test_prefill.py::test_chunks_in_prefill
  uniform_q_len: foreign test_prefill.py::test_bases_and_layouts_of_an_lse
  v_indptr o_indptr: checked test_cudnn.py::test_offsets_in_elements_of_ragged_keys
BatchPrefillWithRaggedKVCacheWrapper.run
  shown q k v return_lse
  q k v: used test_prefill.py::test_ragged_views
  q_scale k_scale v_scale: used test_surface.py::test_scales_of_ragged_keys
  scales: used test_fp8.py::test_queries_of_eight_bits
  out lse return_lse: used test_prefill.py::test_results_are_allocated_if_not_given
  sinks: used test_prefill.py::test_sinks
  enable_pdl window_left: checked test_surface.py::test_permissions_of_run
  kv_cache_sf: used test_nvfp4.py::test_ragged_prefill
  o_scale: foreign test_surface.py::test_what_run_refuses
  lse_base lse_layout: used test_prefill.py::test_bases_and_layouts_of_an_lse
BatchPrefillWithRaggedKVCacheWrapper.reset_workspace_buffer
  shown float_workspace_buffer int_workspace_buffer
  float_workspace_buffer: used test_surface.py::test_another_workspace
  int_workspace_buffer: checked test_surface.py::test_another_workspace
merge_state
  shown v_a s_a v_b s_b
  v_a s_a v_b s_b: used test_cascade.py::test_merge_state
  v_scale: used test_cascade.py::test_a_scale_of_merged_values
merge_state_in_place
  shown v s v_other s_other
  v s v_other s_other mask: used test_cascade.py::test_merge_state_in_place
  v_scale: used test_cascade.py::test_a_scale_of_merged_values
merge_states
  shown v s
  v s: used test_cascade.py::test_merge_states
  v_scale: used test_cascade.py::test_a_scale_of_merged_values
batch_decode_with_shared_prefix_padded_kv_cache
  shown q
  q k_shared v_shared k_unique v_unique kv_layout sm_scale: used test_cascade.py::test_decode_with_shared_prefix_padded
  allow_fp16_qk_reduction: foreign test_cascade.py::test_decode_with_shared_prefix_padded
  rope_scale rope_theta: foreign test_cascade.py::test_positions_of_a_shared_prefix_are_refused
  backend: used test_cascade.py::test_decode_with_shared_prefix_padded
BlockSparseAttentionWrapper.plan
  shown indptr indices M N R C num_qo_heads num_kv_heads head_dim mask packed_mask causal pos_encoding_mode
  shown use_fp16_qk_reduction logits_soft_cap sm_scale rope_scale rope_theta q_data_type kv_data_type o_data_type
  shown non_blocking
  indptr indices M N R C num_qo_heads num_kv_heads head_dim q_data_type: used test_sparse.py::test_blocks
  mask packed_mask: used test_sparse.py::test_masks_of_blocks
  causal: used test_sparse.py::test_causal_where_rows_list_their_diagonal_block_last
  pos_encoding_mode: used test_sparse.py::test_causal_and_rotation_are_of_each_row_of_blocks
  rope_scale rope_theta: used test_sparse.py::test_causal_and_rotation_are_of_each_row_of_blocks
  logits_soft_cap sm_scale: used test_sparse.py::test_options_of_plan
  kv_data_type o_data_type: used test_sparse.py::test_number_types
  use_fp16_qk_reduction non_blocking: foreign test_sparse.py::test_wrong_arguments_of_plan
  block_mask kv_block_lens q2k_indices q2k_num kv_splits: foreign test_sparse.py::test_wrong_arguments_of_plan
  use_clc q_scale k_scale v_scale: foreign test_sparse.py::test_wrong_arguments_of_plan
BlockSparseAttentionWrapper.run
  shown q k v scale_q scale_k scale_v out lse return_lse enable_pdl
  q k v return_lse: used test_sparse.py::test_blocks
  out lse: used test_sparse.py::test_options_of_plan
  enable_pdl: checked test_sparse.py::test_options_of_plan
  scale_q scale_k scale_v: used test_fp8.py::test_queries_of_eight_bits
VariableBlockSparseAttentionWrapper.plan
  shown block_mask_map block_row_sz block_col_sz num_qo_heads num_kv_heads head_dim causal pos_encoding_mode
  shown use_fp16_qk_reduction logits_soft_cap sm_scale rope_scale rope_theta non_blocking q_data_type kv_data_type
  block_mask_map block_row_sz block_col_sz: used test_sparse.py::test_blocks_of_any_size
  num_qo_heads num_kv_heads head_dim q_data_type: used test_sparse.py::test_blocks_of_any_size
  causal: used test_sparse.py::test_causal_blocks_of_any_size
  pos_encoding_mode logits_soft_cap sm_scale rope_scale rope_theta: used test_sparse.py::test_options_of_heads
  kv_data_type: used test_sparse.py::test_number_types
  use_fp16_qk_reduction non_blocking: foreign test_sparse.py::test_wrong_arguments_of_blocks_of_any_size
VariableBlockSparseAttentionWrapper.run
  shown q k v out lse return_lse enable_pdl
  q k v out lse return_lse: used test_sparse.py::test_blocks_of_any_size
  enable_pdl: checked test_sparse.py::test_options_of_heads
"""
#: The two wrappers of shared prefixes differ in little.
SHARED_PREFIX = """
BatchKINDWithSharedPrefixPagedKVCacheWrapper.__init__
  shown workspace_buffer kv_layout
  workspace_buffer: foreign test_cascade.py::test_shared_prefixes_in_the_words_of_the_first_release
  float_workspace_buffer kv_layout backend: used test_cascade.py::test_LOWER_with_shared_prefix
  variant: used test_level_variants.py::test_LOWER_with_shared_prefix
BatchKINDWithSharedPrefixPagedKVCacheWrapper.begin_forward
  shown INDICES num_qo_heads num_kv_heads head_dim TYPES
  INDICES num_qo_heads num_kv_heads head_dim page_size: used test_cascade.py::test_LOWER_with_shared_prefix
  TYPE: used test_cascade.py::test_LOWER_with_shared_prefix
BatchKINDWithSharedPrefixPagedKVCacheWrapper.forward
  shown q k_shared v_shared unique_kv_data allow_fp16_qk_reduction sm_scale rope_scale rope_theta CAUSAL
  q k_shared v_shared unique_kv_cache sm_scale CAUSAL: used test_cascade.py::test_LOWER_with_shared_prefix
  unique_kv_data: foreign test_cascade.py::test_shared_prefixes_in_the_words_of_the_first_release
  allow_fp16_qk_reduction FLAG: foreign test_cascade.py::test_shared_prefixes_in_the_words_of_the_first_release
  rope_scale rope_theta: foreign test_cascade.py::test_positions_of_a_shared_prefix_are_refused
BatchKINDWithSharedPrefixPagedKVCacheWrapper.reset_workspace_buffer
  shown new_workspace_buffer
  float_workspace_buffer: used test_cascade.py::test_shared_prefixes_in_the_words_of_the_first_release
  new_workspace_buffer: foreign test_cascade.py::test_shared_prefixes_in_the_words_of_the_first_release
  int_workspace_buffer: checked test_surface.py::test_int_workspaces_of_shared_prefixes
BatchKINDWithSharedPrefixPagedKVCacheWrapper.end_forward
  shown
"""
_WORDS = (
    {"KIND": "Decode", "LOWER": "decode", "INDICES": "unique_kv_indptr unique_kv_indices unique_kv_last_page_len",
     "TYPES": "page_size data_type", "TYPE": "data_type", "CAUSAL": "", "FLAG": ""},
    {"KIND": "Prefill", "LOWER": "prefill", "TYPES": "", "TYPE": "q_data_type", "CAUSAL": "causal",
     "INDICES": "qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len", "FLAG": "use_fp16_qk_reduction"},
)  # fmt: skip


def functions() -> Iterator[Function]:
    """The declared table."""
    text = TABLE
    for words in _WORDS:
        part = SHARED_PREFIX
        for word in sorted(words, key=len, reverse=True):
            part = part.replace(word, words[word])
        text += part
    blocks = text.strip().replace("\n  ", "\t").split("\n")
    for path, *lines in (block.split("\t") for block in blocks if block):
        shown, rows = [], []
        for line in lines:
            if line.startswith("shown"):
                shown += line.split()[1:]
            else:
                names, how = line.split(":", 1)
                rows += [_row(name, *how.split(), policy_of(named(path))) for name in names.split()]
        yield Function(path, tuple(shown), tuple(rows))


def _row(argument: str, how: str, test: str, policy: Policy) -> Row:
    """`foreign` stands for what the function declares, and for nothing else."""
    assert (how == "foreign") == (argument in names_of(policy)), f"{argument}: {how}"
    if how == "foreign":
        how = "refused" if argument in policy.refused else "checked"
        return Row(argument, how, test, words_of(policy, argument))
    return Row(argument, how, test, how)


def document() -> str:
    """docs/surface.md."""
    parts = [HEAD]
    for function in functions():
        parts.append(f"\n## {function.path}\n")
        if not function.rows:
            parts.append("\nNo arguments.\n")
            continue
        parts.append("\n| argument | | shown by |\n|---|---|---|\n")
        for row in function.rows:
            name = f"**{row.argument}**" if row.argument in function.shown else row.argument
            parts.append(f"| {name} | {row.words} | `{row.test}` |\n")
    shown = [named(function.path) for function in functions()]
    shown = [value.__init__ if inspect.isclass(value) else value for value in shown]
    parts.append(MORE)
    for path, (function, policy) in policies():
        if function not in shown:
            parts += [f"| {path} | {name} | {words_of(policy, name)} |\n" for name in names_of(policy)]
    return "".join(parts)


def policies() -> Iterator[tuple[str, tuple[Callable[..., object], Policy]]]:
    """All functions and methods that declare foreign arguments."""
    seen = set()
    for module in (quire, quire.prefill, quire.decode, quire.mla, quire.cudnn, quire.compat.flash_mla):
        prefix = module.__name__.removeprefix("quire").removeprefix(".") + "." * (module is not quire)
        for name in sorted(module.__all__):
            value = getattr(module, name)
            value = getattr(value, name, value)  # a module that can be called, xqa, counts as its function
            own = {f"{name}.{m}": v for m, v in vars(value).items()} if inspect.isclass(value) else {name: value}
            for path, function in own.items():
                if isinstance(policy := getattr(function, "policy", None), Policy) and function not in seen:
                    seen.add(function)
                    yield f"{prefix}{path.removesuffix('.__init__')}", (function, policy)


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
