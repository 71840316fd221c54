# Sourced by the commands of this folder: puts a virtual environment with all dependencies on the
# PATH. It is made on the first call, in .venv, and again when the pinned versions change.

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
python=${PYTHON:-python3}
stamp=.venv/installed
wanted=$(cat ci/requirements.txt pyproject.toml | cksum)

if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
        echo "Python 3.10 or later is needed; set PYTHON to one (now: $python)" >&2
        exit 2
    }
    echo "installing into .venv (torch is large: this may take some minutes)" >&2
    "$python" -m venv .venv &&
        .venv/bin/python -m pip install --quiet --disable-pip-version-check \
            --requirement ci/requirements.txt &&
        .venv/bin/python -m pip install --quiet --disable-pip-version-check \
            --no-deps --no-build-isolation --editable . || exit 2
    echo "$wanted" >"$stamp"
fi
PATH=$PWD/.venv/bin:$PATH
