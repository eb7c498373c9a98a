"""Evaluation of models on tasks, with the package lm_eval (EleutherAI's lm-evaluation-harness).

language_model.py is the model type `gpt2block` of lm_eval. `python -m gpt2block.evaluation` is the
command `lm_eval` with this model type registered. Both need the extra eval. See docs/evaluation.md.
"""
