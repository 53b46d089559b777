"""Integrations: PyTorch's and FlashAttention's functions, and Hugging Face transformers.

Only this folder may import torch at module level, so each module is imported on first use.
"""
