#!/usr/bin/env bash
# Run: configs/sweeps/encodings.sh SCALE [TEXT_FOLDER...]    (`make encodings`; SCALE is tiny or small)
# Cost: small: 21 runs in an hour, two at once on 2 cores; tiny: half a minute
# Expect: small: held-out loss at 4.1 M tokens: transformer_xl 5.08, rope 5.10, alibi 5.92, t5 6.35, the others 6.43 to 6.47
# Pretrains one small model with each position encoding, measures it at longer texts, and compares. Started again, it continues.
set -euo pipefail
folder=runs/encodings-$1 text=$(IFS=,; echo "${*:2}") held_out=${2:+$2/validation*} lengths=64,128,256,512
[ "$1" = tiny ] && lengths=16,32,64,128

python -m train.sweep --config "configs/sweeps/encodings-$1.yaml" ${text:+--text "[$text]"}
shopt -s extglob
runs=("$folder"/rope-? "$folder"/!(rope)-?) # the first model is compared with each other one
list() { (IFS=,; echo "[$*]"); }
accelerate launch --quiet --config_file configs/accelerate/cpu.yaml -m train.analysis.length_extrapolation \
  --models "$(list "${runs[@]/%//model}")" --corpus.validation "${held_out:-embedded}" --lengths "[$lengths]" \
  --trained "${lengths%%,*}" --output "$folder/lengths.png"
python -m train.analysis.loss_curves --runs "$(list "${runs[@]}")" --lengths "$folder/lengths.json" \
  --output "$folder/comparison.png" --title 'One model, several encodings of position'
