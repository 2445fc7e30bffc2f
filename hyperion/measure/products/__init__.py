"""Matrix products: rates, searches, rooflines, gaps."""
