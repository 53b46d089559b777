"""A roofline to test with; its figures are round, and no GPU's."""

from __future__ import annotations

from flashsmith.benchmark.roofline import Ceiling, Roofline

ROOFLINE = Roofline(
    gpu="NVIDIA Test 9000",
    arch=90,
    sm_count=100,
    time="2026-01-02T03:04:05+00:00",
    environment={"gpu": "NVIDIA Test 9000", "driver": "580.1", "torch": "", "revision": "abc"},
    ceilings=(
        Ceiling("matmul_fp16", "TFLOP/s", note="PyTorch is not installed"),
        Ceiling(
            "mma_registers_fp16", "TFLOP/s", 600.0, 50.0, 0.01, 1500.0, 650.0, 4000.0, error=1e-6
        ),
        Ceiling("mma_shared_16_rows_fp16", "TFLOP/s", 400.0),
        Ceiling("mma_shared_32_rows_fp16", "TFLOP/s", 500.0),
        Ceiling("wgmma_n256_fp16", "TFLOP/s", 800.0),
        Ceiling("exp2", "Gop/s", 4000.0),
        Ceiling("l2_read", "TB/s", 8.0, error=0.0),
        Ceiling("dram_read", "TB/s", 4.0),
    ),
)
