"""Instruction rows and their completions."""
