"""Evaluation of models on tasks with the package lm_eval, of the extra eval: docs/evaluation.md."""
