#!/usr/bin/env bash
# Run: sbatch configs/accelerate/slurm.sh --config configs/pretrain/NAME.yaml ...
#      (from the clone, after `make setup`; torchrun sets no precision by itself)
# Cost: two machines of eight GPUs
# Expect: not run on GPUs; tested with two CPU processes and a stand-in for SLURM
#SBATCH --job-name=roformer
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=48
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120
# Two minutes before its time is up the job receives USR1: all ranks save the same step and exit, and the job is queued
# again and continues from that checkpoint; without it the work since the last regular checkpoint would be lost.
# SLURM sends the signal to the step and not to this shell, so the step exits with 75 to say that it is to be continued.
set -uo pipefail
export ACCELERATE_MIXED_PRECISION=bf16 # plain torchrun reads no configuration of Accelerate's
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun does not take it from sbatch
export PYTORCH_ALLOC_CONF=expandable_segments:True # batches of many lengths leave no unusable gaps
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun bash -c '
  stopping=0
  trap "stopping=1; pkill -USR1 -P \$pid -f train/pretrain.py" USR1  # torchrun does not pass it on
  .venv/bin/torchrun --nnodes "$SLURM_NNODES" --node_rank "$SLURM_NODEID" --nproc_per_node 8 \
    --master_addr '"$first"' --master_port 29500 train/pretrain.py "$@" &
  pid=$!
  wait $pid; code=$?
  while kill -0 $pid 2> /dev/null; do wait $pid; code=$?; done
  [ $stopping = 1 ] && [ $code != 0 ] && exit 75
  exit $code' bash "$@"
code=$?
[ $code = 75 ] && exec scontrol requeue "$SLURM_JOB_ID"
exit $code
