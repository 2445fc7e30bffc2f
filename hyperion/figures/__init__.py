"""Style, number formats and tables of all figures. This package does not import torch."""
