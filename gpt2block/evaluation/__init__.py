"""Evaluation of models on tasks with the package lm_eval, of the extra eval: docs/evaluation.md.

Imports `gpt2block.model` and rooms below it; no other room imports it.
"""
