"""Runs a kernel's PTX on the CPU with NumPy, and watches it."""
