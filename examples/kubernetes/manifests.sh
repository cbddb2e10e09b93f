#!/usr/bin/env bash
# A plan as manifests for the three operators that start one, and the volume that they share.
#
# bash manifests.sh PLAN IMAGE      writes volume.yaml, trainjob.yaml, pytorchjob.yaml, jobset.yaml
#     kubectl apply -f volume.yaml; copy the plan and its model file into it; kubectl apply -f trainjob.yaml
set -euo pipefail

[[ $# -eq 2 ]] || {
    echo 'error: expected a plan and an image: bash manifests.sh plan.json registry/autopipe:0.1' >&2
    exit 2
}
words=(--image "$2" --name autopipe --claim autopipe --folder /workspace --time "${TIME:-1-00:00:00}"
    --checkpoints kept --save-every 1000)

autopipe export "$1" --to kubeflow -o trainjob.yaml "${words[@]}"
autopipe export "$1" --to pytorchjob -o pytorchjob.yaml "${words[@]}"
autopipe export "$1" --to jobset -o jobset.yaml "${words[@]}"

cat > volume.yaml <<'YAML'
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: autopipe
spec:
  accessModes: [ReadWriteMany]
  resources:
    requests:
      storage: 200Gi
YAML
