#!/usr/bin/env bash
# Run: configs/sweeps/performer.sh SCALE [TEXT_FOLDER...]    (`make performer`; SCALE is tiny or small)
# Cost: small: 6 runs in 20 minutes, two at once on 2 cores; tiny: 20 seconds
# Expect: small: bits a byte held out: softmax with RoPE 2.54, FAVOR+ with RoPE 3.02, without 3.17
# Pretrains decoders of bytes with linear attention, with and without RoPE, and with softmax, and compares them.
set -euo pipefail
folder=runs/performer-$1 seeds=(0 1)
[ "$1" = tiny ] && seeds=(0)

for seed in "${seeds[@]}"; do
  echo "favor_rope-$seed --run.seed $seed --model.config.position_encoding rope --model.config.linear_attention favor"
  echo "favor_none-$seed --run.seed $seed --model.config.position_encoding none --model.config.linear_attention favor"
  echo "softmax_rope-$seed --run.seed $seed --model.config.position_encoding rope"
done | configs/sweeps/runs.sh "performer-$1" "${@:2}"

runs=("$folder"/favor_rope-? "$folder"/favor_none-? "$folder"/softmax_rope-?)
python -m train.analysis.loss_curves --runs "$(IFS=,; echo "[${runs[*]}]")" --output "$folder/comparison.png" \
  --title 'Next byte: linear attention with and without RoPE, and softmax'
