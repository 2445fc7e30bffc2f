"""Matrix products (GEMMs): their rates, the search for the fastest shape, and the reasons why a rate is below the peak."""
