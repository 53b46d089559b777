#!/usr/bin/env bash
# Measures rounds of the verdict on a GPU, in which each cell's contenders are launched alternately.
# FlashAttention 4 is among them if it is installed. The rounds of several runs, at different times,
# are pooled into one table.
#
#   tools/gpu/verdict.sh OUT RUN [SETS]     RUN: a number; SETS: sets of cells (default: public)
#
# A run has ROUNDS rounds (default 5). Each overwrites OUT/verdict-SETS-RUN-ROUND.csv and begins with
# another contender. The script prints the table of all rounds of these sets in OUT. PEERS replaces
# the default fa2,cudnn,flash_attn_4. A round that fails ends the run; earlier rounds count.
set -euo pipefail
cd "$(dirname "$0")/../.."
usage="usage: tools/gpu/verdict.sh OUT RUN [SETS]"
out=${1:?"$usage"} run=${2:?"$usage"} sets=${3:-public}
[[ $run =~ ^[0-9]+$ ]] || { echo "RUN='$run': give a number; $usage" >&2; exit 2; }
mkdir -p "$out"
rows=$out/verdict-${sets//,/-}
rm -f "$rows-$run"-*.csv
status=0
for ((round = 0; round < ${ROUNDS:-5}; round++)); do
    name=$rows-$run-$round
    python3 -m flashsmith bench --kernels ours --cells "$sets" --protocol interleaved \
        --rotation "$((run + round))" --peers "${PEERS:-fa2,cudnn,flash_attn_4}" \
        --csv "$name.csv" >"$name.log" 2>&1 || status=$?
    [ "$status" -eq 0 ] || { tail -n 15 "$name.log" >&2; break; }
done
shopt -s nullglob
rounds=("$rows"-[0-9]*-[0-9]*.csv)
[ "${#rounds[@]}" -gt 0 ] || exit "$status"
python3 tools/benchmark/verdict.py "${rounds[@]}" | tee "$rows.md" || status=$?
exit "$status"
