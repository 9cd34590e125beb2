"""Draft heads: small models that guess from the target's own hidden states.

config.py  HeadConfig from config.json; fields.py names the fields that may be there
head.py    what both kinds have in common
eagle3.py  one layer over the embedding and the features, a token at a time
block.py   DFlash and DSpark: a block of tokens in one pass
load.py    the public checkpoint formats, read and written
whole.py   a head over a whole text at once, without pages
shift.py   whether a head reads the layers that it was trained on; sample.py is the text that tells
"""

from faser.models.heads.block import BlockHead
from faser.models.heads.config import BLOCK, EAGLE3, HeadConfig, read_head_config
from faser.models.heads.eagle3 import Eagle3Head
from faser.models.heads.head import DraftHead
from faser.models.heads.load import load_head, write_head

__all__ = [
    "BLOCK",
    "EAGLE3",
    "BlockHead",
    "DraftHead",
    "Eagle3Head",
    "HeadConfig",
    "load_head",
    "read_head_config",
    "write_head",
]
