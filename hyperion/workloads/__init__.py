"""Models, data and recipes that several subjects share, ready to run."""
