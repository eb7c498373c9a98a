"""Texts that a model continues or scores: rows, batches, their order."""
