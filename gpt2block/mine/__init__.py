"""A CUDA kernel of the user's own, checked and timed next to the kernels of an operation.

`source` reads the `.cu` file, `arguments` knows what the kernels of each operation are given, and
`kernel` joins the two. `cases` has the sizes and inputs that a kernel is checked with, `check`
compares results with float64 on the current device, `on_cpu` runs that on the emulator, within the
limits of `confined` and after `refused` has asked the compiler of CUDA, `on_gpu` in a child
process, which the race with the built-in kernels is part of. `outcome` is what is found, and
`kernel_check` the same from Python. `templates` has a file to begin with for each operation.
"""
