"""Measured limits of one device: matrix products, memory streams, copies, kernel launches, and the roofline."""
