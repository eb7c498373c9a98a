"""Weight matrices in their stored formats: float dtypes, FP8, two float16 parts, GGUF blocks."""
