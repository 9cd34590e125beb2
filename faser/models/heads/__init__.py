"""Draft heads: small models that guess from the target's own hidden states."""

from faser.models.heads.block import BlockHead
from faser.models.heads.config import BLOCK, EAGLE3, HeadConfig
from faser.models.heads.eagle3 import Eagle3Head
from faser.models.heads.head import DraftHead

__all__ = ["BLOCK", "EAGLE3", "BlockHead", "DraftHead", "Eagle3Head", "HeadConfig"]
