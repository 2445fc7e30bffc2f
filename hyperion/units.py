"""Units of size in bytes: binary for memory and messages (MiB, GiB), decimal for bandwidths and disks (MB, GB)."""

KIB, MIB, GIB = 2**10, 2**20, 2**30
MB, GB = 10**6, 10**9
