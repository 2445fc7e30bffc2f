"""Set-up with the standard library alone: which torch this machine needs, an environment for it, and entry into it.

`python3 -m hyperion.install run MODULE ARGUMENTS` sets up if needed and becomes `python -m MODULE` in the environment.
"""
