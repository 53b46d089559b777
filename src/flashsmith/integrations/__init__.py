"""Integrations: functions of PyTorch and FlashAttention, transformers, vLLM and SGLang, on
flashsmith's kernels.

Only this folder may import torch at module level, so each module is imported on first use.
"""
