"""Text in and text out: tokenizers, sampling, generation, scoring."""
