"""Functions for figures and tables: figure style, number formatting, and tables of rows. This package does not import torch."""
