"""What the device can do: products, memory, transfers, launches."""
