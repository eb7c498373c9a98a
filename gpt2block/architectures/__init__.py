"""Model architectures as plans: which steps a forward pass consists of, on which tensors."""
