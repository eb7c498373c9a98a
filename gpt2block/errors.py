"""The errors gpt2block raises on purpose: what was expected, what came, what to do."""


class InputError(ValueError):
    """An array or argument has the wrong dtype, shape, device or value."""


class CheckpointError(ValueError):
    """A weights file or directory is missing, damaged or not what it should be."""


class DeviceError(RuntimeError):
    """The asked-for device cannot be used."""


class KernelError(RuntimeError):
    """A CUDA source does not compile, or a kernel is launched with the wrong arguments."""
