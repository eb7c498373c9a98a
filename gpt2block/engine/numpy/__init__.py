"""Forward passes by the NumPy reference."""
