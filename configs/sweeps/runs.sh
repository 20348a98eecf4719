#!/usr/bin/env bash
# Run: configs/sweeps/runs.sh CONFIG [TEXT_FOLDER...] < RUNS, a line for each run: NAME FLAGS...
#      CONFIG is a file of configs/pretrain; TEXT_FOLDER has train* and validation* files (validation* is read from the first)
#      WORKERS runs at once (2) share the threads of the processor; HARDWARE (cpu) is a file of configs/accelerate
# Cost: that of the runs
# Expect: runs/CONFIG/NAME of each run, its output in runs/CONFIG/NAME.log
# Finished runs are skipped and interrupted ones continue: the same command can be repeated at any time.
set -euo pipefail
export folder=runs/$1 config=configs/pretrain/$1.yaml hardware=configs/accelerate/${HARDWARE:-cpu}.yaml
export train=embedded held_out=embedded workers=${WORKERS:-2}
[[ $1 = *-tiny ]] || : "${2:?must be folders of text with train* and validation* files}"
if [ $# -gt 1 ]; then
  train=$(IFS=,; files=("${@:2}"); echo "[${files[*]/%//train*}]") held_out=$2/validation*
fi
threads=$((${OMP_NUM_THREADS:-$(nproc)} / workers))
export OMP_NUM_THREADS=$((threads > 0 ? threads : 1))

pretrain() { # NAME FLAGS...
  [ ! -e "$folder/$1/model/tokenizer_config.json" ] || return 0
  echo "$1: started, output in $folder/$1.log"
  accelerate launch --quiet --config_file "$hardware" train/pretrain.py --config "$config" "${@:2}" --run.folder "$folder" \
    --run.name "$1" --corpus.train "$train" --corpus.validation "$held_out" >> "$folder/$1.log" 2>&1 || { echo "$1: failed"; return 1; }
  echo "$1: ended after $((SECONDS / 60)) min"
}
export -f pretrain
mkdir -p "$folder"
xargs -P "$workers" -L 1 bash -c 'pretrain "$@"' pretrain
