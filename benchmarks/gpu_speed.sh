#!/usr/bin/env bash
# Measure the speed of ftcli, a bare Accelerate loop and TRL on the same weights and rows, on one, two or four GPUs.
# Usage: benchmarks/gpu_speed.sh WORK RESULTS [BUDGET_SECONDS [GROUP...]]     (benchmarks/README.md describes the results)
# Groups, in this order if none is named: one fsdp ddp lora zero3 rest ladder. Also: pairs, classifiers, unsloth, short,
# short_8b, short_trl, short_trl_halves, patches; and for two GPUs without flash-attn: two_lora two_1b two_3b two_shapes
# two_patches two_where two_short.
# Groups that need more GPUs are left out.
# WORK contains weights (1B 2.5 GB, 8B 16 GB); memory (/dev/shm/...) is faster than most disks. RESULTS receives
# facts.jsonl, log-*.txt, and the profiles where-*.txt. EXTRAS names folders (A:B) with packages for some of the lines
# (liger-kernel, flash-attn-4, trl, torchtitan); without it these lines are left out. LADDER: further settings for the
# ladder, as KEY=VALUE words. QUICK=1: ten steps. Layers of ftcli's language models are compiled, as in long runs.
# ONLY: a regular expression that must match the full name of a cell, so that several calls can divide the cells.
# To try it without GPUs: benchmarks/gpu_speed.sh WORK RESULTS 900 cpu   (or short_tiny)
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
unset PYTHONDONTWRITEBYTECODE # else each of a hundred processes compiles torch and transformers again
work=$1 results=$2 budget=${3:-540}
shift $(($# < 3 ? $# : 3))
groups=("$@")
[ $# -eq 0 ] && groups=(one fsdp ddp lora zero3 rest ladder)
gpus=${GPUS:-$(python3 -c "import torch; print(torch.cuda.device_count())")} # GPUS: another number, to try commands
many=$((gpus >= 4 ? 4 : 2)) # GPUs for an 8B model with sharded weights
# At a higher learning rate the first steps overshoot even with exact gradients, and rounding then changes the curve.
shards=(--shape llama-3.1-8b --length 8192 --micro-size 1 --task pretrain --processes $many --learning-rate 1e-6)
extras=${EXTRAS:-}
steps=(--steps 25 --warm 5)
[ -n "${QUICK:-}" ] && steps=(--steps 13 --warm 3)
flash=(--set attn_implementation=flash_attention_4 --label flash-attn-4)
plain=(--peer ftcli --set model.torch_compile=true --label "no extras")
label=extras # of lines with the packages of EXTRAS; it says so if flash-attn is not among them
PYTHONPATH="$PYTHONPATH:$extras" python3 -c "from importlib.util import find_spec; exit(not find_spec('flash_attn'))" ||
    label+=", no flash-attn"
best=(--peer ftcli --set model.torch_compile=true --label "$label")
mkdir -p "$work" "$results"
lanes=$(mktemp -d)

cell() { # NAME SECONDS ARGUMENTS... : add a cell without the packages of EXTRAS
    local name=$1 limit=$2
    shift 2
    [[ -n "${ONLY:-}" && ! "$name" =~ ^($ONLY)$ ]] && return
    printf '%q ' "$name" "$limit" "${steps[@]}" "$@" >>"$lanes/${lane:-plain}" && echo >>"$lanes/${lane:-plain}"
}

more() { # the same with the packages of EXTRAS
    [ -z "$extras" ] && echo "$1: left out, EXTRAS names no folder" && return
    lane=extras cell "$@"
}

measure() { # LANE
    local path=$PYTHONPATH
    [ "$1" = extras ] && path+=":$extras"
    [ -e "$lanes/$1" ] && PYTHONPATH="$path" python3 benchmarks/cells_in_turn.py "$lanes/$1" --work "$work" --facts "$results/facts.jsonl" \
        --seconds $((budget - SECONDS)) 2>>"$results/log-$1.txt" | cut -c -200
}

has() { [ "$gpus" -ge "$1" ] || { echo "$2: left out, it takes $1 GPUs"; false; }; }

one() {
    local at=(--shape llama-3.2-1b --length 4096 --micro-size 4 --task pretrain)
    more 1b_masters_bare 100 "${at[@]}" --precision bf16 --peer bare # the reference of these lines
    more 1b_bare_varlen 100 "${at[@]}" --precision bf16_pure --peer bare
    cell 1b_ftcli 100 "${at[@]}" --precision bf16_pure "${plain[@]}"
    more 1b_ftcli_extras 100 "${at[@]}" --precision bf16_pure "${best[@]}"
    more 1b_trl 120 "${at[@]}" --precision bf16_pure --peer trl
    more 1b_bare_flash 100 "${at[@]}" --precision bf16_pure --peer bare "${flash[@]}"
    more 1b_trl_default 100 "${at[@]}" --precision bf16_pure --peer trl-default
    more 1b_where 90 "${at[@]}" --precision bf16_pure "${best[@]}" --steps 10 --warm 3 \
        --trace "$results/where-1b.txt"
    more 1b_masters_bare_flash 100 "${at[@]}" --precision bf16 --peer bare "${flash[@]}"
    cell 1b_masters_ftcli 100 "${at[@]}" --precision bf16 "${plain[@]}"
    more 1b_masters_ftcli_extras 100 "${at[@]}" --precision bf16 "${best[@]}"
    more 1b_masters_where 90 "${at[@]}" --precision bf16 "${best[@]}" --steps 10 --warm 3 \
        --trace "$results/where-1b-masters.txt"
}

fsdp() {
    has 2 fsdp || return 0
    local at=("${shards[@]}" --profile fsdp)
    more 8b_fsdp_bare 200 "${at[@]}" --peer bare "${flash[@]}"
    more 8b_fsdp_ftcli 200 "${at[@]}" "${best[@]}"
    more 8b_fsdp_trl 200 "${at[@]}" --peer trl
    more 8b_fsdp_titan 200 "${at[@]}" --peer torchtitan
    more 8b_fsdp_fp8 200 "${at[@]}" "${best[@]}" --label "${label/extras/fp8}" --set precision=fp8 # its curve is compared with that of bf16
    more 8b_fsdp_fp8_where 150 "${at[@]}" "${best[@]}" --label "${label/extras/fp8}" --set precision=fp8 --steps 10 --warm 3 \
        --trace "$results/where-fp8.txt"
    more 8b_fsdp_where 150 "${at[@]}" "${best[@]}" --steps 10 --warm 3 --trace "$results/where-fsdp.txt"
}

ddp() {
    has 2 ddp || return 0
    local at=(--shape llama-3.2-1b --length 4096 --micro-size 4 --task pretrain) count
    more 1b_masters_ftcli_extras 100 "${at[@]}" --precision bf16 "${best[@]}" # of one GPU, for the ratio
    for count in 4 2; do
        [ "$gpus" -lt $count ] && continue
        more 1b_ddp${count}_bare 120 "${at[@]}" --profile ddp --processes $count --peer bare "${flash[@]}"
        more 1b_ddp${count}_ftcli 120 "${at[@]}" --profile ddp --processes $count "${best[@]}"
    done
    more 1b_ddp_where 100 "${at[@]}" --profile ddp --processes $many "${best[@]}" --steps 10 --warm 3 \
        --trace "$results/where-ddp.txt"
    [ "$gpus" -ge 4 ] && more 1b_ddp4_trl 120 "${at[@]}" --profile ddp --processes 4 --peer trl
}

lora() {
    local at=(--shape llama-3.1-8b --length 4096 --micro-size 2 --task pretrain --lora 16 --learning-rate 1e-4)
    more 8b_lora_bare 150 "${at[@]}" --peer bare "${flash[@]}"
    more 8b_lora_ftcli 150 "${at[@]}" "${best[@]}"
    more 8b_lora_trl 150 "${at[@]}" --peer trl
    more 8b_lora_where 100 "${at[@]}" "${best[@]}" --steps 10 --warm 3 --trace "$results/where-lora.txt"
}

zero3() {
    has 2 zero3 || return 0
    local at=("${shards[@]}" --profile zero3)
    more 8b_zero3_ftcli 240 "${at[@]}" "${best[@]}"
    more 8b_zero3_bare 240 "${at[@]}" --peer bare "${flash[@]}" # stock bf16 has another curve (docs/explanation/performance.md)
    more 8b_zero3_trl 240 "${at[@]}" --peer trl
    more 8b_zero3_where 150 "${at[@]}" "${best[@]}" --steps 10 --warm 3 --trace "$results/where-zero3.txt"
}

rest() {
    local at=(--shape llama-3.1-8b --length 4096 --micro-size 2 --task pretrain --precision bf16_pure)
    more 8b_bare 150 "${at[@]}" --peer bare "${flash[@]}"
    more 8b_ftcli 150 "${at[@]}" "${best[@]}" --set model.gradient_checkpointing=none
    more 8b_trl 150 "${at[@]}" --peer trl
    more 8b_where 120 "${at[@]}" "${best[@]}" --steps 10 --warm 3 --trace "$results/where-8b.txt"
    at=(--shape qwen3-0.6b --length 4096 --micro-size 8 --task pretrain --precision bf16_pure)
    more 06b_masters_bare 100 "${at[@]}" --precision bf16 --peer bare
    more 06b_bare 100 "${at[@]}" --peer bare
    cell 06b_ftcli 100 "${at[@]}" "${plain[@]}"
    more 06b_ftcli_extras 100 "${at[@]}" "${best[@]}"
    more 06b_trl 120 "${at[@]}" --peer trl
    more 06b_where 90 "${at[@]}" "${best[@]}" --steps 10 --warm 3 --trace "$results/where-06b.txt"
    at=(--shape llama-3.2-1b --length 4096 --micro-size 4 --task sft --precision bf16_pure) # prompts are not trained
    more 1b_sft_masters_bare 100 "${at[@]}" --precision bf16 --peer bare
    more 1b_sft_bare 100 "${at[@]}" --peer bare
    more 1b_sft_ftcli 100 "${at[@]}" "${best[@]}"
    more 1b_sft_trl 120 "${at[@]}" --peer trl
    at=(--shape bert-base --length 128 --micro-size 32 --task text_classification --precision bf16)
    cell bert_trainer 90 "${at[@]}" --peer hf-trainer
    cell bert_default 90 "${at[@]}" --peer hf-trainer-default
    cell bert_ftcli 90 "${at[@]}" --peer ftcli --label "no extras"
    at=(--shape vit-b16 --length 197 --micro-size 64 --task image_classification --precision bf16)
    cell vit_trainer 120 "${at[@]}" --peer hf-trainer
    cell vit_default 120 "${at[@]}" --peer hf-trainer-default
    cell vit_ftcli 120 "${at[@]}" --peer ftcli --label "no extras" --set data.workers=8
}

two_lora() { # adapters of 8B on one GPU and two, without flash-attn
    has 2 two_lora || return 0
    local at=(--shape llama-3.1-8b --length 4096 --micro-size 2 --task pretrain --lora 16 --learning-rate 1e-4)
    [ -n "${REHEARSAL:-}" ] && at=(--shape tiny --length 128 --micro-size 2 --task pretrain --lora 4 --cpu --precision fp32)
    more lora_one 150 "${at[@]}" "${best[@]}"
    more lora_ddp_bare 150 "${at[@]}" --profile ddp --processes 2 --peer bare
    more lora_ddp 150 "${at[@]}" --profile ddp --processes 2 "${best[@]}"
    # With Liger's loss this loop fails: "aten.mm.out got mixed torch.Tensor and DTensor".
    more lora_fsdp_bare 150 "${at[@]}" --profile fsdp --processes 2 --peer bare --set liger=0 --label "without Liger"
    more lora_fsdp_trl 150 "${at[@]}" --profile fsdp --processes 2 --peer trl --label "without Liger" \
        --set attn_implementation=varlen --set use_liger_kernel=false
    more lora_fsdp 200 "${at[@]}" --profile fsdp --processes 2 "${best[@]}"
    more lora_fsdp_sharded 150 "${at[@]}" --profile fsdp --processes 2 "${best[@]}" \
        --label "$label, frozen weights sharded" --set model.shard_frozen=true
    more lora_fsdp_again 150 "${at[@]}" --profile fsdp --processes 2 "${best[@]}" --label "$label, second start" --steps 8
    more lora_zero3 200 "${at[@]}" --profile zero3 --processes 2 "${best[@]}"
    more qlora_ddp 150 "${at[@]}" --four-bit --profile ddp --processes 2 "${best[@]}"
    more qlora_fsdp 150 "${at[@]}" --four-bit --profile fsdp --processes 2 "${best[@]}"
}

two_1b() { # DDP beside one GPU, without flash-attn
    has 2 two_1b || return 0
    local at=(--shape llama-3.2-1b --length 4096 --micro-size 4 --task pretrain --precision bf16)
    [ -n "${REHEARSAL:-}" ] && at=(--shape tiny --length 128 --micro-size 2 --task pretrain --cpu --precision fp32)
    more two_1b_one 100 "${at[@]}" "${best[@]}"
    more two_1b_bare 100 "${at[@]}" --profile ddp --processes 2 --peer bare
    more two_1b_ddp 100 "${at[@]}" --profile ddp --processes 2 "${best[@]}"
}

two_3b() { # all weights of 3B in shards, without flash-attn
    has 2 two_3b || return 0
    local at=(--shape llama-3.2-3b --length 8192 --micro-size 1 --task pretrain --precision bf16 --learning-rate 1e-6)
    [ -n "${REHEARSAL:-}" ] && at=(--shape tiny --length 128 --micro-size 2 --task pretrain --cpu --precision fp32)
    at+=(--processes 2)
    more two_3b_bare 150 "${at[@]}" --profile fsdp --peer bare
    more two_3b_fsdp 150 "${at[@]}" --profile fsdp "${best[@]}"
    more two_3b_trl 150 "${at[@]}" --profile fsdp --peer trl
    more two_3b_zero3 150 "${at[@]}" --profile zero3 "${best[@]}"
}

two_where() { # profiles of the cells that miss their goals
    has 2 two_where || return 0
    local at=(--steps 9 --warm 3)
    [ -n "${REHEARSAL:-}" ] && at+=(--cpu --shape tiny --length 128 --micro-size 2 --precision fp32)
    more where_ddp 100 --shape llama-3.2-1b --length 4096 --micro-size 4 --task pretrain --profile ddp --processes 2 \
        "${best[@]}" "${at[@]}" --trace "$results/where-ddp-two-h100.txt"
    more where_zero3 100 --shape llama-3.2-1b --length 4096 --micro-size 4 --task pretrain --profile zero3 --processes 2 \
        "${best[@]}" "${at[@]}" --trace "$results/where-1b-zero3.txt"
    more where_fsdp 100 --shape llama-3.2-1b --length 4096 --micro-size 4 --task pretrain --profile fsdp --processes 2 \
        "${best[@]}" "${at[@]}" --trace "$results/where-1b-fsdp.txt"
    more where_3b 150 --shape llama-3.2-3b --length 8192 --micro-size 1 --task pretrain --profile fsdp --processes 2 \
        --learning-rate 1e-6 "${best[@]}" "${at[@]}" --trace "$results/where-3b-fsdp.txt"
    more where_3b_bare 150 --shape llama-3.2-3b --length 8192 --micro-size 1 --task pretrain --profile fsdp \
        --processes 2 --learning-rate 1e-6 --peer bare "${at[@]}" --trace "$results/where-3b-fsdp-bare.txt"
    more where_lora_fsdp 150 --shape llama-3.1-8b --length 4096 --micro-size 2 --task pretrain --profile fsdp \
        --processes 2 --lora 16 --learning-rate 1e-4 "${best[@]}" "${at[@]}" --trace "$results/where-lora-fsdp.txt"
}

two_shapes() { # ZeRO-3 beside FSDP2 on shapes that neither was tuned for
    has 2 two_shapes || return 0
    local shape size at profile
    for shape in qwen3-0.6b:8 llama-3.2-1b:4; do
        at=(--shape ${shape%:*} --length 4096 --micro-size ${shape#*:} --task pretrain --precision bf16 --processes 2)
        [ -n "${REHEARSAL:-}" ] && at+=(--shape tiny --length 128 --micro-size 2 --precision fp32 --cpu)
        for profile in fsdp zero3; do
            more "shapes_${shape%:*}_$profile" 100 "${at[@]}" --profile $profile "${best[@]}"
        done
    done
}

patches() { # each optional patch left out, on one GPU
    local name at=(--length 4096 --micro-size 4 --task pretrain --peer ftcli --label patches --steps 16)
    [ -n "${REHEARSAL:-}" ] && at=(--shape tiny --length 128 --micro-size 2 --cpu --peer ftcli --label patches --steps 8)
    local small=("${at[@]}" --shape llama-3.2-1b --precision bf16_pure)
    [ -n "${REHEARSAL:-}" ] && small=("${at[@]}" --precision fp32)
    for name in "" compiled-layers fused-lengths foreach-gradients; do
        more "patch_compiled_$name" 60 "${small[@]}" --set model.torch_compile=true --without "$name"
    done
    for name in "" liger-kernels liger-rotary; do
        more "patch_plain_$name" 60 "${small[@]}" --set model.torch_compile=false --without "$name"
    done
    for name in "" attention-schemas; do
        more "patch_selective_$name" 60 "${small[@]}" --set model.torch_compile=false \
            --set model.gradient_checkpointing=selective --without "$name"
    done
    for name in "" compiled-checkpoints; do
        more "patch_full_$name" 60 "${small[@]}" --set model.torch_compile=true \
            --set model.gradient_checkpointing=full --without "$name"
    done
    for name in "" views-of-weights; do
        more "patch_host_$name" 60 "${small[@]}" --set model.torch_compile=false \
            --set model.gradient_checkpointing=full --set model.activation_offloading=true --without "$name"
    done
    at+=(--shape bert-base --length 128 --micro-size 32 --task text_classification --precision bf16)
    [ -n "${REHEARSAL:-}" ] && at+=(--shape tiny-bert --length 32 --micro-size 2 --precision fp32)
    for name in "" padding-masks; do
        more "patch_padded_$name" 60 "${at[@]}" --without "$name"
    done
}

two_short() { # short rows that are not packed, on one GPU and on two
    has 2 two_short || return 0
    local at=(--shape qwen3-0.6b --length 4096 --median 250 --task sft --precision bf16) both=(--micro-size 8 --processes 2)
    local own=(--peer ftcli --set batch.micro_size=auto --label "as init writes it")
    [ -n "${REHEARSAL:-}" ] && at=(--shape tiny --length 128 --median 30 --cpu --precision fp32 --task sft)
    cell two_short_one 60 "${at[@]}" --micro-size 16 "${own[@]}"
    cell two_short_ddp 60 "${at[@]}" "${both[@]}" --profile ddp "${own[@]}"
    cell two_short_fsdp 60 "${at[@]}" "${both[@]}" --profile fsdp "${own[@]}"
}

two_patches() { # each optional patch of FSDP2 and ZeRO-3 left out
    has 2 two_patches || return 0
    local name compiled at=(--shape llama-3.2-1b --length 4096 --micro-size 4 --task pretrain --precision bf16 --steps 14)
    [ -n "${REHEARSAL:-}" ] && at=(--shape tiny --length 128 --micro-size 2 --task pretrain --cpu --precision fp32 --steps 8)
    at+=(--processes 2 --peer ftcli --label patches)
    compiled=("${at[@]}" --set model.torch_compile=true)
    for name in "" fsdp-16-bit-gradients fsdp-small-unit; do
        more "patch_fsdp_$name" 90 "${compiled[@]}" --profile fsdp --without "$name"
    done
    for name in "" zero3-16-bit-gradients zero3-16-bit-weights zero3-compiled-linear zero3-rounded-shards zero3-step \
        zero3-gather-stream zero3-small-weights zero3-gradient-buffer zero3-gradient-memory zero3-stream-waits \
        zero3-quiet-hooks zero3-gathered-layers; do
        more "patch_zero3_$name" 90 "${compiled[@]}" --profile zero3 --without "$name"
    done
    for name in "" layers-of-a-model; do # with compiled layers it would also leave them uncompiled
        more "patch_zero3_plain_$name" 90 "${at[@]}" --set model.torch_compile=false --profile zero3 --without "$name"
    done
    at=(--shape bert-base --length 128 --micro-size 32 --task text_classification --precision bf16 --steps 40 --warm 10)
    [ -n "${REHEARSAL:-}" ] && at=(--shape tiny-bert --length 32 --micro-size 2 --task text_classification --cpu --precision fp32)
    at+=(--processes 2 --peer ftcli --label patches)
    for name in "" zero3-exact-bias; do
        more "patch_zero3_bias_$name" 90 "${at[@]}" --profile zero3 --without "$name"
    done
}

unsloth() { # adapters of 8B and all weights of 1B, on one GPU; cells that begin with u_ take EXTRAS with Unsloth's packages
    local size lora=(--shape llama-3.1-8b --length 4096 --task pretrain --lora 16 --learning-rate 1e-4)
    local again=(--set model.gradient_checkpointing=full --label recomputed) host=(--set model.activation_offloading=true)
    local theirs=(--peer unsloth) theirs_again=(--set use_gradient_checkpointing=unsloth --label recomputed)
    for size in 1 2 4; do
        more lora_$size 120 "${lora[@]}" --micro-size $size "${best[@]}"
        more u_lora_$size 120 "${lora[@]}" --micro-size $size "${theirs[@]}"
        more qlora_$size 120 "${lora[@]}" --four-bit --micro-size $size "${best[@]}"
        more u_qlora_$size 120 "${lora[@]}" --four-bit --micro-size $size "${theirs[@]}"
    done
    for size in 1 8; do
        more lora_${size}_again 120 "${lora[@]}" --micro-size $size "${best[@]}" "${again[@]}"
        more u_lora_${size}_again 120 "${lora[@]}" --micro-size $size "${theirs[@]}" "${theirs_again[@]}"
        more qlora_${size}_again 120 "${lora[@]}" --four-bit --micro-size $size "${best[@]}" "${again[@]}"
        more qlora_${size}_host 120 "${lora[@]}" --four-bit --micro-size $size "${best[@]}" "${again[@]}" "${host[@]}" \
            --label "recomputed, inputs on the host"
        more u_qlora_${size}_again 120 "${lora[@]}" --four-bit --micro-size $size "${theirs[@]}" "${theirs_again[@]}"
    done
    lora=(--shape llama-3.2-1b --length 4096 --micro-size 4 --task pretrain --precision bf16_pure)
    more full_1b 100 "${lora[@]}" "${best[@]}"
    more u_full_1b 120 "${lora[@]}" "${theirs[@]}"
}

pairs() { # preference, beside TRL's DPOTrainer
    local shape size at
    for shape in qwen3-0.6b llama-3.2-1b; do
        for size in 16 8 4; do
            at=(--shape $shape --length 2048 --task preference --precision bf16 --learning-rate 1e-6)
            at+=(--micro-size $size --accumulation $((32 / size)))
            more pairs_${shape}_${size}_trl 120 "${at[@]}" --peer trl-dpo
            more pairs_${shape}_${size}_trl_sorted 120 "${at[@]}" --peer trl-dpo --set sort=1
            more pairs_${shape}_${size}_ftcli 120 "${at[@]}" "${best[@]}"
        done
    done
}

classifiers() { # long runs in alternation
    local round steps=(--steps 200 --warm 20)
    local bert=(--shape bert-base --length 128 --micro-size 32 --task text_classification --precision bf16)
    local vit=(--shape vit-b16 --length 197 --micro-size 64 --task image_classification --precision bf16)
    for round in 1 2 3; do
        cell bert_trainer_$round 90 "${bert[@]}" --peer hf-trainer
        cell bert_ftcli_$round 90 "${bert[@]}" --peer ftcli --label "no extras"
        cell vit_trainer_$round 120 "${vit[@]}" --learning-rate 2e-7 --peer hf-trainer
        cell vit_ftcli_$round 120 "${vit[@]}" --learning-rate 2e-7 --peer ftcli --label "no extras" --set data.workers=8
    done
    # A Trainer whose passes are CUDA graphs as well, of layers that torch.compile has fused.
    cell vit_trainer_graphs 150 "${vit[@]}" --learning-rate 2e-7 --peer hf-trainer --label "compiled, CUDA graphs" \
        --set torch_compile=true --set torch_compile_mode=reduce-overhead
    cell bert_trainer_graphs 200 "${bert[@]}" --peer hf-trainer --label "compiled, CUDA graphs" \
        --set torch_compile=true --set torch_compile_mode=reduce-overhead
}

ladder() { # each technique alone, compared with 1b_masters_ftcli and 1b_masters_ftcli_extras
    local at=(--shape llama-3.2-1b --length 4096 --micro-size 4 --task pretrain --precision bf16) rung switch
    cell 1b_masters_ftcli 100 "${at[@]}" "${plain[@]}"
    rung=(--peer ftcli --label ladder)
    cell 1b_ladder_not_compiled 100 "${at[@]}" "${rung[@]}" --set model.torch_compile=false
    cell 1b_ladder_selective 100 "${at[@]}" "${rung[@]}" --set model.torch_compile=false \
        --set model.gradient_checkpointing=selective
    rung+=(--set model.torch_compile=true)
    for switch in log.every_steps=1 model.gradient_checkpointing=full model.activation_offloading=true \
        data.workers=1 ${LADDER:-}; do
        cell "1b_ladder_$switch" 100 "${at[@]}" "${rung[@]}" --set "$switch"
    done
    rung=(--peer ftcli --label "ladder, extras")
    more 1b_ladder_liger 100 "${at[@]}" "${rung[@]}" --set model.torch_compile=false
    more 1b_ladder_liger_sdpa 100 "${at[@]}" "${rung[@]}" --set model.torch_compile=false \
        --set model.attn_implementation=sdpa
    more 1b_ladder_liger_compiled 100 "${at[@]}" "${rung[@]}" --set model.torch_compile=true \
        --set model.use_liger_kernel=true
    more 1b_ladder_sdpa_compiled 100 "${at[@]}" "${rung[@]}" --set model.torch_compile=true \
        --set model.attn_implementation=sdpa
}

short() { # short rows that are not packed: the run that most people start
    local at auto=(--peer ftcli --set batch.micro_size=auto)
    at=(--shape qwen3-0.6b --length 4096 --median 250 --task sft --precision bf16)
    cell short_06b_loop_8x2 90 "${at[@]}" --micro-size 8 --accumulation 2 --peer loop
    # With longer rows the loop needs more than 140 GiB at 16 x 1.
    cell short_06b_loop_16x1 60 "${at[@]}" --length 1024 --micro-size 16 --peer loop
    cell short_06b_ftcli_1024 60 "${at[@]}" --length 1024 --micro-size 16 "${auto[@]}" --label "as init writes it" \
        --set log.every_steps=1
    cell short_06b_ftcli 60 "${at[@]}" --micro-size 16 "${auto[@]}" --label "as init writes it" --set log.every_steps=1
    cell short_06b_ftcli_compiled 90 "${at[@]}" --micro-size 16 "${auto[@]}" --label compiled --set model.torch_compile=true
    cell short_06b_ftcli_8x2 60 "${at[@]}" --micro-size 8 --accumulation 2 --peer ftcli --label "8 x 2"
    at=(--shape llama-3.1-8b --length 4096 --median 330 --task sft --precision bf16 --lora 16 --learning-rate 1e-4)
    cell short_8b_lora_ftcli 200 "${at[@]}" --micro-size 8 "${auto[@]}" --label "as init writes it" --set log.every_steps=1
    cell short_8b_lora_loop_4x2 150 "${at[@]}" --micro-size 4 --accumulation 2 --peer loop
    cell short_8b_lora_ftcli_compiled 180 "${at[@]}" --micro-size 8 "${auto[@]}" --label compiled \
        --set model.torch_compile=true
    more short_8b_lora_trl 180 "${at[@]}" --micro-size 8 --peer trl
    more short_8b_lora_unsloth 120 "${at[@]}" --micro-size 8 --peer unsloth
    more short_06b_trl 90 --shape qwen3-0.6b --length 4096 --median 250 --task sft --precision bf16 --micro-size 16 --peer trl
    cell short_06b_packed 90 --shape qwen3-0.6b --length 4096 --micro-size 8 --task sft --precision bf16 "${plain[@]}"
}

short_trl() { # the last rows beside TRL, in one process: packages of EXTRAS are there, and ftcli leaves them alone
    local at=(--shape llama-3.1-8b --length 4096 --median 330 --task sft --precision bf16 --lora 16 --learning-rate 1e-4)
    local steps=(--steps 20 --warm 5)
    [ -n "${REHEARSAL:-}" ] && at=(--shape tiny --length 128 --median 30 --cpu --precision fp32 --task sft --lora 4)
    more trl_ftcli 130 "${at[@]}" --micro-size 8 --peer ftcli --label "as init writes it" --set batch.micro_size=auto \
        --set log.every_steps=1 --set model.use_liger_kernel=false
    more trl_best 90 "${at[@]}" --micro-size 8 --peer trl
    more trl_default 100 "${at[@]}" --micro-size 8 --peer trl-default
}

short_8b() { # all lines of the last rows in one lease; every step is logged, as in the recipe that init writes
    local at=(--shape llama-3.1-8b --length 4096 --median 330 --task sft --precision bf16 --lora 16 --learning-rate 1e-4)
    local steps=(--steps 20 --warm 5) auto=(--peer ftcli --set batch.micro_size=auto --set log.every_steps=1)
    [ -n "${REHEARSAL:-}" ] && at=(--shape tiny --length 128 --median 30 --cpu --precision fp32 --task sft --lora 4)
    at+=(--micro-size 8)
    more s8_ftcli 130 "${at[@]}" "${auto[@]}" --label "as init writes it" --set model.use_liger_kernel=false
    more s8_liger 90 "${at[@]}" "${auto[@]}" --label "with Liger"
    more s8_trl 90 "${at[@]}" --peer trl
    more s8_compiled 120 "${at[@]}" "${auto[@]}" --label compiled --set model.torch_compile=true
    more s8_unsloth 120 "${at[@]}" --peer unsloth # its packages alone: another EXTRAS, with ONLY=s8_unsloth
}

short_trl_halves() { # if TRL runs out of memory with eight rows and nothing recomputed
    local at=(--shape llama-3.1-8b --length 4096 --median 330 --task sft --precision bf16 --lora 16 --learning-rate 1e-4)
    local steps=(--steps 20 --warm 5)
    [ -n "${REHEARSAL:-}" ] && at=(--shape tiny --length 128 --median 30 --cpu --precision fp32 --task sft --lora 4)
    more trl_halves 80 "${at[@]}" --micro-size 4 --accumulation 2 --peer trl
    more trl_recomputed 80 "${at[@]}" --micro-size 8 --peer trl --set gradient_checkpointing=true --label recomputed
}

short_tiny() { # the same on a CPU with a tiny model, to try the commands
    local at=(--shape tiny --length 128 --median 30 --cpu --steps 6 --warm 2 --precision fp32 --task sft) lora
    for lora in 0 4; do
        cell short_tiny_loop_$lora 60 "${at[@]}" --lora $lora --micro-size 4 --accumulation 2 --peer loop
        cell short_tiny_bare_$lora 60 "${at[@]}" --lora $lora --micro-size 8 --peer bare
        cell short_tiny_ftcli_$lora 60 "${at[@]}" --lora $lora --micro-size 8 --peer ftcli --set batch.micro_size=auto
        more short_tiny_trl_$lora 60 "${at[@]}" --lora $lora --micro-size 8 --peer trl
    done
}

cpu() {
    local at=(--shape tiny --length 128 --micro-size 2 --cpu --steps 8 --warm 3) peer
    local -A labels=([ftcli]="no extras")
    for peer in bare ftcli; do
        cell tiny_$peer 100 "${at[@]}" --precision fp32 --peer $peer --label "${labels[$peer]:-}"
        cell tiny_ddp_$peer 100 "${at[@]}" --precision fp32 --profile ddp --processes 2 --peer $peer
    done
    cell tiny_switch 100 "${at[@]}" --precision fp32 --peer ftcli --label ladder --set log.every_steps=1
    more tiny_trl 100 "${at[@]}" --precision fp32 --peer trl
    cell tiny_where 100 "${at[@]}" --precision fp32 --peer ftcli --trace "$results/where-tiny.txt"
}

for group in "${groups[@]}"; do
    $group
done
measure extras | sed 's/^/with extras: /'
measure plain
[ -e "$results/facts.jsonl" ] && python3 benchmarks/cell_tables.py "$results/facts.jsonl" | tee "$results/tables.md"
