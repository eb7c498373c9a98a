"""Show a forward pass as an HTML page: tokens, each step's tensor and kernel, the next token."""

from gpt2block.explain.data import collect
from gpt2block.explain.page import Page

__all__ = ["Page", "collect"]
