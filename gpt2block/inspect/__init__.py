"""What a forward pass computes: steps compared with float64, attention, the logit lens."""
