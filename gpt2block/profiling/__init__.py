"""What `gpt2block profile` measures and writes (docs/profile.md).

`runs` runs a model or block and gives a `Profile`; `trace` writes it in the Trace Event Format, and
`summary` has a row for each operation.
"""

from gpt2block.profiling.runs import (
    Profile,
    TimedPass,
    check_sizes,
    copy_gb_s,
    of_block,
    of_generate,
    of_score,
)
from gpt2block.profiling.summary import (
    RESOLUTION_US,
    PassTimes,
    TimedOperation,
    kinds,
    operations,
    pass_times,
)
from gpt2block.profiling.trace import trace

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
