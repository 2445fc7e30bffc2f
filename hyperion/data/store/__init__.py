"""Files of data sets: data sources, folders with manifests, arrays on disk, and the overlap of splits."""
