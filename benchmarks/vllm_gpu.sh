#!/usr/bin/env bash
# The vLLM tests and benchmarks on a GPU machine where vLLM 0.26.0 is importable but nothing can be installed.
#   PYTHONPATH=SITE benchmarks/vllm_gpu.sh OUT WHAT [ARGUMENTS]
# WHAT, each with a guard on its time, the rows to OUT/vllm.json as they come:
#   test       the comparison with the PyTorch reference inside the engine [ARGUMENTS OF pytest]
#   bench      [ARGUMENTS OF benchmarks.bench_vllm]
#   tp2        two GPUs: the tokens of one, then throughput and agents beside fp8, 6 GiB of KV on each GPU
#   caches     the engine's int4_per_token_head and bf16 caches under the loads of vllm.json
#   triaxial   planes by what tokens are, and with ageing: agents, in a conversation of MODEL's template [MODEL: a folder with config.json and tokenizer]
#   compile    the engine's default, torch.compile, for strata and fp8
set -uo pipefail
out=${1:?usage: benchmarks/vllm_gpu.sh OUT WHAT [ARGUMENTS]}
what=${2:?test, bench, tp2, caches, triaxial or compile}
shift 2
mkdir -p "$out"

# the engine finds plugins by the metadata of what is installed: a folder that has nothing else stands in for it
meta=$(mktemp -d)
trap 'rm -rf "$meta"' EXIT
mkdir "$meta/kvstrata-0.1.0.dist-info"
printf 'Metadata-Version: 2.1\nName: kvstrata\nVersion: 0.1.0\n' >"$meta/kvstrata-0.1.0.dist-info/METADATA"
printf '[vllm.general_plugins]\nkvstrata = kvstrata.adapters.vllm:register\n' >"$meta/kvstrata-0.1.0.dist-info/entry_points.txt"
export PYTHONPATH="$meta:$PWD:${PYTHONPATH:-}" PYTHONUNBUFFERED=1 VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
# NVLink multicast may be unavailable, and harmful where GPUs are shared with others
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 VLLM_ALLREDUCE_USE_SYMM_MEM=0 VLLM_ALLREDUCE_USE_FLASHINFER=0

tests() { timeout "$1" python3 -m pytest -p no:cacheprovider -m gpu "${@:2}" 2>&1 | tee -a "$out/vllm_test.log"; }
# bench SECONDS ...: no process is started when less than 30 s of them are left
bench() { python3 -m benchmarks.bench_vllm --out "$out/vllm.json" --until "$1" --seconds "$1" "${@:2}" 2>&1 | tee -a "$out/vllm.log"; }

agents=32x2000/300x8
case $what in
  test) tests 290 tests/adapters/vllm/v026/test_gpu.py "$@" ;;
  bench) bench 290 "$@" ;;
  tp2)
    tests 110 tests/adapters/vllm/v026/test_gpu_parallel.py -s "$@"
    bench 160 --tensor-parallel 2 --gib 6 --kv strata fp8 --load 48x8192/1024 $agents --engine '{"distributed_executor_backend": "mp", "disable_custom_all_reduce": true}'
    ;;
  caches)
    bench 130 --kv int4_per_token_head --load $agents 48x8192/1024 48x8192/256 "$@"
    bench 160 --kv auto --load $agents 48x8192/256 "$@"
    ;;
  triaxial)
    model=${1:?a folder with config.json and the tokenizer of a model}
    shift
    engine='{"skip_tokenizer_init": false, "load_format": "dummy"}'
    for settings in '{"policy": "triaxial", "budget_bits": 3.0}' '{"policy": "triaxial", "budget_bits": 3.0, "ageing": "INT2"}'; do
      # so little KV that pages of waiting agents are wanted
      # a machine's first process compiles kernels and takes 70 s to start
      bench 150 --model "$model" --engine "$engine" --chat --gib 8 --kv strata --settings "$settings" --load $agents "$@"
    done
    ;;
  compile)
    engine='{"compilation_config": {"mode": 3, "cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32, 48]}, "max_num_seqs": 48}'
    bench 290 --engine "$engine" --seconds 145 --kv strata fp8 --load 48x8192/256 "$@"
    ;;
  *) echo "unknown: $what; accepted: test, bench, tp2, caches, triaxial, compile" >&2; exit 2 ;;
esac
