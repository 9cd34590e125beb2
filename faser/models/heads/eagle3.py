"""The EAGLE-3 head: one layer over a token's embedding and the target's features of the position before it.

The row of token r has the features of position r - 1; it predicts token r + 1. Which rotary position it has is the
caller's choice, the same shift for all rows: only differences matter. Where the target has not computed the features
yet, the head's own output of the row before takes their place (`next_states`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from faser.models.allocation import Allocator
from faser.models.heads.head import DraftHead
from faser.models.layers import rms_norm, rms_norm_heads_
from faser.models.transformer import Attend, run_normed


class Eagle3Head(DraftHead):
    """An EAGLE-3 head in memory. The attention_norm of its layer is that of the embedding."""

    inputs_per_layer = 2  # the embedding and the features

    def _allocate(self, make: Allocator) -> None:
        config = self.head_config
        self.state_norm = make.vector(self.config.hidden_size)
        self.input_norm = make.vector(config.feature_size) if config.norm_before_fc else None
        # a row per feature
        self.fc_norm = make.vector(config.num_features, config.target_hidden_size) if config.fc_norm else None

    def _further(self) -> dict[str, Tensor]:
        further = {"state_norm": self.state_norm, "input_norm": self.input_norm, "fc_norm": self.fc_norm}
        return {name: tensor for name, tensor in further.items() if tensor is not None}

    def fuse(self, features: Tensor) -> Tensor:
        if self.input_norm is not None:
            features = rms_norm(features, self.input_norm, self.config.norm_eps)
        if self.fc_norm is not None:
            parts = features.reshape(-1, *self.fc_norm.shape).clone()
            rms_norm_heads_(parts, self.fc_norm, self.config.norm_eps)
            features = parts.flatten(1)
        return F.linear(features, self.fc)

    def extend(self, embedded: Tensor, states: Tensor, attend: Attend) -> Tensor:
        """embedded [rows, hidden] of tokens, states [rows, hidden] (fused features, or next_states) -> hidden."""
        layer, config = self.layers[0], self.config
        normed_states = rms_norm(states, self.state_norm, config.norm_eps)
        normed = torch.cat((rms_norm(embedded, layer.attention_norm, config.norm_eps), normed_states), dim=-1)
        residual = normed_states if self.head_config.norm_before_residual else states
        return run_normed(0, layer, config, residual, normed, attend)

    def next_states(self, hidden: Tensor) -> Tensor:
        """The states of the rows behind these, from the output of `extend`."""
        return self.normed(hidden) if self.head_config.norm_output else hidden
