"""The machine that runs generated code: memories, groups of threads, barriers, scheduler."""
