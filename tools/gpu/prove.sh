#!/usr/bin/env bash
# Everything this repository claims about a GPU, in one visit: the test suite, every config of the
# sets over several lengths, the four sanitizer tools, and the rows for docs/results.md.
#
#   tools/gpu/prove.sh OUT [part...]     parts: tests sets sanitizer figures (default: all)
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:?"usage: tools/gpu/prove.sh OUT [tests|sets|sanitizer|figures]..."}
shift
parts=${*:-tests sets sanitizer figures}
mkdir -p "$out"
failed=0

step() { # name, command...
    local name=$1 start=$SECONDS status=0
    shift
    "$@" >"$out/$name.log" 2>&1 || status=$?
    [ "$status" -eq 0 ] || failed=1
    printf '%-28s exit %d, %d s\n' "$name" "$status" $((SECONDS - start))
    [ "$status" -eq 0 ] || tail -n 15 "$out/$name.log"
}

for part in $parts; do
    case $part in
    tests) step pytest python3 -m pytest -q -n 12 -p no:cacheprovider ;;
    sets)
        step sets python3 tools/gpu/prove_sets.py "$out/sets.csv" --batch 2 --heads 2
        grep -E "wrong|built" "$out/sets.log"
        ;;
    sanitizer)
        kernels=$(python3 tools/gpu/sanitized_configs.py) || exit 1
        for tool in memcheck racecheck initcheck synccheck; do
            step "sanitizer-$tool" compute-sanitizer --tool "$tool" --report-api-errors no \
                --error-exitcode 9 --kernel-name kernel_substring=flash_forward_kernel \
                python3 tools/gpu/prove_sets.py "$out/sanitizer-$tool.csv" --kernels "$kernels" \
                --seqs 256 --batch 1 --heads 2
            grep -E "ERROR SUMMARY|RACECHECK SUMMARY" "$out/sanitizer-$tool.log"
        done
        ;;
    figures)
        for set in prog tune prog-all cover; do
            step "run-$set" python3 -m flashsmith run --kernels "$set" --json
        done
        ;;
    *)
        echo "unknown part '$part': tests, sets, sanitizer or figures" >&2
        exit 2
        ;;
    esac
done
exit $failed
