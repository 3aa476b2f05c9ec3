#!/usr/bin/env bash
# Build Horovod against the torch that is installed, and install it beside it.
#
#   scripts/install_horovod.sh                                  # for the python3 on the path
#   PYTHON=.venv/bin/python scripts/install_horovod.sh          # for another one
#   HOROVOD_GPU_OPERATIONS=NCCL scripts/install_horovod.sh      # with NCCL
#   HOROVOD_WITH_MPI=1 scripts/install_horovod.sh               # with MPI
#
# All HOROVOD_* variables of Horovod's own build are passed through. The wheel is kept in
# ~/.cache/lightning-mgwfbp (or $XDG_CACHE_HOME), by the versions and options it was built for, so
# that a second run installs it in seconds; --rebuild builds it anew.
#
# Horovod 0.28.1, the newest there is, asks for C++14, and torch's headers for C++20. Nothing else
# keeps the two apart: a wrapper around the compiler replaces that flag.
set -euo pipefail

version=0.28.1
python=${PYTHON:-python3}

say() { echo "==> $*"; }
fail() { echo "install_horovod.sh: error: $*" >&2; exit 1; }

case "${1:-}" in
  "" | --rebuild) ;;
  *) fail "the only argument is --rebuild, got $1" ;;
esac

# What is missing is said in one go, and before minutes of compiling.
missing=()
compiler=${CXX:-g++}
command -v "$compiler" >/dev/null || missing+=("a C++20 compiler (g++)")
command -v cmake >/dev/null || missing+=("cmake")
command -v make >/dev/null || missing+=("make")
command -v "$python" >/dev/null || fail "no interpreter $python: set PYTHON"
headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
[[ -e "$headers/Python.h" ]] || missing+=("Python's headers (python3-dev)")
"$python" -c 'import pip' 2>/dev/null || missing+=("pip for $python (python3-pip)")
if ((${#missing[@]})); then
  printf 'install_horovod.sh: error: missing: %s\n' "${missing[@]}" >&2
  fail "on Debian: apt install g++ cmake make python3-dev python3-pip"
fi
torch=$("$python" -c 'import torch; print(torch.__version__)' 2>/dev/null) ||
  fail "torch is not installed for $python: install the one you train with first"
echo 'int main() { auto f = []<class T>(T x) { return x; }; return f(0); }' |
  "$compiler" -std=gnu++20 -x c++ -fsyntax-only - 2>/dev/null ||
  fail "$compiler does not know C++20, which torch $torch needs: g++ 10 or newer, or set CXX"

export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
export HOROVOD_WITH_GLOO=${HOROVOD_WITH_GLOO:-1}
[[ -n "${HOROVOD_WITH_MPI:-}" ]] || export HOROVOD_WITHOUT_MPI=1

options=$(env | grep '^HOROVOD_' | sort)
tag=$("$python" - "$torch" "$options" <<'PY'
import hashlib, platform, sys
options = hashlib.sha256(sys.argv[2].encode()).hexdigest()[:8]
print(f"torch{sys.argv[1]}-py{platform.python_version()}-{platform.machine()}-{options}")
PY
)
cache="${XDG_CACHE_HOME:-$HOME/.cache}/lightning-mgwfbp"
kept="$cache/horovod-$version-$tag"

pip_install() { "$python" -m pip install --quiet --disable-pip-version-check "$@"; }
# What it requires, first: its build needs one of them, and pip warns of a wheel without them.
say "Installing what Horovod requires"
pip_install cloudpickle psutil pyyaml packaging 'cffi>=1.4.0'

if [[ "${1:-}" == --rebuild || ! -d "$kept" ]]; then
  # Beside the place where the wheel is kept: it gets there by being renamed, whole or not at all.
  mkdir -p "$cache"
  work=$(mktemp -d "$cache/build.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  real=$(command -v "$compiler")
  cat >"$work/c++" <<SH
#!/bin/sh
for flag do
  shift
  case \$flag in -std=gnu++14 | -std=c++14) flag=-std=gnu++20 ;; esac
  set -- "\$@" "\$flag"
done
exec "$real" "\$@"
SH
  chmod +x "$work/c++"
  say "Building Horovod $version for torch $torch (two or three minutes); log: $kept.log"
  # Its setup needs torch itself, thus no isolation, and pkg_resources, thus an older setuptools.
  # Those go into a folder of their own, since the environment's must not change.
  "$python" -m pip install --quiet --disable-pip-version-check --target "$work/tools" \
    'setuptools<80' wheel
  if ! CXX="$work/c++" PYTHONPATH="$work/tools${PYTHONPATH:+:$PYTHONPATH}" \
    "$python" -m pip wheel --disable-pip-version-check --no-build-isolation --no-deps \
    --no-cache-dir --wheel-dir "$work/wheel" "horovod==$version" >"$kept.log" 2>&1; then
    grep -iE 'error|not found' "$kept.log" | head -20 >&2 || true
    fail "the build failed; the whole log is $kept.log. Usual reasons: a compiler older than
  torch's, a torch with CUDA but no CUDA toolkit (HOROVOD_CUDA_HOME), NCCL or MPI asked for
  (HOROVOD_GPU_OPERATIONS, HOROVOD_WITH_MPI) but not found (HOROVOD_NCCL_HOME, mpicxx on the
  path), too little memory (MAKEFLAGS=-j1)"
  fi
  rm -rf "$kept"
  mv "$work/wheel" "$kept"
fi

wheels=("$kept"/*.whl)
say "Installing $(basename "${wheels[0]}")"
pip_install --force-reinstall --no-deps "${wheels[0]}"
"$python" - <<'PY'
import horovod.torch as hvd
built = {"gloo": hvd.gloo_built(), "MPI": hvd.mpi_built(), "NCCL": hvd.nccl_built()}
print("==> Horovod works, with", ", ".join(name for name, there in built.items() if there))
PY
