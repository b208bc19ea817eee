"""Readers of /proc, cgroups and page tables, and page advice; standard library and ctypes only.

One source per file. Each has a pure `parse_…` of the kernel's text and a thin `read_…` that takes the root of the
file system it reads as an argument, so that a test can put another in its place.

| module | answers |
|---|---|
| `process` | who is this (start time), whose, how much in total; who are its children |
| `maps` | what an address range really is |
| `pages` | how much of it is in memory |
| `page_cache` | how much of a file is in memory, exactly or by sampling; whose file it is |
| `mounts` | which file system a device number is |
| `meminfo`, `cgroups` | how much is left, on the machine and under each cap |
| `pressure` | time lost for want of memory, io, cpu |
| `process_io` | bytes read from storage |
| `advice` | bring pages in, let them go |
| `atomic_file` | hand a small file to a reader in another container |
| `errors` | every way in which a reader fails |
"""
