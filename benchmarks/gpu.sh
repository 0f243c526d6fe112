#!/usr/bin/env bash
# Everything that needs a GPU, in one command of at most ten minutes: the tests, then every system at every size in
# a process of its own, then the table of whatever came out.
#
#   bash benchmarks/gpu.sh                      # results in benchmarks/results/gpu
#   OUT=somewhere BUDGET_S=300 bash benchmarks/gpu.sh
#   TINY=1 bash benchmarks/gpu.sh               # tries the script itself, on the CPU
#
# PYTHON chooses the interpreter; the project is installed into it. Exits with the tests' exit code.
set -uo pipefail
cd "$(dirname "$0")/.."

BUDGET_S=${BUDGET_S:-570}
PYTHON=${PYTHON:-python3}
OUT=${OUT:-benchmarks/results/gpu}
mkdir -p "$OUT"
CASES=$OUT/cases.jsonl LOG=$OUT/log.txt
rm -f "$CASES" "$LOG" "$OUT"/profile*.txt "$OUT"/profile*.json "$OUT/table.txt" "$OUT"/tests*.txt
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
DEVICE=(--device cuda)
[ -n "${TINY:-}" ] && DEVICE=(--device cpu --tiny)

left() { echo $((BUDGET_S - SECONDS)); }

# run_case NAME LIMIT_S SYSTEM SIZE OPTIONS [more arguments]: one process, its own limit, never the end of the script
run_case() {
  local name=$1 limit=$2 system=$3 size=$4 options=$5
  shift 5
  if (($(left) < 30)); then
    printf '{"name": "%s", "error": "no time was left to start it"}\n' "$name" >> "$CASES"
    return
  fi
  ((limit > $(left) - 10)) && limit=$(($(left) - 10))
  timeout -k 5 "$limit" "$PYTHON" -m benchmarks.gpu_case --name "$name" --system "$system" --size "$size" \
    --options "$options" --out "$CASES" --max-s $((limit - 8)) "${DEVICE[@]}" "$@" >> "$LOG" 2>&1
  local code=$?
  echo "[$SECONDS s] $name: exit code $code"
  "$PYTHON" -m benchmarks.gpu_table "$CASES" > "$OUT/table.txt" 2>> "$LOG" # so far: the next case may be the last
}

echo "[$SECONDS s] installing into $("$PYTHON" -V 2>&1)"
timeout -k 5 "${INSTALL_S:-120}" "$PYTHON" -m pip install -q --disable-pip-version-check --no-build-isolation --no-deps -e . >> "$LOG" 2>&1 \
  || echo "the installation failed (see log.txt): running from the checkout"
"$PYTHON" - << 'PY'
import os, torch
free = torch.cuda.mem_get_info()[0] / 2**30 if torch.cuda.is_available() else 0
name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
print(f"torch {torch.__version__}, {name}, {free:.0f} GiB free, {os.cpu_count()} cores")
PY

# Everything that ends the tests early leaves their report: pytest stops by itself before `timeout` would end it, a
# test that waits in CUDA is ended by a thread (no signal reaches Python there), and each line is written as it comes.
TESTS_S=${TESTS_S:-120} # 76 s were enough on an H200
TESTS_END=$((SECONDS + TESTS_S))
LIMITS=(--timeout=60 -o timeout_method=thread)
HELP=$OUT/pytest_help.txt # a file: in a pipe grep would leave at the match, and pytest would fail at its next write
"$PYTHON" -m pytest --help > "$HELP" 2>> "$LOG"
WORKERS=()
"$PYTHON" -c 'import xdist' 2> /dev/null && WORKERS=(-n "${TEST_WORKERS:-6}")
export GEMINI_TEST_DEVICE=cuda
[ -n "${TINY:-}" ] && GEMINI_TEST_DEVICE=cpu

# run_tests REPORT [arguments]: what is left of the tests' time; the exit code is pytest's, but 5 (no test) is none
run_tests() {
  local report=$1 limit=$((TESTS_END - SECONDS)) code
  shift
  ((limit < 20)) && limit=20
  local limits=("${LIMITS[@]}")
  grep -q -- --session-timeout "$HELP" && limits+=(--session-timeout=$((limit > 20 ? limit - 15 : limit)))
  timeout -k 5 "$limit" "$PYTHON" -m pytest -q -rfE --tb=short --durations=5 "${limits[@]}" -m gpu \
    ${TESTS_K:+-k "$TESTS_K"} "$@" > "$report" 2>&1
  code=$?
  tail -n 25 "$report"
  echo "[$SECONDS s] $report: exit code $code"
  return $((code == 5 ? 0 : code))
}

