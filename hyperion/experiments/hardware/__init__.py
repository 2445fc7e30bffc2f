"""What one device can do: matrix products, memory streams, copies, launches, and the roofline they span."""
