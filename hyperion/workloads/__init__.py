"""Models, data and training recipes shared by the experiments of several subjects."""
