#!/usr/bin/env bash
# Run: TEXT=FOLDER GLUE=FOLDER VOCABULARY=FILE configs/sweeps/gpu.sh PART...
#      parts in their order: machine tests step attention resume peers pair glue; TEXT has train*.parquet and validation*.parquet,
#      SIZE=tiny tries the script with small models, PYTHON is the interpreter
# Cost: estimated minutes on one GPU: 0.5, 2, 3, 1, 2, 5, 10, 5
# Expect: rows of short tables as they are measured, also in runs/gpu. On an H200 (results/bench-gpu.md) machine, tests, five of the runs of step,
#         attention and the shortest rows of peers were run, the rest not. Targets: 45 % MFU in `step`, 5 x in `peers`
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3} size=${SIZE:-base} folder=runs/gpu
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF-expandable_segments:True} PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
rows=64 length=512 steps=${STEPS:-60} tokens=${TOKENS:-110_000_000} warmup=180 scale=full
[ "$size" = tiny ] && rows=8 length=64 steps=12 tokens=100_000 warmup=10 scale=tiny
mkdir -p $folder

pretrain() { # HARDWARE NAME OPTIONS...
  "$python" -m accelerate.commands.launch --quiet --config_file "configs/accelerate/$1.yaml" ${PROFILE:-} train/pretrain.py \
    --config configs/pretrain/fast-base.yaml --config "configs/model/${MODEL:-roformer}-$size.yaml" --corpus.train "$TEXT/train*" \
    --corpus.validation "$TEXT/validation*" --corpus.tokenizer "$VOCABULARY" --corpus.length $length --corpus.cache $folder/tokens \
    --optim.micro_batch $rows --optim.batch_size $rows --optim.warmup_steps 10 --optim.tokens null --run.folder $folder \
    --run.log_every 10 --run.peak_tflops 790 --run.tracker null --run.name "$2" "${@:3}"
}

short() { # HARDWARE NAME OPTIONS...: a run of `steps` steps
  pretrain "$1" "$2" --optim.steps $steps --run.validation_sequences 64 --run.keep 1 "${@:3}" > "$folder/$2.txt" 2>&1 || tail -n 3 "$folder/$2.txt"
  logged "$2"
}

logged() { # RUN...: the last row of each log
  "$python" - "$@" <<'END'
import os, pandas, sys
logs = {run: f"runs/gpu/{run}/log.jsonl" for run in sys.argv[1:]}
rows = {run: pandas.read_json(log, lines=True).dropna(subset="mfu").tail(1) for run, log in logs.items() if os.path.exists(log)}
columns = ["step", "seconds_per_step", "tokens_per_second", "mfu", "data_wait", "memory_gb", "loss"]
print(pandas.concat(rows).droplevel(1).reindex(columns=columns).to_string() if rows else "no steps logged")
END
}

machine() { # versions, peak, and which kernel computes each case
  "$python" - <<'END'
import torch, transformers
from torch.nn.functional import scaled_dot_product_attention as sdpa
from train.loop.run_log import measure_peak_flops
print(torch.__version__, torch.version.cuda, transformers.__version__, torch.cuda.get_device_name(), sep=" | ")
print("bfloat16", f"{measure_peak_flops(torch.device('cuda'), torch.bfloat16) / 1e12:.0f} TFLOP/s", sep=" | ")
for dtype, dropout, masked in ((d, p, m) for d in (torch.bfloat16, torch.float32) for p in (0.0, 0.1) for m in (0, 1)):
    q = torch.randn(8, 12, 512, 64, device="cuda", dtype=dtype)
    mask = torch.ones(8, 1, 1, 512, device="cuda", dtype=torch.bool) if masked else None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        sdpa(q, q, q, mask, dropout)
    names = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    print("sdpa", dtype, f"dropout {dropout}", f"mask {masked}", names[0].key[:90] if names else "-", sep=" | ")
END
}

tests() { "$python" -m pytest -q -m gpu tests/roformer/test_gpu.py -p no:cacheprovider; }

