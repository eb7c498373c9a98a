"""Measurements and output of `gpt2block profile` (docs/profile.md).

`runs` runs a model or block and returns a `Profile`. `trace` converts a Profile to the Trace Event
Format, and `summary` to a table with a row for each operation.
"""
