#!/usr/bin/env bash
# The first hour on a GPU: correctness first, then races, then speed.
#
#   tools/gpu_day.sh [STEP...]     all steps, or those named; a step that has passed is skipped
#
# PYTHON (python3) needs torch, triton, numpy and pytest; the build also needs nvcc, setuptools, pybind11
# and ninja. OUT (build/gpu-day) gets a log and, once passed, a marker for each step, the results of the
# benchmarks, and what `fastattn tune` records for this GPU. LIMIT (540) ends a step after so many
# seconds, for machines that end every command after ten minutes; run the script again to continue.
set -uo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
OUT=${OUT:-build/gpu-day}
LIMIT=${LIMIT:-540}
mkdir -p "$OUT"
export FASTATTN_CACHE_DIR="$PWD/$OUT" FASTATTN_REQUIRE_NATIVE=0 PYTHONUNBUFFERED=1
export PYTHONPATH="$PWD:$PWD/tests/support:$PWD/tests/emulator" PATH="$PATH:/usr/local/cuda/bin"
# One case of each operator that takes few tiles, for the sanitizers.
FEW="plain or lengths-65x65-full or lengths-33x65-upper_left or interleaved-16 or 3x4x5x11x8-bow"
PROVIDERS=torch,torch@flash,torch@cudnn,torch@efficient,torch@math,torch-flex
PROVIDERS+=,fastattn@cuda,fastattn@sm_80,fastattn@triton

tests() { "$PYTHON" -m pytest -p no:cacheprovider -p sample --complete -q --tb=short --maxfail=20 "$@"; }

cases() { tests tests/gpu/test_cases_on_gpu.py -k "test_case and $1"; }

sanitize() {
  compute-sanitizer --tool "$1" --error-exitcode 9 \
    "$PYTHON" -m pytest -p no:cacheprovider -p sample --complete -q --tb=short --maxfail=20 \
    tests/gpu/test_cases_on_gpu.py -k "test_case and cuda and bfloat16 and ($FEW)"
}

speed() { # OPERATOR...: its lines of benchmarks/gpu.txt
  local line arguments=()
  while read -r line; do
    for op in "$@"; do [[ $line == "$op "* ]] && arguments+=(--shapes "$line"); done
  done < benchmarks/gpu.txt
  "$PYTHON" -m fastattn bench run --device cuda --quiet --resume --rounds 15 --providers "$PROVIDERS" \
    --time-budget $((LIMIT - 60)) --out "$OUT/speed-$1" "${arguments[@]}"
}

build() {
  "$PYTHON" -c 'from fastattn.backends import cuda; print(cuda.operands.INFO)' && return
  FASTATTN_CUDA=1 FASTATTN_CPU_ISAS=native FASTATTN_REQUIRE_NATIVE=1 \
    "$PYTHON" setup.py build_ext --inplace
}

# name | command, the most valuable first
STEPS='
build                  | build
wrappers               | tests tests/cuda/test_emulator.py -k cuda
cuda-bfloat16          | cases "cuda and bfloat16"
cuda-float32           | cases "cuda and float32"
large-scores           | tests tests/gpu/test_cases_on_gpu.py -k test_large_scores
calls                  | tests tests/gpu/test_calls_on_gpu.py
repeats-cuda           | tests tests/gpu/test_races_on_gpu.py -k cuda
memcheck               | sanitize memcheck
racecheck              | sanitize racecheck
synccheck              | sanitize synccheck
speed-attention        | speed sdpa
speed-decoding         | speed decode varlen
tune                   | "$PYTHON" -m fastattn tune --device cuda
cuda-float16           | cases "cuda and float16 and not bfloat16"
sm_80-on-hopper        | tests tests/gpu/test_hopper_on_gpu.py
triton-bfloat16        | cases "triton and bfloat16"
triton-float32         | cases "triton and float32"
triton-float16         | cases "triton and float16 and not bfloat16"
torch                  | tests tests/gpu/test_cases_on_gpu.py -k test_attention_by_pytorch
repeats-triton         | tests tests/gpu/test_races_on_gpu.py -k triton
speed-others           | speed sinusoidal additive memory_hops encode_memory hopfield mha
'

if [[ ${1:-} == --step ]]; then # one step, in the process that `timeout` ends
  eval "$2"
  exit
fi

if ! "$PYTHON" -c 'import torch; raise SystemExit(not torch.cuda.is_available())'; then
  echo "PyTorch sees no GPU here"
  exit 1
fi

failed=0
while IFS='|' read -r name command; do
  name=${name// /}
  [[ -z $name || ($# -gt 0 && " $* " != *" $name "*) || -e $OUT/$name.passed ]] && continue
  printf -- '-- %s:%s\n' "$name" "$command"
  timeout --kill-after=15 "$LIMIT" "$0" --step "$command" > "$OUT/$name.log" 2>&1 < /dev/null
  case $? in
    0) touch "$OUT/$name.passed" && tail -n 1 "$OUT/$name.log" ;;
    5) echo "   no test is for this GPU" ;;
    124 | 137) echo "   reached its limit of $LIMIT s" && failed=1 ;;
    *) tail -n 5 "$OUT/$name.log" && failed=1 ;;
  esac
done <<< "$STEPS"
exit $failed
