"""flashsmith in other libraries: PyTorch's and FlashAttention's functions, transformers.

Only this folder may import torch at module level, so each of its modules loads when it is used.
"""
