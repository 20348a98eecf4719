#!/usr/bin/env bash
# Run: configs/sweeps/pair.sh SCALE GLUE_FOLDER [TEXT_FOLDER...]    (`make pair`; SCALE is tiny, small or base)
#      TASKS, LONG (tasks of ten epochs), SEEDS and LAUNCH are environment variables
# Cost: small: 2.5 hours a model on one core, two at once, then about 10 hours of fine-tuning; tiny: 2 to 4 minutes
# Expect: small: held-out loss 3.501 (RoFormer) and 3.747 (BERT) with seed 0, 3.546 and 3.761 with seed 1; base: not run
# RoFormer and BERT of one size with the same text, order, masks and seeds; GLUE of both and of their controls (the
# same architectures from random initialisation), which do not depend on pretraining, so the models of the first seed serve. Started again, it continues.
set -euo pipefail
scale=$1 glue=$2 folder=runs/pair-$1 held_out=${3:+$3/validation*} length=128
eager=" --model.attention eager" # the kernel of the published runs
[ "$scale" = base ] && length=512 eager= && export WORKERS=1 HARDWARE=one_gpu_compiled
read -ra seeds <<< "${SEEDS-0 1}"
launch=${LAUNCH-accelerate launch --quiet --config_file configs/accelerate/cpu.yaml}

list() { (IFS=,; echo "[$*]"); }
runs=()
for seed in "${seeds[@]}"; do runs+=("$folder/roformer-$seed" "$folder/bert-$seed"); done

tune() { # TASKS OPTIONS...: the pretrained models, then the controls too
  local grid=($launch -m finetune.grid --config "configs/glue/pair-$scale.yaml" --glue_dir "$glue" --workers 2
    --output "$folder/results.jsonl" --tasks "[${1// /,}]" "${@:2}")
  "${grid[@]}" --models "$(list "${runs[@]/%//model}")"
  "${grid[@]}" --models "$(list "${runs[0]}/model" "${runs[1]}/model")" --controls true
}

for seed in "${seeds[@]}"; do
  for model in roformer bert; do
    echo "$model-$seed --run.seed $seed --config configs/model/$model-$scale.yaml$eager"
  done
done | configs/sweeps/runs.sh "pair-$scale" "${@:3}"
tune "${TASKS-cola sst2 mrpc wnli}"
[ -z "${LONG-stsb rte}" ] || tune "${LONG-stsb rte}" --epochs 10 # as in ELECTRA's code (Clark et al. 2020)
$launch -m train.analysis.length_extrapolation --models "$(list "${runs[@]/%//model}")" \
  --corpus.validation "${held_out:-embedded}" --trained $length --output "$folder/lengths.png"
python -m train.analysis.loss_curves --runs "$(list "${runs[@]}")" --output "$folder/curves.png"
python -m finetune.report "$folder/results.jsonl"
