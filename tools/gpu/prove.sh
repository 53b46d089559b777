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
        for set in tune prog-all cover; do
            for seq in 128 256 512 1024 2048 4096; do
                step "run-$set-$seq" python3 -m flashsmith run --kernels "$set" --seq "$seq" \
                    --batch 2 --heads 8 --json
            done
        done
        ;;
    sanitizer)
        KERNELS=$(python3 tools/gpu/sanitized_configs.py) || exit 1
        export KERNELS
        for tool in memcheck racecheck initcheck synccheck; do
            step "sanitizer-$tool" compute-sanitizer --tool "$tool" --report-api-errors no \
                --error-exitcode 9 --kernel-name kernel_substring=flash_forward_kernel \
                python3 -m flashsmith run --seq 256 --batch 1 --heads 2
            grep -E "ERROR SUMMARY|RACECHECK SUMMARY" "$out/sanitizer-$tool.log"
        done
        ;;
    figures)
        step figures python3 -m flashsmith run --kernels tune --batch 16 --heads 16 --seq 4096 --json
        step ladder python3 -m flashsmith run --batch 16 --heads 16 --seq 4096
        ;;
    *)
        echo "unknown part '$part': tests, sets, sanitizer or figures" >&2
        exit 2
        ;;
    esac
done
exit $failed
