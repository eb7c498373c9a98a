"""Check a user's CUDA kernel for an operation, and time it next to the built-in kernels.

`source` reads the `.cu` file, `arguments` lists the arguments of each operation's kernels, and
`kernel` matches parameters with arguments. `cases` has the sizes and inputs of the checks, and
`comparison` compares results with float64. `on_cpu` runs checks on the emulator, within the limits
of `confined` and after `refused` has compiled the file with NVRTC. `on_gpu` runs checks and the
benchmark in a child process. `outcome` collects the results, and `kernel_check` is the interface
for Python. `templates` has a starter file for each operation.
"""
