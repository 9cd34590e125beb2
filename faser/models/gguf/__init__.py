"""From one GGUF file to a model and its tokenizer: llama.cpp's format for Llama, Mistral, Qwen2 and Qwen3.

reader.py     metadata, and the tensors as float32
config.py     ModelConfig from the metadata
weights.py    names and row order of the tensors; the model itself
tokenizer.py  the tokenizer that the metadata describe

Weights are dequantised on their way into the fused buffers; nothing here computes with quantised numbers.
"""

from faser.models.gguf.config import read_config
from faser.models.gguf.reader import GgufFile, is_gguf, open_file
from faser.models.gguf.tokenizer import chat_template, load_tokenizer
from faser.models.gguf.weights import load

__all__ = ["GgufFile", "chat_template", "is_gguf", "load", "load_tokenizer", "open_file", "read_config"]
