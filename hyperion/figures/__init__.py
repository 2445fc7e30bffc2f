"""Functions for figures and tables: style of figures, numbers as text, and tables of rows. This package does not import torch."""
