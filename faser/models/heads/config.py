"""What a draft head is, read from its config.json: kind, layers, the features it reads, its vocabulary.

Knows the layouts of EAGLE-3 (raw and speculators), DFlash and DSpark. Refuses by name every feature FASER does not
implement, before a weight is read. Knows nothing of torch or weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from faser.errors import ModelError
from faser.models.config import ModelConfig

EAGLE3, BLOCK = "eagle3", "block"
_EAGLE3_FEATURES = 3  # by default


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The shape of one draft head.

    A feature is the residual stream of the target before one of its layers; feature 0 is the embedding. DFlash counts
    the outputs of layers from 0, so its number 1 is 2 here.
    """

    kind: str  # EAGLE3 or BLOCK
    layers: ModelConfig  # of the head's own layers; vocab_size is the target's
    target_hidden_size: int
    feature_layers: tuple[int, ...] | None  # ascending; None: the default of EAGLE-3, known once the target is
    draft_vocab_size: int | None = None  # rows of the head's output; None: the target's vocabulary

    # EAGLE-3
    norm_before_residual: bool = False  # the residual stream begins with the normed features, not with the features
    norm_before_fc: bool = False  # one norm over all features
    fc_norm: bool = False  # a norm per feature
    norm_output: bool = False  # the next step gets the output behind the last norm, not before it

    # block heads
    num_drafts: int = 0  # tokens that one block yields
    mask_token_id: int = 0
    anchor_predicts: bool = False  # every row predicts the token behind it; else a mask predicts its own token
    markov_rank: int = 0  # 0: no Markov head
    confidence: bool = False
    confidence_with_markov: bool = False

    @property
    def num_features(self) -> int:
        return _EAGLE3_FEATURES if self.feature_layers is None else len(self.feature_layers)

    @property
    def feature_size(self) -> int:
        """Numbers in the features of one row."""
        return self.num_features * self.target_hidden_size

    @property
    def num_block_rows(self) -> int:
        """The anchor and the masks."""
        return self.num_drafts if self.anchor_predicts else self.num_drafts + 1

    @property
    def num_output_rows(self) -> int:
        """Tokens that the head can propose."""
        return self.draft_vocab_size or self.layers.vocab_size

    @property
    def is_short(self) -> bool:
        """Whether the head proposes only some tokens of the target."""
        return self.num_output_rows != self.layers.vocab_size

    @property
    def can_share(self) -> bool:
        """Whether the target's embedding and head have the head's width."""
        return self.layers.hidden_size == self.target_hidden_size

    def resolve(self, target: ModelConfig, where: str = "the head") -> HeadConfig:
        """Check the head against its target; the default features become layer numbers."""
        for key, ours, theirs in (
            ("target_hidden_size", self.target_hidden_size, target.hidden_size),
            ("vocab_size", self.layers.vocab_size, target.vocab_size),
        ):
            if ours != theirs:
                raise ModelError(f"{where}: {key}={ours}, but the target has {theirs}; choose a head of this target")
        n = target.num_layers
        features = tuple(sorted({2, n // 2, n - 3})) if self.feature_layers is None else self.feature_layers
        if len(features) != self.num_features or features[0] < 0 or features[-1] >= n:
            raise ModelError(
                f"{where}: features of layers {', '.join(map(str, features))} with a target of {n} layers; "
                f"expected {self.num_features} numbers from 0 to {n - 1}: choose a head of this target"
            )
        return replace(self, feature_layers=features)
