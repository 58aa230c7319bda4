#!/usr/bin/env bash
# A Docker engine and the images for the tests that run containers, on a Debian machine and as root. What is there is used:
# a running engine, base images, built images. Nothing is pulled where it can be made from the machine's own packages.
#
#   tests/deploy/setup_engine.sh          then: MOOT_DEPLOY_CONTAINERS=1 pytest tests/deploy/test_deploy_containers.py
#   tests/deploy/setup_engine.sh stop     ends the engine that it started
set -euo pipefail
cd "$(dirname "$0")/../.."
# Not in this folder: the path of a Unix socket is short.
folder=/tmp/moot-engine
export DOCKER_HOST="${DOCKER_HOST:-unix://$folder/docker.sock}" DOCKER_BUILDKIT=1
docker=/usr/bin/docker
mkdir -p "$folder"

if [[ "${1:-}" == stop ]]; then
  if [[ -f "$folder/dockerd.pid" ]]; then kill "$(cat "$folder/dockerd.pid")"; fi
  exit 0
fi

if ! [[ -x $docker ]] || ! command -v dockerd >/dev/null || ! command -v mmdebstrap >/dev/null; then
  apt-get update -q
  DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends docker.io iptables mmdebstrap
fi

if ! $docker info >/dev/null 2>&1; then
  setsid dockerd --host "$DOCKER_HOST" --data-root "$folder/data" --exec-root "$folder/exec" --pidfile "$folder/dockerd.pid" \
    >"$folder/dockerd.log" 2>&1 </dev/null &
  for _ in $(seq 300); do
    $docker info >/dev/null 2>&1 && break
    sleep 0.1
  done
  $docker info >/dev/null || { tail "$folder/dockerd.log"; exit 1; }
fi

# One root file system serves under the three names that Dockerfiles, chart and docker-compose.yml use.
if ! $docker image inspect python:3.11-slim redis:7.2 prom/prometheus:v2.53.0 >/dev/null 2>&1; then
  mmdebstrap --variant=minbase --include=ca-certificates,python3,python3-venv,redis-server,prometheus \
    --customize-hook='mkdir -p "$1/data" && chown 999:999 "$1/data"' \
    bookworm "$folder/base.tar" /etc/apt/sources.list.d/debian.sources
  $docker import "$folder/base.tar" python:3.11-slim
  $docker import --change 'WORKDIR /data' "$folder/base.tar" redis:7.2
  $docker import --change 'ENTRYPOINT ["/usr/bin/prometheus"]' "$folder/base.tar" prom/prometheus:v2.53.0
  rm "$folder/base.tar"
fi

# Wheels that lie on this machine are lent to the builds; the CPU build of torch is taken from there, or from its index.
arguments=(--secret "id=ca,src=/etc/ssl/certs/ca-certificates.crt")
if [[ -d "${PIP_FIND_LINKS:-}" ]]; then
  subnet="$($docker network inspect bridge --format '{{(index .IPAM.Config 0).Subnet}}')"
  gateway="$(python3 -c 'import ipaddress, sys; print(next(ipaddress.ip_network(sys.argv[1]).hosts()))' "$subnet")"
  python3 -m http.server --bind "$gateway" --directory "$PIP_FIND_LINKS" 8765 >/dev/null 2>&1 &
  lender=$!
  trap 'kill $lender' EXIT
  index="$(python3 -c 'from pip._internal.models.index import PyPI; print(PyPI.simple_url)')"
  arguments+=(--build-arg "PIP_FIND_LINKS=http://$gateway:8765/" --build-arg "PIP_TRUSTED_HOST=$gateway")
  arguments+=(--build-arg "TORCH_CPU_INDEX=$index")
fi
build() { # service, tag, and further arguments
  $docker build -q -f "services/$1/Dockerfile" -t "moot/$1:$2" "${arguments[@]}" "${@:3}" .
}
build router 0.1.0
build drafter 0.1.0 --build-arg TORCH=none
build verifier 0.1.0-cpu --build-arg TORCH=cpu
$docker image ls
