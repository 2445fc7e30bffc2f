"""Download, identify, verify and prepare data sets."""
