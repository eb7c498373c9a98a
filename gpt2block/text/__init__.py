"""Tokenizers, sampling, text generation and scoring."""
