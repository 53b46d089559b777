"""What generated code runs on: a wave's memories, groups of threads, barriers, its scheduler."""
