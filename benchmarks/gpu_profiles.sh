#!/usr/bin/env bash
# The same recipe under single, ddp, fsdp and zero3 on the GPUs of one machine; prints the curves side by side.
# Usage: benchmarks/gpu_profiles.sh SHAPE PRECISION STEPS GPUS WORK_FOLDER [profile:processes ...]
set -uo pipefail
shape=$1 precision=$2 steps=$3 gpus=$4 work=$5
shift 5
cells=("$@")
[ ${#cells[@]} -gt 0 ] || cells=(single:1 "ddp:$gpus" "fsdp:$gpus" "zero3:$gpus")
python3 benchmarks/random_model.py "$shape" "$work/$precision" --steps "$steps" --precision "$precision" || exit
runs=()
for cell in "${cells[@]}"; do
    run="$work/$precision-${cell/:/-x}"
    python3 -m ftcli train "$work/$precision/recipe.yaml" --profile "${cell%:*}" --num-processes "${cell#*:}" \
        --output "$run" >"$run.log" 2>&1 && runs+=("$run") || { echo "== $cell failed"; tail -40 "$run.log"; }
    rm -rf "$run/final" # weights are not what is compared here
done
python3 benchmarks/curves.py "${runs[@]}"
