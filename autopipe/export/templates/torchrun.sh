#!/usr/bin/env bash
# {{ title }}
# Written by autopipe {{ version }} for torchrun of torch 2.11 and later.
#
{% if nodes == 1 %}
# bash THIS, in the folder of {{ path | q }}
{% elif hosts %}
# On the node with number N, from 0 to {{ nodes - 1 }}: bash THIS N, in the folder of {{ path | q }}
{% else %}
# On the node with number N, from 0 to {{ nodes - 1 }}, in the folder of {{ path | q }}:
#     MASTER_ADDR=<name or address of node 0> bash THIS N
{% endif %}
{% if saves %}
# SIGTERM to torchrun ends the run after a checkpoint; started again, it goes on from there.
{% endif %}
{% for line in advice %}
# {{ line }}
{% endfor %}
{% include "begin.sh" %}
{% if nodes > 1 %}

# The plan binds ranks to nodes, so each node says which one it is.
[[ $# -eq 1 ]] || fail 'expected the number of this node, 0 to {{ nodes - 1 }}'
node=$1
case $node in
{% for processes in counts %}
    {{ loop.index0 }}) processes={{ processes }} ;;
{% endfor %}
    *) fail "expected the number of this node, 0 to {{ nodes - 1 }}, found $node" ;;
esac
{% if hosts %}
MASTER_ADDR={{ hosts[0] | q }}
{% else %}
[[ -n ${MASTER_ADDR:-} ]] || fail 'MASTER_ADDR is not set: the name or address of node 0'
{% endif %}
getent ahosts "$MASTER_ADDR" > /dev/null ||
    fail "node 0 is $MASTER_ADDR, a name that has no address on $(hostname)"
{% endif %}
command -v torchrun > /dev/null || fail 'there is no torchrun on PATH: activate the environment first'

# For what ranks start; they share out the cores themselves.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
{% for name, value in settings.items() %}
export {{ name }}="{{ value }}"
{% endfor %}
{% if saves %}
# USR1 is for the ranks, which save; torchrun would die of it.
trap '' USR1
{% endif %}
exec torchrun \
{% if nodes > 1 %}
    --nnodes {{ nodes }} --node-rank "$node" --nproc-per-node "$processes" \
    --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-{{ port }}}" \
{% else %}
    --standalone --nproc-per-node {{ counts[0] }} \
{% endif %}
    --max-restarts {{ restarts }} \
    --log-dir {{ logs | q }} --tee 3 \
    -m {{ command | qs }}
