#!/usr/bin/env bash
# What flashsmith.parallel needs from two GPUs of one host, in at most ten minutes: kernels, messages
# and speed (parallel_bench.py), lost ranks (parallel_lost.py), proofs and canonical bits
# (parallel_bench.py again).
#
#   tools/gpu/parallel_visit.sh OUT [option...]
#
# OUT gets four files: visit.log, speed.jsonl, lost.jsonl and proofs.jsonl. A part that runs out of
# its time is ended, and has the rows so far. Options go to both tools, such as --gpus 4. SEQS, LOST
# and LIMIT (the seconds in all) have other lengths and times. The exit status is 1 if a part failed.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
out=$(realpath -m "${1:?"usage: tools/gpu/parallel_visit.sh OUT [option...]"}")
shift
mkdir -p "$out"
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
limit=${LIMIT:-570} failed=0

part() { # name, the most seconds, command...
    local name=$1 most=$2 start=$SECONDS status=0
    shift 2
    most=$((most < limit - SECONDS ? most : limit - SECONDS))
    if [ "$most" -le 0 ]; then
        echo "== $name: no time is left"
        failed=1
        return
    fi
    echo "== $name, at most $most s"
    timeout -k 5 "$most" "$@" || status=$?
    [ "$status" -eq 0 ] || failed=1
    echo "== $name: exit $status after $((SECONDS - start)) s"
}

{
    nvidia-smi topo -m 2>&1
    part speed 270 python3 tools/gpu/parallel_bench.py "$out/speed.jsonl" \
        --steps build,transfers,speed --seqs "${SEQS:-8192,4x8192,32768}" \
        --schedules auto,zigzag,ulysses --without-peers --rounds 9 "$@"
    part lost 170 python3 tools/gpu/parallel_lost.py "$out/lost.jsonl" --seqs "${LOST:-8192}" \
        --timeout 6 --at-once 6 "$@"
    part proofs 240 python3 tools/gpu/parallel_bench.py "$out/proofs.jsonl" \
        --steps build,proof,bits "$@"
    exit "$failed"
} 2>&1 | tee "$out/visit.log"
