"""Files of data sets: sources, staging, manifests, shards."""
