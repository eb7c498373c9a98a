#!/usr/bin/env bash
# On a machine with a GPU: the GPU tests, compute-sanitizer and benchmarks in one go, and a short summary.
#
#   GPT2BLOCK_DATA=path/to/test/data tools/gpu_check.sh [folder for the logs [tests|tests=I/N] [sanitizer] [bench] [cards]]
#
# Without names of parts, tests, sanitizer and bench run. cards runs the tests of references, models, batches, drafts and
# prefixes (of the architectures in bfloat16) with the kernels of each card of CARDS (tools/as_gpu.py), at most
# SECONDS_OF_CARD (96) for a card. tests=I/N runs part I of N of the tests, for machines that limit the time of a call.
# SECONDS_OF_TESTS (540) after their start, the tests are interrupted, and the summary names the tests that have failed.
# Each failure is written to failures-I.txt as soon as it is reported. A process whose CUDA context is lost is replaced,
# and its test is named. The sanitizer's four tools run at the same time on tools/sanitize.py, with every
# kernel at small sizes or only the parts that SANITIZED names.
# If a tool or the device refuses, the summary says "not run". The exit status is 0 only if everything ran and nothing
# was found.
set -uo pipefail
cd "$(dirname "$0")/.."
logs=${1:-$(mktemp -d)}
SANITIZED=${SANITIZED:-}
parts=" ${*:2} "
[ "$parts" = "  " ] && parts=" tests sanitizer bench "
mkdir -p "$logs"
summary="$logs/summary.txt"
: > "$summary"
status=0
say() { echo "$*" | tee -a "$summary"; }

gpu_tests() {  # part: I/N
    local log="$logs/tests-${1%/*}.txt" failures="$logs/failures-${1%/*}.txt" result=0
    # if pytest-xdist is installed
    parallel=$(python3 -c 'import xdist' 2> /dev/null && echo "-n $(($(nproc) < 12 ? $(nproc) : 12))")
    # An interrupted pytest prints its summary. A pytest that hangs is killed.
    timeout --signal=INT --kill-after=15 "${SECONDS_OF_TESTS:-540}" python3 -m pytest --gpu -m "gpu or slow" --part "$1" \
        --failures "$failures" -v -rsfEP --tb=short --durations=20 $parallel tests > "$log" 2>&1 || result=$?
    [ $result -eq 0 ] || status=1
    say "tests $1  $(tail -n 1 "$log")"
    [ $result -eq 124 ] || [ $result -eq 137 ] && say "           stopped after ${SECONDS_OF_TESTS:-540} s: run more parts"
    grep -E '^FAILED ' "$failures" | sort | uniq -c | cut -c 1-200 | while read -r line; do say "           $line"; done
    grep -E 'the CUDA context is lost|worker .* crashed' "$log" | sort -u | cut -c 1-200 \
        | while read -r line; do say "           $line"; done
    grep -E '^SKIPPED|^ERROR' "$log" | cut -c 1-160 | while read -r line; do say "           $line"; done
    grep -hE '^(first start|validation loss) ' "$log" | while read -r line; do say "           $line"; done
    grep -q 'GPT2BLOCK_DATA names no folder' "$log" && say "tests were skipped for missing data" && status=1
}

sanitizers() {
    sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2> /dev/null)
    [ -z "$sanitizer" ] && say "sanitizer  not run: compute-sanitizer is not installed" && status=1 && return
    tools="memcheck racecheck initcheck synccheck"
    for tool in $tools; do
        exclude=(--kernel-name-exclude kernel_substring=cupy)
        which=()
        # initcheck must see all writes of memory that is read later, but does not see TMA's writes
        [ "$tool" = initcheck ] && exclude=() && which=(--without-hopper)
        # shellcheck disable=SC2086
        timeout 500 "$sanitizer" --tool "$tool" "${exclude[@]}" \
            python3 -m tools.sanitize $SANITIZED "${which[@]}" > "$logs/$tool.txt" 2>&1 &
    done
    wait
    for tool in $tools; do
        result=$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY|Device not supported' "$logs/$tool.txt" | tail -n 1)
        grep -qE 'ERROR SUMMARY: 0 errors|hazards displayed \(0 errors, 0 warnings\)' <<< "$result" || status=1
        grep -q '^all done' "$logs/$tool.txt" && end="all of them" || { end="then it stopped" && status=1; }
        result=${result:-not run: $(tail -n 1 "$logs/$tool.txt")}
        say "$(printf '%-10s' "$tool") $result ($(grep -c '^checked' "$logs/$tool.txt") checked, $end)"
    done
}

bench() {
    for command in "benchmarks.blocks --what block" "benchmarks.models gpt2 --only row" "gpt2block block" \
        "gpt2block profile --size gpt2 --dtype bfloat16 --tokens 512 -o $logs/trace.json"; do
        log="$logs/$(cut -d " " -f 1,2 <<< "$command" | tr -d " ").txt"
        # shellcheck disable=SC2086
        timeout 300 python3 -m $command > "$log" 2>&1 || status=1
        tee -a "$summary" < "$log"
    done
}

cards() {
    parallel=$(python3 -c 'import xdist' 2> /dev/null && echo "-n $(($(nproc) < 12 ? $(nproc) : 12))")
    for card in ${CARDS:-7.5 8.0 8.6 8.9 12.0}; do
        local log="$logs/card-$card.txt" result=0
        # shellcheck disable=SC2086
        timeout --signal=INT --kill-after=15 "${SECONDS_OF_CARD:-96}" python3 tools/as_gpu.py "$card" -- python3 -m pytest \
            --gpu -m gpu -k "not every_architecture or bfloat16 and False" -q --tb=short $parallel tests/ops/test_every_operation.py tests/engine/test_llama_cuda.py \
            tests/engine/test_batching.py tests/engine/test_draft.py tests/engine/test_prefixes.py > "$log" 2>&1 || result=$?
        [ $result -eq 0 ] || status=1
        say "as $card     $(tail -n 1 "$log")"
        grep -E '^FAILED |^ERROR ' "$log" | cut -c 1-160 | while read -r line; do say "           $line"; done
    done
}

say "$(python3 -m gpt2block check | tee "$logs/check.txt" | grep -E ' (CuPy|driver|device|NVRTC) ' | tr -s ' ')"
[[ $parts == *" tests "* ]] && gpu_tests 1/1
for part in $parts; do [[ $part == tests=*/* ]] && gpu_tests "${part#tests=}"; done
[[ $parts == *" sanitizer "* ]] && sanitizers
[[ $parts == *" bench "* ]] && bench
[[ $parts == *" cards "* ]] && cards
exit $status
