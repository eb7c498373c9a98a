"""Text generation and scoring: the sequences, and the scheduler that batches their steps."""
