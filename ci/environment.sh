# Sourced by the commands of this folder: puts a virtual environment with all dependencies on the
# PATH. It is made on the first call, in .venv, and again when the pinned versions change, when the
# checkout was moved, or when the Python that it was made from is another one or gone.

CDPATH= cd -- "$(dirname "${BASH_SOURCE[0]}")/.." || exit
stamp=.venv/installed
# Its scripts name their interpreter by a full path, so they work in one place and with one Python.
made_for() { printf '%s %s' "$(pwd -P)" "$("$1" --version 2>/dev/null)"; }
packages=$(cat ci/requirements.txt pyproject.toml | cksum)

# Of the Pythons on the PATH that have the version of the first one, the quickest. Some are built
# without optimizations (pyenv's are, if it is not told), and all that runs here takes longer.
quickest() {
    local version candidate took_us least_us= best=python3
    version=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    while read -r candidate; do
        took_us=$("$candidate" ci/speed.py "$version" 2>/dev/null) || continue
        if [ $((took_us * 10)) -lt $((${least_us:=$took_us} * 9)) ]; then # more than chance
            least_us=$took_us best=$candidate
        fi
    done < <(type -ap python3 "python$version")
    echo "$best"
}

packages_before= made_before=
{ read -r packages_before && read -r made_before; } 2>/dev/null <"$stamp" || :
fresh=
for wanted in .venv/bin/python ${PYTHON:+"$PYTHON"}; do # without PYTHON, what there is will do
    [ "$made_before" = "$(made_for "$wanted")" ] || fresh=--clear
done

if [ -n "$fresh" ] || [ "$packages_before" != "$packages" ]; then
    python=${PYTHON:-$(quickest)}
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
        echo "Python 3.10 or later is needed; set PYTHON to one (now: $python)" >&2
        exit 2
    }
    echo "installing into .venv (torch is large: this may take some minutes)" >&2
    "$python" -m venv $fresh .venv &&
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
            --requirement ci/requirements.txt &&
        .venv/bin/python -m pip install --quiet --disable-pip-version-check \
            --no-deps --no-build-isolation --editable . || exit 2
    # On all cores, and without what is rarely imported; pip would compile everything on one. Errors
    # are ignored: some packages hold files for other Pythons.
    .venv/bin/python -W ignore -c '
import compileall, re
rare = re.compile("/(tests|testing|_inductor|networkx|pip|setuptools|mypyc?)/")
compileall.compile_dir(".venv/lib", rx=rare, quiet=2, workers=0)' || exit 2
    printf '%s\n' "$packages" "$(made_for .venv/bin/python)" >"$stamp"
fi
PATH=$PWD/.venv/bin:$PATH
unset PYTHONDONTWRITEBYTECODE # hundreds of short processes import the same modules
export OPENBLAS_NUM_THREADS=1 # of numpy, whose threads spin for a while after each import
