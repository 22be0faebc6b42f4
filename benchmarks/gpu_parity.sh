#!/usr/bin/env bash
# Compare curves on one, two and four GPUs: `ftcli parity` of a shape with random weights. All precisions run at once.
# Usage: benchmarks/gpu_parity.sh SHAPE STEPS FOLDER "PRECISION ..." PROFILES PROCESSES [more arguments for parity]
# For instance: benchmarks/gpu_parity.sh qwen3-0.6b 50 work "fp32 bf16" single,ddp,fsdp,zero3 2,4
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
shape=$1 steps=$2 work=$3 precisions=$4 profiles=$5 processes=$6
shift 6
[ -d "$work/$shape" ] || python3 benchmarks/random_model.py "$shape" "$work/$shape" --rows 1024 || exit
for precision in $precisions; do
    name="$work/parity-$precision-${profiles//,/-}"
    python3 -m ftcli parity "$work/$shape/recipe.yaml" --profiles "$profiles" --num-processes "$processes" \
        --micro-sizes 8 --steps "$steps" --set "precision=$precision" --set evaluate.at_start=false \
        --output "$name" "$@" 2>"$name.log" >"$name.txt" &
done
wait
for precision in $precisions; do
    name="$work/parity-$precision-${profiles//,/-}"
    [ -s "$name.txt" ] && cat "$name.txt" || tail -40 "$name.log"
    rm -rf "$name"/*/final # their weights are compared already
done
