#!/usr/bin/env bash
# One curve on one, two and four GPUs: `ftcli parity` of a known shape with random weights, in fp32 and in bf16.
# Usage: benchmarks/gpu_parity.sh SHAPE STEPS FOLDER "PRECISION ..." PROFILES PROCESSES
# For instance: benchmarks/gpu_parity.sh qwen3-0.6b 50 work "fp32 bf16" single,ddp,fsdp,zero3 2,4
set -uo pipefail
shape=$1 steps=$2 work=$3 precisions=$4 profiles=$5 processes=$6
python3 benchmarks/random_model.py "$shape" "$work/$shape" --steps "$steps" --rows 1024 2>/dev/null || exit
for precision in $precisions; do
    python3 -m ftcli parity "$work/$shape/recipe.yaml" --profiles "$profiles" --num-processes "$processes" \
        --micro-sizes 4 --steps "$steps" --set "precision=$precision" --set evaluate.at_start=false \
        --output "$work/parity-$precision" 2>"$work/parity-$precision.log" || tail -40 "$work/parity-$precision.log"
    rm -rf "$work/parity-$precision"/*/final # weights were compared already
done
