#!/usr/bin/env bash
# Checks everything that this repository claims about a GPU: runs the test suite, proves every config
# of the sets on several lengths, runs the four sanitizer tools, and writes rows for docs/results.md.
#
#   tools/gpu/prove.sh OUT [part...]     parts: tests sets sanitizer figures (default: these four)
#   tools/gpu/prove.sh OUT hopper sanitizer-wgmma    the wgmma kernels, on a GPU of sm_90
#   tools/gpu/prove.sh OUT backward sanitizer-backward    the backward families, on a GPU of sm_90
#   tools/gpu/prove.sh OUT decode sanitizer-decode    attention over a KV cache
#
# `tests` can also be run in parts: tests-emulator tests-semantics tests-verify tests-rest. TOOLS
# selects some of the sanitizer's four tools.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:?"usage: tools/gpu/prove.sh OUT [tests|sets|sanitizer|figures|hopper|sanitizer-wgmma|backward|sanitizer-backward|decode|sanitizer-decode]..."}
shift
parts=${*:-tests sets sanitizer figures}
# Each part of the suite takes a few minutes on 16 cores (WORKERS, default 15). A part that has
# passed is not run again.
parts=" $parts "
parts=${parts/ tests / tests-emulator tests-semantics tests-verify tests-rest }
# The first run is without a tool: it builds the kernels, so that no compiler runs under a tool.
tools=${TOOLS:-memcheck racecheck initcheck synccheck}
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

suite() { # part, path or option of pytest...
    local name=$1
    shift
    if [ -s "$out/$name.xml" ] && python3 tools/ci/count_tests.py "$out/$name.xml" >/dev/null; then
        echo "$name has passed; delete $out/$name.xml to run it again"
        return
    fi
    # With -v the log names the running test if the time is up. Each build uses four compilers,
    # since several workers build at once.
    step "$name" env FLASHSMITH_JOBS="${FLASHSMITH_JOBS:-4}" \
        python3 -m pytest "$@" -v -m full -n "${WORKERS:-15}" --dist worksteal -p no:cacheprovider \
        --junitxml="$out/$name.xml"
    tail -n 1 "$out/$name.log"
}

sanitized() { # tool, what, script of this folder, argument...
    local tool=$1 name=sanitizer-$1-$2 script=tools/gpu/$3 kernels=forward_kernel
    [[ $2 = *_backward ]] && kernels=backward
    [[ $2 = wgmma_dq ]] && kernels=dq_kernel
    [[ $2 = *_decode ]] && kernels=decode
    local under=(compute-sanitizer --tool "$tool" --report-api-errors no --error-exitcode 9
        --kernel-name "kernel_substring=$kernels")
    shift 3
    [ "$tool" = none ] && under=()
    step "$name" "${under[@]}" python3 tools/gpu/without_torch.py "$script" "$@"
    grep -E "ERROR SUMMARY|RACECHECK SUMMARY" "$out/$name.log"
}

for part in $parts; do
    case $part in
    tests-emulator) suite "$part" tests/ptxlab tests/mutants tests/csrc ;;
    tests-semantics) suite "$part" tests/semantics ;;
    tests-verify) suite "$part" tests/verify tests/builder ;;
    tests-rest)
        suite "$part" tests --ignore=tests/ptxlab --ignore=tests/mutants --ignore=tests/csrc --ignore=tests/semantics \
            --ignore=tests/verify --ignore=tests/builder
        ;;
    sets)
        step sets python3 tools/gpu/prove_sets.py "$out/sets.csv" --batch 2 --heads 2
        grep -E "wrong|built" "$out/sets.log"
        ;;
    sanitizer)
        kernels=$(python3 tools/gpu/sanitized_configs.py) || exit 1
        for tool in none $tools; do
            sanitized "$tool" configs prove_sets.py "$out/sanitizer-$tool.csv" \
                --kernels "$kernels" --seqs 256 --batch 1 --heads 2
            sanitized "$tool" semantics prove_grid.py "$out/sanitizer-$tool-semantics.csv" \
                --handful --workers 1
        done
        ;;
    sanitizer-wgmma)
        for tool in none $tools; do
            sanitized "$tool" wgmma prove_grid.py "$out/sanitizer-$tool-wgmma.csv" \
                --family wgmma --handful --workers 1
        done
        ;;
    sanitizer-backward)
        for family in mma_sync_backward wgmma_backward wgmma_dq; do
            for tool in none $tools; do
                sanitized "$tool" "$family" prove_grid.py "$out/sanitizer-$tool-$family.csv" \
                    --family "$family" --handful --workers 1
            done
        done
        ;;
    sanitizer-decode)
        sanitized none mma_sync_decode prove_grid.py "$out/sanitizer-none-mma_sync_decode.csv" \
            --family mma_sync_decode --handful --workers 1
        # sanitized_calls.py runs each call separately, so that one that does not end stops no other.
        for tool in $tools; do
            step "sanitizer-$tool-mma_sync_decode" python3 tools/gpu/sanitized_calls.py \
                "$out/sanitizer-$tool-mma_sync_decode/seen.csv" --tool "$tool" \
                --family mma_sync_decode --kernels decode
            tail -n 1 "$out/sanitizer-$tool-mma_sync_decode.log"
        done
        ;;
    decode)
        # Rows take host time, so there is one process per core.
        step grid-mma_sync_decode timeout 1800 python3 tools/gpu/prove_grid.py \
            "$out/grid-mma_sync_decode.csv" --family mma_sync_decode \
            --processes "$(nproc)" --seconds 1500
        tail -n 1 "$out/grid-mma_sync_decode.log"
        ;;
    backward)
        for family in mma_sync_backward wgmma_backward; do
            step "grid-$family" timeout 1800 python3 tools/gpu/prove_grid.py \
                "$out/grid-$family.csv" --family "$family" --seconds 1500
            tail -n 1 "$out/grid-$family.log"
        done
        ;;
    hopper)
        # The timeout ends a hanging kernel, which the log's last line names.
        step hopper-sets timeout 600 python3 tools/gpu/prove_sets.py "$out/hopper-sets.csv" \
            --kernels hopper --masks none causal --lazy --batch 2 --heads 4
        step hopper-grid timeout 1800 python3 tools/gpu/prove_grid.py "$out/hopper-grid.csv" \
            --family wgmma --seconds 1500
        tail -n 1 "$out/hopper-grid.log"
        ;;
    figures)
        for set in prog tune prog-all cover; do
            step "run-$set" python3 -m flashsmith run --kernels "$set" --json
        done
        ;;
    *)
        echo "unknown part '$part': tests, sets, sanitizer, figures, hopper, sanitizer-wgmma," \
            "backward, sanitizer-backward, decode or sanitizer-decode" >&2
        exit 2
        ;;
    esac
done
if compgen -G "$out/tests-*.xml" >/dev/null; then
    python3 tools/ci/count_tests.py "$out"/tests-*.xml
fi
exit $failed
