"""Readers of /proc, cgroups and page tables, and page advice; standard library and ctypes only."""
