"""Models, data sets and training recipes that the experiments of several subjects share."""
