"""The weights of each architecture."""
