"""Set-up with the standard library alone: choose the torch build for this machine, make an environment, and enter it.

`python3 -m hyperion.install run MODULE ARGUMENTS` sets up if needed and becomes `python -m MODULE` in the environment.
"""
