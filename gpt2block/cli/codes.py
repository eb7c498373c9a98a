"""Exit codes of the commands (docs/environment.md)."""

FAILED, WRONG, INTERRUPTED, PIPE_CLOSED = 1, 2, 130, 141  # the last two are 128 + signal
