#!/usr/bin/env bash
# The vLLM tests and benchmarks on a GPU machine where vLLM 0.26.0 is importable but nothing can be installed.
#   PYTHONPATH=SITE benchmarks/vllm_gpu.sh OUT test [ARGUMENTS OF PYTEST]
#   PYTHONPATH=SITE benchmarks/vllm_gpu.sh OUT bench [ARGUMENTS OF benchmarks.bench_vllm]      results to OUT/vllm.json as they come
set -uo pipefail
out=${1:?usage: benchmarks/vllm_gpu.sh OUT test|bench [ARGUMENTS]}
what=${2:?test or bench}
shift 2
mkdir -p "$out"

# the engine finds plugins by the metadata of what is installed: a folder that has nothing else stands in for it
meta=$(mktemp -d)
trap 'rm -rf "$meta"' EXIT
mkdir "$meta/kvstrata-0.1.0.dist-info"
printf 'Metadata-Version: 2.1\nName: kvstrata\nVersion: 0.1.0\n' >"$meta/kvstrata-0.1.0.dist-info/METADATA"
printf '[vllm.general_plugins]\nkvstrata = kvstrata.adapters.vllm:register\n' >"$meta/kvstrata-0.1.0.dist-info/entry_points.txt"
export PYTHONPATH="$meta:$PWD:${PYTHONPATH:-}" PYTHONUNBUFFERED=1 VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1

case $what in
  test) python3 -m pytest -p no:cacheprovider -m gpu tests/adapters/vllm/v026/test_gpu.py "$@" 2>&1 | tee -a "$out/vllm_test.log" ;;
  bench) python3 -m benchmarks.bench_vllm --out "$out/vllm.json" "$@" 2>&1 | tee -a "$out/vllm.log" ;;
  *) echo "unknown: $what; accepted: test, bench" >&2; exit 2 ;;
esac
