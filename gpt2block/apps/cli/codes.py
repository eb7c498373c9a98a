"""Exit codes of the commands (docs/environment.md)."""

FAILED, WRONG, INTERRUPTED, PIPE_CLOSED = 1, 2, 130, 141  # 130, 141: 128 + number of a signal
