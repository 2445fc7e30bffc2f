"""Matrix products (GEMMs): their rates, a search for the fastest shape, and the reasons why a rate is below the peak."""
