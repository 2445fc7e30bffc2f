"""Set up an environment: choose the torch build for this machine, and install all packages.

This package uses only Python's standard library. `python3 -m hyperion.install run MODULE ARGUMENTS` sets up the environment if
needed, and then runs `python -m MODULE ARGUMENTS` in it.
"""
