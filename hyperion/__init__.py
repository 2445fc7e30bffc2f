"""Hyperion: an executable book of ML-systems engineering. Import the room you need: `from hyperion import measure`."""

__version__ = "0.1.0"
