#!/usr/bin/env bash
# Run: configs/sweeps/performer.sh SCALE [TEXT_FOLDER...]    (`make performer`; SCALE is tiny or small)
# Cost: small: 6 runs in 20 minutes, two at once on 2 cores; tiny: 20 seconds
# Expect: small: bits a byte held out: softmax with RoPE 2.54, FAVOR+ with RoPE 3.02, without 3.17
# Pretrains decoders of bytes with linear attention, with and without RoPE, and with softmax, and compares them.
set -euo pipefail
folder=runs/performer-$1 text=$(IFS=,; echo "${*:2}")

python -m train.sweep --config "configs/sweeps/performer-$1.yaml" ${text:+--text "[$text]"}
runs=("$folder"/favor_rope-? "$folder"/favor_none-? "$folder"/softmax_rope-?)
python -m train.analysis.loss_curves --runs "$(IFS=,; echo "[${runs[*]}]")" --output "$folder/comparison.png" \
  --title 'Next byte: linear attention with and without RoPE, and softmax'
