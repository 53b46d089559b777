"""The problems that every release is proven on: of the forward pass, of gradients, of attention
over a cache. Tests run small covers of them in the emulator, tools/gpu/prove_grid.py all on a GPU.
"""
