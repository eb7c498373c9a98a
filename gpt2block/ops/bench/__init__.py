"""Times of the variants of an operation on a GPU, in turns on the same buffers."""
