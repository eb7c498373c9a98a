"""Conversations: their template, and answers to them."""
