"""Fetch, identify, verify and prepare data sets."""
