"""One forward pass as a page: tokens, every step with its tensor and its kernel, the next token."""

from gpt2block.explain.data import collect
from gpt2block.explain.page import Page

__all__ = ["Page", "collect"]
