#!/usr/bin/env bash
# The vLLM benchmarks on a GPU machine where vLLM 0.26.0 is importable but nothing can be installed. Not run yet.
#   PYTHONPATH=SITE benchmarks/vllm_gpu.sh OUT smoke|throughput|long|replay [SECONDS A PROCESS]
# smoke: four short requests, to see that it runs. The others: one cache after another, results to OUT/vllm.json as they come.
set -euo pipefail
out=${1:?usage: benchmarks/vllm_gpu.sh OUT SCENARIO [SECONDS]}
scenario=${2:?scenario}
seconds=${3:-280}
mkdir -p "$out"

# the engine finds plugins by the metadata of what is installed: a folder that has nothing else stands in for it
meta=$(mktemp -d)
trap 'rm -rf "$meta"' EXIT
mkdir "$meta/kvstrata-0.1.0.dist-info"
printf 'Metadata-Version: 2.1\nName: kvstrata\nVersion: 0.1.0\n' >"$meta/kvstrata-0.1.0.dist-info/METADATA"
printf '[vllm.general_plugins]\nkvstrata = kvstrata.adapters.vllm:register\n' >"$meta/kvstrata-0.1.0.dist-info/entry_points.txt"
export PYTHONPATH="$meta:$PWD:${PYTHONPATH:-}" PYTHONUNBUFFERED=1 VLLM_USE_FLASHINFER_SAMPLER=0

bench() { timeout $((4 * seconds + 60)) python3 -m benchmarks.bench_vllm --seconds "$seconds" --gib 12 --out "$out/vllm.json" "$@" 2>&1 | tee -a "$out/vllm.log"; }
case $scenario in
  smoke) bench --kv strata auto --eager --requests 4 --input 512 --output 16 ;;
  throughput) bench --requests 48 --input 8192 --output 256 ;;
  long) bench --requests 48 --input 8192 --output 1024 ;;
  replay) bench --scenario replay --requests 64 --input 2000 --output 300 --turns 8 ;;
  *) echo "unknown scenario $scenario; accepted: smoke, throughput, long, replay" >&2; exit 2 ;;
esac
