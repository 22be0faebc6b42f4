#!/usr/bin/env bash
# Save and resume a 1B shape across profiles on four GPUs: compare curves, and time saving and loading.
# Usage: benchmarks/gpu_checkpoints.sh WORK RESULTS [BUDGET_SECONDS [SHAPE [MATRIX_ARGUMENTS...]]]
# WORK is large (model 5 GB, three checkpoints of 15 GB). RESULTS gets log.txt, facts.jsonl and table.md. A second call
# continues an interrupted one. If the disk of WORK writes less than 1 GB/s, checkpoints are kept in memory (needs root).
# CELLS: other cells of the matrix, for instance on two GPUs: CELLS="fsdp:2>zero3:2,single:1 zero3:2>fsdp:2 single:1>fsdp:2".
# To try it on a CPU: benchmarks/gpu_checkpoints.sh WORK RESULTS 500 tiny --cpu
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
work=$1 results=$2 budget=${3:-540} shape=${4:-llama-3.2-1b}
shift $(($# < 4 ? $# : 4))
. benchmarks/pieces.sh
read -ra cells <<<"${CELLS:-fsdp:4>zero3:2,single:1 zero3:2>fsdp:4 single:1>fsdp:4}"

megabytes_a_second() { # writes 2 GB to the disk of $work
    dd if=/dev/zero of="$work/probe" bs=16M count=128 conv=fsync 2>&1 | awk '/copied/ {print int($1 / 1e6 / $(NF - 3))}'
    rm -f "$work/probe"
}

if [ "$shape" != tiny ] && [ ! -e "$work/disk" ]; then
    megabytes_a_second >"$work/disk"
    echo "{\"piece\": \"disk\", \"megabytes a second\": $(cat "$work/disk")}" >>"$results/facts.jsonl"
    if [ "$(cat "$work/disk")" -lt 1000 ] && mkdir -p "$work/matrix" && mount -t tmpfs -o size=120g tmpfs "$work/matrix"; then
        echo '{"piece": "disk", "checkpoints": "in memory (tmpfs)"}' >>"$results/facts.jsonl"
    fi
    cat "$results/facts.jsonl"
fi
# Background saving checks the free memory. Machines whose memory grows with its use report too little. So 64 GiB are
# allocated once, while the model is written. One allocation above the reported free memory would fail, so it is split.
[ "$shape" != tiny ] && python3 -c '[b"x" * (4 << 30) for _ in range(16)]' &
piece "model_$shape" 180 python3 benchmarks/random_model.py "$shape" "$work/matrix" --rows 512
wait
shown=60 piece matrix "$budget" python3 benchmarks/checkpoint_matrix.py "$shape" "$work/matrix" \
    "${cells[@]}" \
    --facts "$results/facts.jsonl" --seconds $((budget - SECONDS - 15)) --piece-seconds 240 "$@"
grep -a -A 40 '^| saved by' "$results/log.txt" | tee "$results/table.md"
