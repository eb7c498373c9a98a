"""Weight matrices as they are stored for products: dtypes, FP8, two-part, GGUF blocks."""
