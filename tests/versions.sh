#!/usr/bin/env bash
# What touches torch's private parts, against other versions of torch: `tests/versions.sh [VERSION...]`.
#
# Not part of the gate: each version is an environment of its own, with gigabytes of wheels. Without arguments: the
# oldest version nbdist supports, and the newest that pip finds.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder=${NBDIST_VERSIONS_FOLDER:-${TMPDIR:-/tmp}/nbdist-versions}
python=${PYTHON:-python3}
versions=("$@")
[ ${#versions[@]} -gt 0 ] || versions=(2.9.1 newest)
tests=(
    tests/cluster/test_group.py tests/cluster/test_group_attach.py tests/cluster/test_steps.py
    tests/cluster/test_steps_stop.py tests/cluster/test_step_parts.py tests/cluster/test_forkserver.py
    tests/train/test_parallel.py tests/train/test_checkpoint.py
)

results=()
for version in "${versions[@]}"; do
    venv=$folder/$version
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    wanted=torch
    [ "$version" = newest ] || wanted="torch==$version"
    "$venv/bin/pip" install --quiet --disable-pip-version-check "$wanted"
    "$venv/bin/pip" install --quiet --disable-pip-version-check -e '.[test]'
    found=$("$venv/bin/python" -c 'import torch; print(torch.__version__)')
    printf '\n==> torch %s\n' "$found"
    # A warning that another version gives is not a failure here: it is read, not raised.
    if "$venv/bin/pytest" -q -W default "${tests[@]}" </dev/null; then
        results+=("torch $found: passed")
    else
        results+=("torch $found: FAILED")
    fi
done

printf '\n'
printf '%s\n' "${results[@]}"
[[ "${results[*]}" != *FAILED* ]]