# Free memory, rates and peaks are the whole device's: another test beside these would be measured with them.
ALONE=() BESIDE=()
for name in monitor rates recorder live_memory; do
  ALONE+=("tests/gpu/test_$name.py")
  BESIDE+=("--ignore=tests/gpu/test_$name.py")
done
run_tests "$OUT/tests_alone.txt" "${ALONE[@]}"
tests=$?
run_tests "$OUT/tests.txt" "${WORKERS[@]}" "${BESIDE[@]}" tests/gpu
beside=$?
((tests == 0)) && tests=$beside

# host_memory is said because a virtual machine may show little memory until it is used
HOST='"host_memory": "100GiB"'
ON_HOST="{$HOST, \"tensor_placement_policy\": \"cpu\", \"bytes_per_parameter\": $([ -n "${TINY:-}" ] && echo 4 || echo 1)}"
# 7 B parameters have 100 GiB of state: weights and gradients fit into 40 GiB beside 30 % for activations, the rest
# (76 GiB) is on the host
BIG_MEMORY=${BIG_MEMORY:-40GiB}

# The most wanted first: what is at the end may find no time left. Each case ends by itself at its limit.
# The curve: steps of 8k, 16k, 32k and 128k tokens in micro-batches of 8k, in 40 GiB and resident. Both take the same
# steps, so the hashes of their weights are equal. With clipping an update hides behind forwards alone.
CURVE=(--micro-batches 1,2,4,16 --warm-up 1 --steps 2)
run_case "ours 7B in $BIG_MEMORY" 200 "ours" 7B "{$HOST, \"device_memory\": \"$BIG_MEMORY\"}" "${CURVE[@]}" \
  --profile-to "$OUT/profile_big.txt"
run_case "ours 7B, everything fits" 130 "ours" 7B '{}' "${CURVE[@]}"
run_case "ours 7B in $BIG_MEMORY, update in backward" 60 "ours" 7B \
  "{$HOST, \"device_memory\": \"$BIG_MEMORY\", \"clip_grad_norm\": null, \"update_in_backward\": true}" --warm-up 2 --steps 3
run_case "ours 13B" 60 "ours" 13B "{\"host_memory\": \"110GiB\"}" --warm-up 1 --steps 3
run_case "ours 17B" 80 "ours" 17B "{\"host_memory\": \"112GiB\"}" --warm-up 1 --steps 3
run_case "ours 1.3B" 60 "ours" 1.3B '{}' --profile-to "$OUT/profile.txt"
run_case "FSDP2 1.3B" 40 "FSDP2" 1.3B '{}'
run_case "plain autocast 1.3B" 40 "plain autocast" 1.3B '{}'
run_case "ours on the host 1.3B" 45 "ours" 1.3B "$ON_HOST" --profile-to "$OUT/profile_host.txt"
run_case "ours on the host 1.3B, update in backward" 45 "ours" 1.3B \
  "${ON_HOST%\}}, \"clip_grad_norm\": null, \"update_in_backward\": true}"
run_case "FSDP2 offload 1.3B" 45 "FSDP2 + CPUOffloadPolicy" 1.3B '{"offload": true}'
run_case "ours 3B" 60 "ours" 3B '{}' --steps 4
run_case "FSDP2 3B" 60 "FSDP2" 3B '{}' --steps 4
run_case "ours on the host 3B" 70 "ours" 3B "$ON_HOST" --warm-up 1 --steps 3
run_case "FSDP2 offload 3B" 70 "FSDP2 + CPUOffloadPolicy" 3B '{"offload": true}' --warm-up 1 --steps 3
run_case "plain autocast 3B" 60 "plain autocast" 3B '{}' --steps 4

"$PYTHON" -m benchmarks.gpu_table "$CASES" | tee "$OUT/table.txt"
echo "[$SECONDS s] done; tests: exit code $tests"
exit "$tests"
