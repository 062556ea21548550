"""Text to token ids and back: tokenizers of model directories and GGUF files, chat templates, streaming."""

from jaxinfer.tokenizer.detokenizer import IncrementalDetokenizer
from jaxinfer.tokenizer.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer", "Tokenizer"]
