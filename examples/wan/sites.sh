#!/usr/bin/env bash
# Four sites of two GPUs, 30 ms and 1 Gbit/s apart: the plan, and one script for all of them.
#
# bash sites.sh HOST0,HOST1,HOST2,HOST3 [options of `autopipe export`]
#     on site N then, in the folder with plan.json, model.py and train.sh:  bash train.sh N
set -euo pipefail

[[ $# -ge 1 ]] || {
    echo 'error: expected the hosts of the sites: bash sites.sh a.org,b.org,c.org,d.org' >&2
    exit 2
}
hosts=$1
shift
autopipe plan model.py --cluster "${CLUSTER:-4x1x2xA100-80GB@30ms,1Gbit/s}" --pp "${STAGES:-8}"
autopipe explain plan.json
autopipe export plan.json --to torchrun --hosts "$hosts" -o train.sh \
    --checkpoints kept --save-every 1000 "$@" -- --steps "${STEPS:-100000}"
