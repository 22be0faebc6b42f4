#!/usr/bin/env bash
# Measure the data path of language models and run GPU tests, on one, two or (best) four GPUs.
# Usage: benchmarks/gpu_data.sh WORK RESULTS [BUDGET_SECONDS [SHAPE]]     (benchmarks/README.md describes the results)
# Lanes: `one` measures on the first GPU, `two` tests on the second, `pair` and `last` test on two GPUs. With four GPUs
# `pair` runs at the same time on the other two; with two GPUs it runs afterwards. RESULTS gets a log for each lane, and facts.jsonl.
# To try it without GPUs (tests are skipped): benchmarks/gpu_data.sh WORK RESULTS 500 tiny
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
work=$1 results=$2 budget=${3:-540} shape=${4:-qwen3-0.6b}
. benchmarks/pieces.sh
gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())')
size=(--documents 96 --bins 4 --steps 8) cpu=()
[ "$gpus" -eq 0 ] && cpu=(--cpu) size=(--documents 16 --steps 2)
test="python3 -m pytest -p no:cacheprovider -v -rfEsP --tb=short --timeout 110 -m gpu"

one() {
    export CUDA_VISIBLE_DEVICES=$1
    local lane=one recipe="$work/$shape/recipe.yaml" rows=(--set batch.global_size=8)
    piece "model_$shape" 180 python3 benchmarks/random_model.py "$shape" "$work/$shape" --rows 4000 --median 330
    piece data_wait 170 python3 benchmarks/data_wait.py "$recipe" --workers 0 2 --steps $((gpus ? 40 : 8)) "${rows[@]}" \
        --facts "$results/facts.jsonl" "${cpu[@]}"
    piece packed_against_padded 150 python3 benchmarks/packed_against_padded.py "$recipe" --capacity 4096 "${size[@]}" \
        --set batch.micro_size=8 --facts "$results/facts.jsonl" "${cpu[@]}"
    piece four_bits 200 $test tests/gpu/test_quantization.py -k "single and resumes"
}

two() {
    export CUDA_VISIBLE_DEVICES=$1
    local lane=two
    piece attention 180 $test tests/gpu/test_attention_on_gpus.py
    piece steady 240 $test tests/gpu/test_steady_loop_on_gpus.py
    piece packing 240 $test tests/gpu/test_packing_on_gpus.py
}

pair() {
    export CUDA_VISIBLE_DEVICES=$1
    local lane=pair
    piece preemption_x2 300 $test tests/gpu/test_preemption_on_gpus.py
    piece four_bits_resume_x2 300 $test tests/gpu/test_quantization.py -k "fsdp and resumes"
    piece four_bits_curves_x2 300 $test tests/gpu/test_quantization.py -k two
    piece steady_x2 240 $test tests/gpu/test_steady_loop_on_gpus.py -k two
}

last() {
    export CUDA_VISIBLE_DEVICES=$1
    local lane=last
    piece packing_x2 300 $test tests/gpu/test_packing_on_gpus.py -k two
}

case $gpus in
0 | 1) one 0; two 0 ;;
2 | 3) { one 0 & two 1 & wait; }; pair 0,1; last 0,1 ;;
*) { one 0 & two 1 & wait; last 0,1; } & pair 2,3 & wait ;;
esac
grep -a -h 'loader processes:\|tokens/s, \|largest relative difference\|batches is padding' "$results/one.txt"
