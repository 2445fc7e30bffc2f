"""Text and images: preparation, tokenizing, loading."""
