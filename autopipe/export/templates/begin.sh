set -euo pipefail

fail() {
    printf 'error: %s\n' "$1" >&2
    exit 2
}

[[ -f {{ path | q }} ]] || fail {{ ("there is no plan " ~ path ~ " in this folder") | q }}
{% if venv %}
# shellcheck source=/dev/null
source -- {{ (venv ~ "/bin/activate") | q }}
{% endif %}
