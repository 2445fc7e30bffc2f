"""Texts stored in rows, from which figures and sentences recognize why a row has no limit.

The texts are in a module of their own, so that figures and sentences need not import torch.
"""

# Prefix of `limit_source` in a bandwidth row that has no limit because launches take at least half of the time of its calls.
LAUNCHING = "no limit: mostly launching"
