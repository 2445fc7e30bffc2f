"""Weak and strong scaling over devices."""
