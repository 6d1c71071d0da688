#!/usr/bin/env bash
# Makes the Python environment of this repository, or completes one: tools/setup_env.sh [FOLDER], default .venv.
#
#   PYTHON           interpreter that makes the environment, default python3 (>= 3.10)
#   TORCH_VERSION    version installed where there is no GPU, default 2.13.0
#   TORCH_CPU_INDEX  package index with CPU builds of torch, for when the usual one would add gigabytes of GPU libraries
#
# A torch that the environment has already is kept.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${1:-.venv}
python=${PYTHON:-python3}
torch_version=${TORCH_VERSION:-2.13.0}
torch_cpu_index=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

say() { printf '[%4ds] %s\n' "$SECONDS" "$*"; }
die() { printf 'setup_env: %s\n' "$*" >&2; exit 1; }
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
torch_version_of() { "$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null; }

make_venv() {
    command -v "$python" >/dev/null || die "no $python; install Python >= 3.10 or name one: PYTHON=/path/to/python"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        die "$("$python" --version) is too old, 3.10 is needed; name a newer one: PYTHON=/path/to/python"
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        die "$python cannot make environments; on Debian and Ubuntu: apt-get install python3-venv"
    "$python" -m venv "$venv"
    # Python 3.10 may come with a pip without --report.
    pip install -qq --upgrade "pip>=23.1"
}

# Would a plain installation of torch bring libraries for GPUs?
torch_brings_gpu_libraries() {
    pip install -qq --dry-run --ignore-installed --report "$scratch/report.json" "torch==$torch_version" || return 0
    "$venv/bin/python" - "$scratch/report.json" <<'PYTHON'
import json, sys
names = [package["metadata"]["name"].lower() for package in json.load(open(sys.argv[1]))["install"]]
sys.exit(not any(name.startswith(("nvidia-", "cuda-", "triton", "pytorch-triton")) for name in names))
PYTHON
}

install_torch() {
    if nvidia-smi -L >/dev/null 2>&1; then
        say "installing torch for the GPU"
        pip install -qq "torch>=2.6,<3"
    elif torch_brings_gpu_libraries; then
        say "installing the CPU build of torch from $torch_cpu_index"
        pip install -qq --index-url "$torch_cpu_index" "torch==$torch_version"
    else
        say "installing torch $torch_version"
        pip install -qq "torch==$torch_version"
    fi
}

if [ -x "$venv/bin/python" ]; then
    say "using $venv ($("$venv/bin/python" --version))"
else
    say "making $venv"
    make_venv
fi
torch_version_of >/dev/null || install_torch
say "torch $(torch_version_of)"
# Whatever the other packages ask for, this torch stays.
echo "torch==$(torch_version_of)" >"$scratch/constraints.txt"
say "installing requirements.txt"
pip install -qq --requirement requirements.txt --constraint "$scratch/constraints.txt"
say "ready: $venv/bin/python"
