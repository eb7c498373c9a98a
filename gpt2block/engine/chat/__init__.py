"""Conversations: chat templates, messages, and the model's answers."""
