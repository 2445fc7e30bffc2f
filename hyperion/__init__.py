"""Hyperion: an executable book of ML-systems engineering. Import the package you need: `from hyperion import measure`."""

from hyperion import compat

__version__ = "0.1.0"

# This line runs in every process that imports a package of the library, also in workers and notebook kernels. It does not import
# torch.
compat.watch_torchvision()
