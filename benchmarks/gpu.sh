#!/usr/bin/env bash
# Everything that needs a GPU, in about eight minutes: kernels' tests compiled, the adapter end to end, the memory and race checkers, all benchmarks.
#   benchmarks/gpu.sh OUT [PATH OF vllm's _vllm_fa3_C.abi3.so]
# Logs and benchmarks/results/*.json are copied to OUT as they come.
set -uo pipefail
out=${1:?usage: benchmarks/gpu.sh OUT [FA3]}
fa3=${2:+--fa3 $2}
# a GPU that the CUDA kernels do not run on is an error here, where "auto" would take Triton's
export PYTHONUNBUFFERED=1 KVSTRATA_BACKEND=cuda
mkdir -p "$out"
kernels="tests/ops/test_decode_kernel.py tests/ops/test_extend_kernel.py tests/ops/test_write_kernel.py tests/ops/test_write_cuda.py tests/ops/test_extend_cuda.py tests/ops/test_decode_cuda.py tests/ops/test_prefill_kernel.py tests/ops/test_prefill_cuda.py tests/ops/test_read_kernel.py tests/ops/test_score_kernel.py"
(timeout 240 python3 -m pytest -q -n 10 -m gpu $kernels tests/adapters/test_gpu.py >"$out/tests.log" 2>&1) &
(timeout 80 compute-sanitizer --tool memcheck --error-exitcode 9 python3 -m pytest -q -m gpu $kernels -k "int2 or settle or live-a-head or int4-ragged or window-100" >"$out/sanitizer.log" 2>&1
 echo "exit code $?" >>"$out/sanitizer.log") &
(timeout 80 compute-sanitizer --tool racecheck --error-exitcode 9 python3 -m pytest -q -m gpu tests/ops/test_decode_kernel.py tests/ops/test_write_cuda.py -k "cuda-int2 or cuda-live-a-head or gathered and 64" >"$out/race.log" 2>&1
 echo "exit code $?" >>"$out/race.log") &
wait
grep -E "passed|failed|^FAILED|^E  " "$out/tests.log" | tail -12
grep -E "ERROR SUMMARY|passed|failed|exit code" "$out/sanitizer.log" | tail -4
grep -E "RACECHECK SUMMARY|passed|failed|exit code" "$out/race.log" | tail -4
for bench in decode write extend prefill hyquant; do
  timeout 90 python3 -m "benchmarks.bench_$bench" $([[ "$bench" =~ decode|hyquant ]] && echo "$fa3") >"$out/$bench.log" 2>&1
  tail -20 "$out/$bench.log"
  cp benchmarks/results/*.json "$out/"
done