step() { # eager and compiled, then one change at a time; the kernels of a compiled step
  short one_gpu eager
  short one_gpu_compiled compiled
  short one_gpu_compiled padded --model.attention sdpa
  short one_gpu_compiled dropout --model.config.hidden_dropout_prob 0.1 --model.config.attention_probs_dropout_prob 0.1
  TORCHINDUCTOR_SHAPE_PADDING=0 short one_gpu_compiled unaligned # the head's 30,522 columns as they are
  # a file called profile.py would stand in for the standard library's
  cat > $folder/run_profiled.py <<'END'
import runpy, sys, torch
del sys.argv[0]
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
    runpy.run_path(sys.argv[0], run_name="__main__")
print(profile.key_averages().table(sort_by="self_device_time_total", row_limit=25, max_name_column_width=70))
END
  PROFILE=$folder/run_profiled.py short one_gpu_compiled profiled
  grep -A 32 'Self CUDA' $folder/profiled.txt | cut -c 1-72,118- || true
}

attention() { # 40 lengths with cuDNN's attention on and off; the share that dropout 0.1 drops
  "$python" - <<'END'
import time, torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
options = {"device": "cuda", "dtype": torch.bfloat16}
print("cuDNN | seconds for 40 lengths, new | again | share dropped at 0.1")
for cudnn in (False, True):
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    times = [time.perf_counter()]
    for length in 2 * list(range(64, 384, 8)):
        q = torch.randn(32, 12, length, 64, requires_grad=True, **options)
        sdpa(q, q, q, dropout_p=0.1).sum().item()
        times.append(time.perf_counter())
    v = torch.eye(64, **options).expand(64, 12, 64, 64).contiguous()
    dropped = (sdpa(torch.zeros_like(v), v, v, dropout_p=0.1) == 0).float().mean().item()
    print(cudnn, f"{times[40] - times[0]:.2f}", f"{times[80] - times[40]:.2f}", f"{dropped:.4f}", sep=" | ")
END
}

resume() { # a run killed after a checkpoint and started again ends with the losses of one that was not
  local options=(--run.save_every $((steps / 3)) --model.config.hidden_dropout_prob 0.1)
  export TORCH_LOGS=recompiles
  short one_gpu_compiled whole "${options[@]}"
  rm -rf $folder/killed
  set -m # a process group of its own, to kill at once
  short one_gpu_compiled killed "${options[@]}" & local job=$!
  set +m
  until compgen -G "$folder/killed/checkpoints/*[0-9]" > /dev/null || ! kill -0 $job 2> /dev/null; do sleep 0.2; done
  kill -KILL -- -$job || true
  wait $job || true
  short one_gpu_compiled killed "${options[@]}"
  unset TORCH_LOGS
  echo "recompilations: $(grep -c 'Recompiling function' $folder/whole.txt || true)"
}

peers() { "$python" -m train.bench --device cuda --rounds 3 --scale $scale --output $folder/bench-gpu.json; }

pair() { # four minutes a model at 460,000 tokens/s; one checkpoint of each is kept
  for MODEL in roformer bert; do
    pretrain one_gpu_compiled "$MODEL" --optim.tokens "$tokens" --optim.batch_size $((4 * rows)) \
      --optim.warmup_steps $warmup --corpus.mask_rate 0.15 --run.save_every 100000 --run.keep 1
  done
  logged roformer bert
}

glue() { # several small runs share the GPU
  "$python" -m accelerate.commands.launch --quiet --config_file configs/accelerate/one_gpu.yaml -m finetune.grid --workers 6 \
    --config configs/glue/standard.yaml --learning_rates '[5e-5]' --glue_dir "$GLUE" --tasks "[${TASKS:-cola,mrpc,stsb,rte,wnli,sst2}]" --seeds "[${SEEDS:-0}]" \
    --models "[$folder/roformer/model,$folder/bert/model]" --cache $folder/tokens --output $folder/results.jsonl
  "$python" -m finetune.report $folder/results.jsonl
}

for part in "$@"; do
  echo "== $part"
  SECONDS=0
  "$part" 2>&1 | tee "$folder/$part.txt"
  echo "== $part: $SECONDS s"
done
