#!/usr/bin/env bash
# Run: configs/sweeps/pair.sh SCALE GLUE_FOLDER [TEXT_FOLDER...]    (`make pair`; SCALE is small or tiny)
#      environment variables: TASKS, SEEDS (of pretraining), HARDWARE (a file of configs/accelerate), WORKERS (runs at once)
# Cost: small: see configs/pretrain/pair-small.yaml, then 180 fine-tuning runs of the six official tasks; 176 of nine tasks took 8 minutes
#       on an H200 (WORKERS=14), a run on a CPU core see configs/glue/standard.yaml; tiny: 2 to 4 minutes
# Expect: small: results/pair, whose models and tables were made by these commands one by one; tiny: nothing is learned
# RoFormer and BERT of one size with the same text, order, masks and seeds; GLUE of both and of their controls, which do not
# depend on pretraining, so the models of the first seed serve. Started again, it continues.
set -euo pipefail
scale=$1 glue=$2 folder=runs/pair-$1 held_out=${3:+$3/validation*}
read -ra seeds <<< "${SEEDS-0 1}"
tasks=${TASKS-sst2 cola stsb mrpc rte wnli}
hardware=${HARDWARE:-cpu}
launch="accelerate launch --quiet --config_file configs/accelerate/$hardware.yaml"

list() { (IFS=,; echo "[$*]"); }
runs=()
for seed in "${seeds[@]}"; do runs+=("$folder/roformer-$seed" "$folder/bert-$seed"); done

for seed in "${seeds[@]}"; do
  for model in roformer bert; do
    flags="--run.seed $seed --config configs/model/$model-$scale.yaml"
    # transformers' BERT: the attention of its configuration is for a CPU
    [ $model = roformer ] || [ "$hardware" = cpu ] || flags+=" --model.attention sdpa"
    echo "$model-$seed $flags"
  done
done | configs/sweeps/runs.sh "pair-$scale" "${@:3}"
grid=($launch -m finetune.grid --config configs/glue/standard.yaml --learning_rates '[2e-4]' --glue_dir "$glue" --workers "${WORKERS:-2}"
  --output "$folder/results.jsonl" --tasks "[${tasks// /,}]")
[ "$scale" != tiny ] || grid+=(--seeds '[0, 1]' --epochs 1)
"${grid[@]}" --models "$(list "${runs[@]/%//model}")"
"${grid[@]}" --models "$(list "${runs[0]}/model" "${runs[1]}/model")" --controls true
python -m train.analysis.loss_curves --runs "$(list "${runs[@]}")" --output "$folder/curves.png"
python -m finetune.report "$folder/results.jsonl"
$launch -m train.analysis.length_extrapolation --models "$(list "${runs[@]/%//model}")" \
  --corpus.validation "${held_out:-embedded}" --output "$folder/lengths.png" # needs documents of 2,046 tokens
