"""Inspect a forward pass: steps compared with float64, attention weights, the logit lens."""
