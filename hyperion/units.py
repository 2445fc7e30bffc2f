"""Units of bytes. Binary units (MiB, GiB) are used for memory and messages, the decimal unit GB for bandwidths and disks."""

KIB, MIB, GIB = 2**10, 2**20, 2**30
GB = 10**9
