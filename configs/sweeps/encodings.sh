#!/usr/bin/env bash
# Run: configs/sweeps/encodings.sh SCALE [TEXT_FOLDER...]    (`make encodings`; SCALE is tiny or small)
# Cost: small: 4.5 minutes a run, an hour in all, two at once on 2 cores; tiny: half a minute
# Expect: small: held-out loss at 4.1 M tokens: transformer_xl 5.08, rope 5.10, alibi 5.92, t5 6.35, the others 6.43 to 6.47
# Pretrains one small model with each position encoding, measures it at longer texts, and compares. Started again, it continues.
set -euo pipefail
folder=runs/encodings-$1 held_out=${2:+$2/validation*} lengths=64,128,256,512
encodings=(rope learned sinusoidal transformer_xl t5 alibi none) seeds=(0 1 2)
[ "$1" = tiny ] && encodings=(rope learned) seeds=(0 1) lengths=16,32,64,128

for seed in "${seeds[@]}"; do
  for encoding in "${encodings[@]}"; do
    echo "$encoding-$seed --run.seed $seed --model.config.position_encoding $encoding"
  done
done | configs/sweeps/runs.sh "encodings-$1" "${@:2}"

list() { (IFS=,; echo "[$*]"); }
runs=()
for encoding in "${encodings[@]}"; do # the first model is compared with each other one
  for seed in "${seeds[@]}"; do runs+=("$folder/$encoding-$seed"); done
done
python -m train.analysis.loss_curves --runs "$(list "${runs[@]}")" --output "$folder/comparison.png" \
  --title 'One model, several encodings of position'
accelerate launch --quiet --config_file configs/accelerate/cpu.yaml -m train.analysis.length_extrapolation \
  --models "$(list "${runs[@]/%//model}")" --corpus.validation "${held_out:-embedded}" --lengths "[$lengths]" \
  --trained "${lengths%%,*}" --output "$folder/lengths.png" # needs a document of 510 tokens
