"""Traps: known behaviours of transformers, torch and Lightning, each with the tests that show that we are not in it.

That a fork kills the threads of a compiled extension, and that a second OpenMP runtime spins against torch's, is none
of them: there is no such extension here.
"""

from __future__ import annotations

TRAPS: dict[str, tuple[str, ...]] = {
    "an attention registered without its mask function ignores padding": (
        "sites/test_transformers.py::test_both_the_attention_and_its_mask_are_registered",
        "monitor/test_watch_models.py::test_scan_agrees_with_eager_weights_on_every_site",
    ),
    "a keyword that is not known may choose keys": (
        "sites/test_transformers.py::test_an_unknown_keyword_is_refused_and_never_ignored",
        "sites/test_traps.py::test_what_a_function_that_somebody_registered_calls_is_read_inside",
        "sites/test_transformers_flash.py::test_a_function_that_somebody_registered_is_skipped_by_name",
        "sites/test_traps.py::test_a_model_that_chooses_keys_by_indices_is_read_where_its_mask_says_the_same",
    ),
    "eager attention adds a bool mask as 0 and 1, SDPA hides by it": (
        "sites/test_what_runs.py::test_what_is_read_is_what_the_implementation_that_runs_does_with_its_mask",
        "sites/test_what_runs.py::test_every_eager_function_of_transformers_adds_its_mask",
    ),
    "softcap, sinks and position bias come as keywords, heads of keys are not repeated": (
        "monitor/test_watch_models.py::test_watched_entropies_are_those_of_eager_weights",
        "monitor/test_watch_models.py::test_flex_attention_is_read_with_its_masks_windows_and_softcap",
        "sites/test_transformers_flash.py::test_flash_attention_is_read_with_padding_windows_softcap_and_sinks",
        "sites/test_transformers_flex.py::test_sinks_count_under_flex_attention",
    ),
    "models that bypass the registry are seen otherwise, and seeing nothing is an error": (
        "sites/test_softmax_by_hand_transformers.py::test_entropies_are_those_of_the_weights_that_the_model_returns",
        "monitor/test_watch.py::test_a_model_without_attention_says_what_to_do",
        "monitor/test_scan.py::test_a_model_without_attention_is_an_error_that_says_what_to_do",
    ),
    "sdpa returns no weights, and eager returns them after dropout": (
        "sites/test_traps.py::test_asking_sdpa_for_weights_that_it_does_not_return_changes_no_reading",
        "sites/test_traps.py::test_entropies_of_a_training_step_are_those_before_dropout",
    ),
    "sinks leave rows that do not sum to 1, routers are softmaxes, decoding packs heads, padded rows see nothing": (
        "monitor/test_watch_models.py::test_watched_entropies_are_those_of_eager_weights",
        "monitor/test_watch.py::test_a_softmax_that_meets_no_values_is_no_attention",
        "monitor/test_watch_caches.py::test_heads_that_sdpa_packs_while_decoding_are_told_apart",
        "monitor/test_watch_caches.py::test_padding_that_cannot_be_told_makes_the_site_skipped",
    ),
    "layer_idx is missing or shared": (
        "monitor/test_watch_models.py::test_every_module_that_returns_eager_weights_is_seen_under_its_own_name",
    ),
    "a config can name code": (
        "cli/test_cli.py::test_a_hostile_config_runs_no_code",
        "sites/test_traps.py::test_a_config_that_names_an_attention_of_the_hub_loads_nothing_during_a_scan",
    ),
    "a mode sees neither other threads nor itself inside nn.MultiheadAttention": (
        "sites/test_traps.py::test_multihead_attention_is_one_call_and_not_a_recursion",
        "sites/test_traps.py::test_a_thread_that_nobody_watches_is_not_told_of",
    ),
    "a mode may change gradients under activation checkpointing": (
        "sites/test_traps.py::test_gradients_under_activation_checkpointing_are_bit_identical",
        "monitor/test_watch.py::test_training_with_dropout_is_bit_identical",
        "monitor/test_watch_models.py::test_training_steps_with_dropout_are_bit_identical",
    ),
    "measuring turns off the fast path of nn.TransformerEncoderLayer": (
        "sites/test_traps.py::test_the_fast_path_of_an_encoder_layer_is_left_within_2e_6",
    ),
    "checkpointing calls attention twice": (
        "monitor/test_calls.py::test_checkpointed_rows_count_once_and_gradients_are_those_without_a_watch",
        "sites/test_tap.py::test_a_compiled_model_is_one_graph_on_sampled_and_other_steps",
    ),
    "a hook or a mode around a compiled model is traced": (
        "sites/test_traps.py::test_a_compiled_model_without_taps_says_so_and_is_not_compiled_anew",
        "sites/test_tap.py::test_a_compiled_model_is_one_graph_on_sampled_and_other_steps",
        "sites/test_transformers_flex.py::test_a_compiled_kernel_is_watched_without_a_graph_more_and_never_by_its_eager_twin",
    ),
    "under autocast a look at the call sees float32": (
        "sites/test_traps.py::test_under_autocast_the_weights_of_the_rounded_queries_and_keys_are_read",
        "sites/test_traps.py::test_statistics_themselves_are_not_rounded_by_autocast",
    ),
    "queries come in other shapes, and not every softmax is over keys": (
        "sites/test_traps.py::test_sdpa_is_read_in_every_shape_that_models_give_it",
        "monitor/test_watch.py::test_a_softmax_that_meets_no_values_is_no_attention",
    ),
    "DTensor queries show their global shape": (
        "distributed/test_training.py::test_dtensors_that_are_not_split_are_read_whole",
    ),
    "what a callback adds to the logs comes too late for the trackers": (
        "integrations/test_trainer.py::test_a_trainer_among_the_trackers_lends_those_it_reports_to",
    ),
    "a Trainer reports to nobody by default, and the registry's torchvision breaks whoever imports it": (
        "integrations/test_trainer.py::test_trackers_that_cannot_be_reached_are_told_with_the_way_to_reach_them",
        "vision/test_vision.py::test_every_site_is_read_exactly",
    ),
    "the log-sum-exp that FlexAttention returns is rounded to the type of the values": (
        "sites/test_transformers_flex.py::test_entropies_in_bfloat16_do_not_come_from_a_rounded_log_sum_exp",
    ),
    "Lightning counts a step before it logs its loss": (
        "integrations/test_lightning.py::test_scalars_stand_at_the_step_of_the_loss_of_the_same_batches",
    ),
    "a monitor that keeps graphs leaks": (
        "monitor/test_watch.py::test_memory_stays_flat_over_many_steps",
        "monitor/test_watch_memory.py::test_memory_stays_flat_over_three_hundred_sampled_steps",
        "sites/test_traps.py::test_nothing_that_is_kept_holds_a_graph",
    ),
}
