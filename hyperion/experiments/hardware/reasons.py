"""Texts of rows by which figures and sentences recognize why there is no limit. This module does not import torch."""

# Start of the `limit_source` of a bandwidth whose calls spend at least half of their time on launching.
LAUNCHING = "no limit: mostly launching"
