"""Cases that one backend does not take and others do: skipped where that was expected, and failures elsewhere."""

from __future__ import annotations

import re

#: The limits that a backend has and others have not, in the words of its refusal.
LIMITS = {
    "decode": r"attention_decode +(\d+ rows \(qo_len \* group_size\) are more than|rows differ between requests"
    r"|head_dim_qk=512: expected at most 256)",
    "fa2": r"attention_fa2 +head_dim_qk=512: expected at most 256",
    "fa3": r"attention_fa3 +(keys go from memory to the tensor cores as they are|biases of \d+ query heads"
    r"|head_dim_qk=512: expected at most 256|head_dim_qk=40: its matrix instruction takes multiples of 16)",
}

#: The tests that have cases beyond a backend's limits.
BEYOND = {
    "decode": frozenset(
        {
            "test_a_prefix_and_new_tokens",
            "test_a_row_does_not_depend_on_other_rows",
            "test_a_run_is_on_the_current_stream",
            "test_a_small_workspace_takes_two_launches",
            "test_a_wrapper_is_planned_again_and_again",
            "test_any_call",
            "test_any_draft_bits",
            "test_any_tree",
            "test_batch_invariance",
            "test_biases_of_distances",
            "test_biases_of_distances_under_a_mask",
            "test_blocks",
            "test_blocks_of_any_size",
            "test_causal_blocks_of_any_size",
            "test_chunks",
            "test_chunks_in_prefill",
            "test_decode_with_shared_prefix_padded",
            "test_draft_chains",
            "test_draft_trees",
            "test_group_sizes",
            "test_groups_that_straddle_row_tiles",
            "test_head_dims_of_variants",
            "test_host_index_arrays_plan_without_synchronising",
            "test_lengths",
            "test_long_chunks",
            "test_long_prefill",
            "test_masks_of_long_chunks",
            "test_masks_of_long_variants",
            "test_masks_of_rows_that_share_a_query",
            "test_negative_caps",
            "test_operands_of_a_captured_score",
            "test_paged_plan",
            "test_paged_prefill",
            "test_prefill",
            "test_prefill_lengths",
            "test_prefill_over_shared_tensors_and_pages",
            "test_ragged_plan",
            "test_ragged_prefill",
            "test_row_scales_of_any_sign",
            "test_row_scales_of_head_dims",
            "test_slopes_of_heads",
            "test_soft_caps_of_long_requests",
            "test_splits_do_not_change_the_answer",
            "test_splits_of_variants",
            "test_tall_row_tiles",
            "test_which_keys_are_seen",
            "test_workspace_that_is_too_small",
        }
    ),
    "fa2": frozenset({"test_head_dims_of_variants"}),
    "fa3": frozenset(
        {
            "test_beside_other_options",
            "test_biases_of_distances",
            "test_causal_and_rotation_are_of_each_row_of_blocks",
            "test_forward_takes_a_mode",
            "test_head_dims_of_variants",
            "test_long_positions",
            "test_plans_of_a_graph",
            "test_positions_in_decode",
            "test_positions_of_single_calls",
            "test_positions_under_masks",
            "test_queries_at_the_end_of_keys_are_the_last_of_all",
            "test_rope_scale_and_theta",
            "test_rope_turns_what_is_seen",
            "test_rotated_keys_of_eight_bits",
            "test_slopes_of_heads",
        }
    ),
}


def limit(error: BaseException) -> tuple[str, str] | None:
    """The backend that an error is a refusal of, and what it said; None if it is anything else."""
    if not isinstance(error, NotImplementedError):  # which UnsupportedError is
        return None
    for backend, words in LIMITS.items():
        found = re.search(words + ".*", str(error))
        asked = set(re.findall(r"^ +attention_(\w+)", str(error), re.MULTILINE))  # the kernels that gave a reason
        if found and asked == {backend}:
            return backend, found.group()
    return None


def is_expected(error: BaseException, test: str) -> bool:
    """Whether `error` is a refusal that `test` is known to meet."""
    refusal = limit(error)
    return refusal is not None and test in BEYOND[refusal[0]]
