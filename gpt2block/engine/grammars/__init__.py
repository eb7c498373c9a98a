"""Grammars that generated text is held to: JSON schemas, regular expressions, choices, and Lark."""

from gpt2block.engine.grammars.grammar import Grammar
from gpt2block.engine.grammars.masking import Masker, MaskJob
from gpt2block.engine.grammars.matching import Matcher, Vocabulary, vocabulary_of

__all__ = ["Grammar", "MaskJob", "Masker", "Matcher", "Vocabulary", "vocabulary_of"]
