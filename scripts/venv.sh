# Sourced by scripts/demo and scripts/test: a virtual environment with this checkout installed in it.
#
#   make_venv DIR REQUIREMENT PATH...
#
# installs REQUIREMENT ('.[demo]', '-e .[test]') into DIR with the first Python >= 3.11 found (or $PYTHON). DIR is
# reused while the files at PATH... are what they were; when they change, or its Python has gone, it is made anew.
# $OPTIONAL names requirements that are installed after it where that is possible.

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "error: no Python 3.11 or newer among: ${PYTHON:-python3, python3.11 to python3.14, python}." \
        "Install one, or name it: PYTHON=/path/to/python3.12 $0" >&2
    return 1
}

make_venv() {
    local dir=$1 requirement=$2 stamp python
    shift 2
    stamp="$requirement ${OPTIONAL:-} $(find "$@" -type f ! -name '*.pyc' | sort | tr '\n' '\0' | xargs -0 cat | cksum)"
    if [[ $(cat "$dir/stamp" 2>/dev/null) == "$stamp" ]] && "$dir/bin/python" -c '' 2>/dev/null; then
        return
    fi
    python=$(find_python)
    echo "installing $requirement into $dir with $("$python" --version)" >&2
    rm -rf "$dir"
    if ! "$python" -m venv "$dir"; then
        echo "error: $python cannot make a virtual environment; on Debian and Ubuntu, install python3-venv" >&2
        return 1
    fi
    # Unquoted on purpose: '-e .[test]' is two words.
    # shellcheck disable=SC2086
    if ! "$dir/bin/python" -m pip install --quiet --disable-pip-version-check $requirement; then
        echo "error: pip could not install $requirement; its message is above" >&2
        return 1
    fi
    # shellcheck disable=SC2086
    if [[ ${OPTIONAL:-} ]] && ! "$dir/bin/python" -m pip install --quiet --disable-pip-version-check $OPTIONAL; then
        echo "pip could not install $OPTIONAL: $dir goes without; its message is above" >&2
    fi
    echo "$stamp" >"$dir/stamp"
}
