"""The fields that config.json of a public draft head may have, so that every other one can be refused by name."""

from __future__ import annotations

# Fields that `ModelConfig` reads or refuses.
LAYER = frozenset(
    {
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "intermediate_size", "rms_norm_eps", "max_position_embeddings",
        "original_max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters",
        "partial_rotary_factor", "attention_bias", "mlp_bias", "hidden_act", "layer_types", "sliding_window",
        "use_sliding_window", "max_window_layers", "quantization_config", "dtype", "torch_dtype",
    }
)  # fmt: skip
# Fields that say nothing about the forward pass: bookkeeping, generation, training.
NEUTRAL = frozenset(
    {
        "architectures", "model_type", "auto_map", "name_or_path", "transformers_version", "tokenizer_class",
        "use_cache", "pretraining_tp", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
        "attention_dropout", "initializer_range", "is_decoder", "id2label", "label2id", "return_dict",
        "max_length", "min_length", "num_beams", "num_beam_groups", "num_return_sequences", "temperature",
        "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "diversity_penalty",
        "chunk_size_feed_forward", "num_target_layers", "num_anchors", "max_anchors", "speculators_version",
        "speculators_config", "sliding_window_non_causal", "confidence_head_alpha", "ce_loss_alpha",
        "l1_loss_alpha", "embed_requires_grad",
    }
)  # fmt: skip
EAGLE3 = frozenset(
    {
        "draft_vocab_size", "target_hidden_size", "num_aux_hidden_states", "bias", "eagle_config",
        "eagle_aux_hidden_state_layer_ids", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output",
    }
)  # fmt: skip
EAGLE_CONFIG = frozenset(
    {
        "use_aux_hidden_state", "eagle_aux_hidden_state_layer_ids", "norm_before_residual", "norm_before_fc",
        "fc_norm", "norm_output",
    }
)  # fmt: skip
BLOCK = frozenset(
    {
        "mask_token_id", "target_layer_ids", "aux_hidden_state_layer_ids", "sample_from_anchor",
        "dspark_bonus_anchor", "causal", "is_causal", "use_swa", "swa_window_size", "markov_rank",
        "markov_head_type", "enable_confidence_head", "confidence_head_with_markov", "use_aux_hidden_state",
        "projector_type", "attention_mode",
    }
)  # fmt: skip
# of dflash_config: the name in some heads, and the usual one
OTHER_BLOCK_NAMES = {"shift_label": "sample_from_anchor", "use_confidence_head": "enable_confidence_head"}
BLOCK_OUTER = BLOCK | {"block_size", "dflash_config", "draft_vocab_size", "target_hidden_size"}
