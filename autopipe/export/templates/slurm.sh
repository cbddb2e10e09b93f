#!/usr/bin/env bash
# {{ title }}
# Written by autopipe {{ version }} for Slurm 20.11 and later.
#
# sbatch THIS, in the folder of {{ path | q }}
{% for name, value in asked.items() %}
#SBATCH --{{ name }}{{ "=" ~ value if value is not none else "" }}
{% endfor %}
{% include "begin.sh" %}
logs=logs/$SLURM_JOB_NAME-$SLURM_JOB_ID
mkdir -p -- "$logs"

# Where rank 0 listens: the first node's name or, where that does not resolve (several nodes on one
# host), the address that Slurm itself has for it. Never this node in its stead.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${hosts%%$'\n'*}
if ! getent ahosts "$MASTER_ADDR" > /dev/null; then
    described=$(scontrol show node -o "$MASTER_ADDR")
    [[ $described =~ NodeAddr=([^[:space:]]+) ]] || fail "node $MASTER_ADDR has no address"
    MASTER_ADDR=${BASH_REMATCH[1]}
    getent ahosts "$MASTER_ADDR" > /dev/null ||
        fail "the first node is $MASTER_ADDR, a name that has no address on $(hostname)"
fi
export MASTER_ADDR
{% if style == "torchrun" %}
{% if port %}
export MASTER_PORT={{ port }}
{% else %}
# Of this job's own, below those that Linux hands out by itself.
export MASTER_PORT=$((10000 + (16 * SLURM_JOB_ID + 4099 * ${SLURM_RESTART_COUNT:-0}) % 20000))
{% endif %}
{% elif port %}
export MASTER_PORT={{ port }}
{% endif %}
# For what ranks start; they share out the cores themselves.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
{% for name, value in settings.items() %}
export {{ name }}="{{ value }}"
{% endfor %}

{% if style == "srun" %}
# What each task runs: one rank, by the number that Slurm gives it.
# shellcheck disable=SC2329 # each task's own shell calls it
task() {
{% if saves %}
    trap '' USR1 # until the rank listens for it
{% endif %}
    exec python -m {{ command | qs }}{{ each }}
}
{% else %}
# What each task runs: torchrun for the ranks of its node, by the number that Slurm gives the node.
# shellcheck disable=SC2329 # each task's own shell calls it
task() {
{% if saves %}
    trap '' USR1 # the ranks save; torchrun would die of it
{% endif %}
    exec torchrun \
        --nnodes "$SLURM_JOB_NUM_NODES" --node-rank "$SLURM_NODEID" --nproc-per-node {{ processes }} \
        --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
        --max-restarts {{ restarts }} --log-dir "$1" --tee 3 \
        -m {{ command | qs }}{{ each }}
}
{% endif %}

{% if saves %}
# Slurm tells this shell alone that the limit is near. It has all ranks save and end with 0, and puts
# the job back into the queue; a job that ends by itself, or fails, is not put back.
stopped=
interrupted=1
trap 'stopped=1; interrupted=1; scancel --signal=USR1 "$SLURM_JOB_ID.0"' USR1
trap 'interrupted=1' TERM # the ranks have got it too, and save

{% endif %}
srun {{ srun | qs }} \
    --output="$logs/{{ log }}" --open-mode=append \
    bash -c "$(declare -f task); task \"\$1\"" task "$logs"{{ " &" if saves else "" }}
{% if saves %}
step=$!
while [[ -n $interrupted ]]; do
    interrupted=
    code=0
    wait "$step" || code=$? # a signal ends `wait`, not the step
done
if [[ -n $stopped && $code -eq 0 ]]; then
    scontrol requeue "$SLURM_JOB_ID"
    sleep 60 # until Slurm ends this shell
fi
exit "$code"
{% endif %}
