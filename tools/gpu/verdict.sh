#!/usr/bin/env bash
# One run of the verdict on a GPU; three of them, at different times, make the table of
# docs/results.md. Each begins with another contender, and takes do_bench's protocol.
#
#   tools/gpu/verdict.sh OUT RUN [SETS]     RUN: 0, 1 or 2; SETS: of cells (default: public)
#
# Every run writes OUT/verdict-SETS-RUN.csv anew, and prints the table of all runs there are.
set -euo pipefail
cd "$(dirname "$0")/../.."
usage="usage: tools/gpu/verdict.sh OUT RUN [SETS]"
out=${1:?"$usage"} run=${2:?"$usage"} sets=${3:-public}
mkdir -p "$out"
rows=$out/verdict-${sets//,/-}
rm -f "$rows-$run.csv"
status=0
python3 -m flashsmith bench --kernels ours --cells "$sets" --protocol one_by_one \
    --rotation "$run" --peers "${PEERS:-fa2,cudnn}" --csv "$rows-$run.csv" \
    >"$rows-$run.log" 2>&1 || status=$?
[ "$status" -eq 0 ] || tail -n 15 "$rows-$run.log"
[ -s "$rows-$run.csv" ] || exit "$status"
python3 tools/benchmark/verdict.py "$rows"-[0-9].csv | tee "$rows.md"
exit "$status"
