"""The eyes of a vision-language model: from patches of pictures to rows that enter the decoder.

config.py    VisionConfig from config.json; which composite models there are
settings.py  what the folder's processor files say of pixels
layout.py    order, positions and attention segments of the patches of grids
encoder.py   the weights and the forward pass
names.py     the names of the weights in a checkpoint
"""
