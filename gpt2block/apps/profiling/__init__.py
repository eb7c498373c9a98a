"""Measurements and output of `gpt2block profile` (docs/profile.md).

`runs` runs a model or block and returns a `Profile`. `trace` converts a Profile to the Trace Event
Format, and `summary` to a table with a row for each operation.
"""

from gpt2block.apps.profiling.runs import (
    Profile,
    TimedPass,
    check_sizes,
    copy_gb_s,
    of_block,
    of_generate,
    of_score,
)
from gpt2block.apps.profiling.summary import (
    RESOLUTION_US,
    PassTimes,
    TimedOperation,
    kinds,
    operations,
    pass_times,
)
from gpt2block.apps.profiling.trace import trace

__all__ = [
    "RESOLUTION_US",
    "PassTimes",
    "Profile",
    "TimedOperation",
    "TimedPass",
    "check_sizes",
    "copy_gb_s",
    "kinds",
    "of_block",
    "of_generate",
    "of_score",
    "operations",
    "pass_times",
    "trace",
]
