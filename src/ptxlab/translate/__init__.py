"""PTX to Python: control flow, registers, and what each opcode means."""
