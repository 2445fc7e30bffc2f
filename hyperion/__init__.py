"""Hyperion: an executable book of ML-systems engineering. Import the room you need: `from hyperion import measure`."""

from hyperion import compat

__version__ = "0.1.0"

# In every process that imports any room, workers and notebook kernels included; torch is not loaded by it.
compat.watch_torchvision()
