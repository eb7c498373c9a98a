"""Grammars that generated text is held to: JSON schemas, regular expressions, choices, and Lark."""

from gpt2block.grammars.grammar import Grammar
from gpt2block.grammars.matching import Matcher, fill, vocabulary_of

__all__ = ["Grammar", "Matcher", "fill", "vocabulary_of"]
