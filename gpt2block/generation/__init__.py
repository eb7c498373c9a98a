"""Text generation and scoring: rows, batches and their scheduling."""
