"""Models, data and training recipes that are shared by the experiments of several subjects."""
