"""Show a forward pass as an HTML page: tokens, each step's tensor and kernel, the next token."""

from gpt2block.engine.explain.data import collect
from gpt2block.engine.explain.page import Page

__all__ = ["Page", "collect"]
