#!/bin/sh
# The steps of the images' build stages, the same for every Dockerfile. They install into /opt/moot.
#   install.sh base                    a virtual environment, torch as TORCH says (cuda, cpu or none), and what compiles kernels
#   install.sh requirements EXTRA...   what the project's own code needs
#   install.sh project                 the project's own code, and its kernels
set -eu
pip=/opt/moot/bin/pip
secret=/run/secrets/ca
if [ -s "$secret" ]; then export PIP_CERT="$secret"; fi
case "${TORCH:=none}" in
  cuda | cpu | none) ;;
  *) echo "TORCH is cuda, cpu or none" >&2; exit 1 ;;
esac

# Only CPUs of this kind have kernels; on others, and on GPUs, torch computes.
has_kernels() { [ "$TORCH" = cpu ] && [ "$(uname -m)" = x86_64 ]; }

case "$1" in
  base)
    python3 -m venv /opt/moot
    wanted="torch==${TORCH_VERSION:-2.13.0}"
    # The CPU build is a tenth of the size of the one for GPUs, and has an index of its own.
    index="${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}"
    case "$TORCH" in
      cuda) "$pip" install "$wanted" ;;
      cpu) "$pip" install --index-url "$index" "$wanted" ;;
    esac
    if has_kernels; then
      apt-get update -q
      apt-get install -q -y --no-install-recommends gcc libc6-dev
    fi
    ;;
  requirements)
    shift
    python3 requirements.py "$@" --without torch > requirements.txt
    "$pip" install -r requirements.txt
    ;;
  project)
    "$pip" install --no-deps .
    # From elsewhere: in this folder Python would take the sources, and the kernels would be left behind beside them.
    if has_kernels; then (cd / && /opt/moot/bin/python -m moot.model.decoder.kernels.library); fi
    ;;
  *) echo "a step is base, requirements or project" >&2; exit 1 ;;
esac
