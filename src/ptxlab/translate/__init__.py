"""Translates PTX to Python: control flow, registers, and the meaning of each opcode."""
