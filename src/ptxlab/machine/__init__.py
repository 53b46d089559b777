"""The machine that generated code runs on: memories, groups of threads, barriers, scheduler."""
