#!/usr/bin/env bash
# On a machine with a GPU: the GPU tests, compute-sanitizer and the bench in one go, and a short summary.
#
#   GPT2BLOCK_DATA=path/to/test/data tools/gpu_check.sh [folder for the logs]
#
# The sanitizer's four tools run over tools/sanitize.py, every kernel at small sizes. Where a tool or the device
# refuses, the summary says "not run". The exit status is 0 only when everything ran and nothing was found.
set -uo pipefail
cd "$(dirname "$0")/.."
logs=${1:-$(mktemp -d)}
mkdir -p "$logs"
summary="$logs/summary.txt"
: > "$summary"
say() { echo "$*" | tee -a "$summary"; }

say "$(python3 -m gpt2block check | tee "$logs/check.txt" | grep -E ' (CuPy|driver|device|NVRTC) ' | tr -s ' ')"

parallel=$(python3 -c 'import xdist' 2> /dev/null && echo "-n 8")  # where pytest-xdist is there
timeout 600 python3 -m pytest --gpu -q -rsfEP $parallel tests > "$logs/tests.txt" 2>&1
status=$?
say "tests      $(tail -n 1 "$logs/tests.txt")"
grep -E '^SKIPPED|^FAILED|^ERROR' "$logs/tests.txt" | cut -c 1-160 | while read -r line; do say "           $line"; done

sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2> /dev/null)
grep -hE '^(first start|validation loss) ' "$logs/tests.txt" | while read -r line; do say "           $line"; done

for tool in memcheck racecheck initcheck synccheck; do
    if [ -z "$sanitizer" ]; then
        say "$tool  not run: compute-sanitizer is not installed"
        status=1
        continue
    fi
    exclude=(--kernel-name-exclude kernel_substring=cupy)
    [ "$tool" = initcheck ] && exclude=()  # has to see who writes what is read later
    timeout 200 "$sanitizer" --tool "$tool" "${exclude[@]}" python3 -m tools.sanitize > "$logs/$tool.txt" 2>&1
    result=$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY|Device not supported' "$logs/$tool.txt" | tail -n 1)
    grep -qE 'ERROR SUMMARY: 0 errors|hazards displayed \(0 errors, 0 warnings\)' <<< "$result" || status=1
    grep -q '^all done' "$logs/$tool.txt" && end="all of them" || { end="then it stopped" && status=1; }
    say "$(printf '%-10s' "$tool") ${result:-not run: $(tail -n 1 "$logs/$tool.txt")} ($(grep -c '^checked' "$logs/$tool.txt") checked, $end)"
done

for command in bench block; do
    timeout 120 python3 -m gpt2block $command > "$logs/$command.txt" 2>&1 || status=1
    tee -a "$summary" < "$logs/$command.txt"
done
grep -q 'GPT2BLOCK_DATA names no folder' "$logs/tests.txt" && say "tests were skipped for missing data" && status=1
exit $status
