#!/usr/bin/env bash
# Measures every config of the set 'tune' at each length and writes profiles/autotune.csv.
#
#     tools/benchmark/benchmark_autotune.sh [--ncu] [SEQ_LENS]
#
# SEQ_LENS: separated by commas; default: 1024,2048,4096,8192,16384. Times come from CUDA events
# (flashsmith bench), which need no profiler and no permission to read counters; each kernel is
# proven first. With --ncu they come from Nsight Compute (flashsmith ncu), and the rows go to
# profiles/autotune-ncu.csv. KERNELS replaces 'tune', and PYTHON replaces python3.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

profiler=
if [[ "${1:-}" == --ncu ]]; then
    profiler=1
    shift
fi
if [[ $# -gt 1 || "${1:-}" == -* ]]; then
    echo "usage: tools/benchmark/benchmark_autotune.sh [--ncu] [SEQ_LENS]" >&2
    exit 2
fi
export KERNELS="${KERNELS:-tune}"
options=(--seq_lens "${1:-1024,2048,4096,8192,16384}" --d_heads 128)
python="${PYTHON:-python3}"

mkdir -p profiles
if [[ -n "$profiler" ]]; then
    # Continues an interrupted sweep.
    exec "$python" tools/benchmark/ncu_bench.py "${options[@]}" --csv profiles/autotune-ncu.csv
fi
# Rows are appended, so the rows of an earlier sweep are moved away.
if [[ -e profiles/autotune.csv ]]; then
    mv -f profiles/autotune.csv profiles/autotune.previous.csv
fi
exec "$python" tools/benchmark/pt_bench.py --peers none "${options[@]}" --csv profiles/autotune.csv
