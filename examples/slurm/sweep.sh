#!/usr/bin/env bash
# Three seeds side by side, and when all of them have ended well, a last run.
#
# bash sweep.sh PLAN      in the folder of the plan; prints the ids of both jobs
set -euo pipefail

[[ $# -eq 1 ]] || {
    echo 'error: expected a plan: bash sweep.sh data.json' >&2
    exit 2
}
autopipe export "$1" --to slurm --name sweep --array 0-2%2 -o sweep.sbatch -- --steps "${STEPS:-1000}"
autopipe export "$1" --to slurm --name last -o last.sbatch -- --steps "${STEPS:-1000}"
array=$(sbatch --parsable sweep.sbatch)
last=$(sbatch --parsable --dependency="afterok:$array" last.sbatch)
echo "$array $last"
