"""Experiments by subject: each folder holds its experiments, figures, exercises and sizes."""
