#!/usr/bin/env bash
# Four ways to split one model over the nodes of a Slurm cluster, each with its batch script.
#
# bash plans.sh MODEL CLUSTER [options of `autopipe export`]
#     bash plans.sh ../gpt.py 2x4xA100-80GB --time 4:00:00 --partition gpu --checkpoints kept
#
# In this folder then:  data.json, sharded.json, axes.json  and  data.sbatch, sharded.sbatch,
# offload.sbatch, axes.sbatch
set -euo pipefail

[[ $# -ge 2 ]] || {
    echo 'error: expected a model file and a cluster: bash plans.sh ../gpt.py 2x4xA100-80GB' >&2
    exit 2
}
model=$1
cluster=$2
shift 2

plan() { # NAME, and what is fixed; the planner decides the rest
    autopipe plan "$model" --cluster "$cluster" -o "$1.json" "${@:2}"
}

plan data --pp 1 --tp 1 --zero 0    # a replica on each device
plan sharded --pp 1 --tp 1 --zero 3 # parameters, gradients and optimizer dealt out: FSDP2
plan axes --pp 2 --tp 2             # tensor x pipeline x data parallel

for name in data sharded axes; do
    autopipe export "$name.json" --to slurm --name "$name" -o "$name.sbatch" "$@" -- --steps "${STEPS:-1000}"
done
# ZeRO-3 whose shards wait in the host's memory: the same plan, run in another way.
autopipe export sharded.json --to slurm --name offload -o offload.sbatch "$@" -- --steps "${STEPS:-1000}" --offload
