"""Files of data sets: sources of data, folders with manifests, arrays on disk, and the overlap of splits."""
