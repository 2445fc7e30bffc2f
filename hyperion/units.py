"""Units of bytes. Binary units (MiB, GiB) are used for memory and messages, decimal units (MB, GB) for bandwidths and disks."""

KIB, MIB, GIB = 2**10, 2**20, 2**30
MB, GB = 10**6, 10**9
