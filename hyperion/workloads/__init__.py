"""Models, data and training recipes that several subjects share."""
