"""Tiny models gain nothing from threads and lose much to their barriers, most of all on a busy machine."""

import torch

torch.set_num_threads(1)
