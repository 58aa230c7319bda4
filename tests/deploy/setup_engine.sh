#!/usr/bin/env bash
# A Docker engine and the images for the tests that run containers, on a Debian machine and as root. What is there is used:
# a running engine, base images, built images. Nothing is pulled where it can be made from the machine's own packages.
#
#   tests/deploy/setup_engine.sh start    an engine that has run a container; exit status 3 where this cannot be had
#   tests/deploy/setup_engine.sh build    the images
#   tests/deploy/setup_engine.sh stop     ends the engine that it started, and all containers in it
set -euo pipefail
cd "$(dirname "$0")/../.."
# Not in this folder: the path of a Unix socket is short.
folder=/tmp/moot-engine
export DOCKER_HOST="${DOCKER_HOST:-unix://$folder/docker.sock}" DOCKER_BUILDKIT=1
docker=/usr/bin/docker
python="${PYTHON:-python3}"
own_pid="$folder/own.pid"

cannot() {
  echo "no container can be run here: $1" >&2
  exit 3
}

is_up() { timeout 10 $docker info >/dev/null 2>&1; }

# The engine that this script started; a process that got its number since does not count.
own_engine() { [[ -s $own_pid ]] && grep -qs dockerd "/proc/$(cat "$own_pid")/cmdline"; }

remove_containers() {
  local all
  all="$(timeout 20 $docker ps --all --quiet)"
  if [[ -n $all ]]; then timeout 60 $docker rm --force --volumes $all >/dev/null; fi
}

install_engine() {
  command -v apt-get >/dev/null || cannot "there is neither Docker nor apt-get"
  { apt-get update -q && DEBIAN_FRONTEND=noninteractive timeout 300 \
    apt-get install -q -y --no-install-recommends docker.io iptables mmdebstrap; } >"$folder/install.log" 2>&1 \
    || cannot "Docker's packages are not installed: $(tail -n 1 "$folder/install.log")"
}

start_engine() {
  # Left by an engine that was killed: its number may be another process's by now.
  rm -f "$folder/dockerd.pid"
  setsid dockerd --host "$DOCKER_HOST" --data-root "$folder/data" --exec-root "$folder/exec" --pidfile "$folder/dockerd.pid" \
    >"$folder/dockerd.log" 2>&1 </dev/null &
  echo $! >"$own_pid"
  for _ in $(seq 300); do
    if is_up; then return; fi
    own_engine || break
    sleep 0.1
  done
  cannot "the engine does not start: $(tail -n 1 "$folder/dockerd.log")"
}

# One root file system serves under the three names that Dockerfiles, chart and docker-compose.yml use.
make_bases() {
  timeout 300 mmdebstrap --variant=minbase --include=ca-certificates,python3,python3-venv,redis-server,prometheus \
    --customize-hook='mkdir -p "$1/data" && chown 999:999 "$1/data"' \
    bookworm "$folder/base.tar" /etc/apt/sources.list.d/debian.sources >"$folder/base.log" 2>&1 \
    || cannot "no base image can be made: $(tail -n 1 "$folder/base.log")"
  $docker import "$folder/base.tar" python:3.11-slim
  $docker import --change 'WORKDIR /data' "$folder/base.tar" redis:7.2
  $docker import --change 'ENTRYPOINT ["/usr/bin/prometheus"]' "$folder/base.tar" prom/prometheus:v2.53.0
  rm "$folder/base.tar"
}

start() {
  ((EUID == 0)) || cannot "an engine needs root"
  if ! [[ -x $docker ]] || ! command -v dockerd >/dev/null || ! command -v mmdebstrap >/dev/null; then install_engine; fi
  is_up || start_engine
  if own_engine; then remove_containers; fi
  $docker image inspect python:3.11-slim redis:7.2 prom/prometheus:v2.53.0 >/dev/null 2>&1 || make_bases
  # An engine that is up may still lack what a container needs, or give it no way out.
  timeout 60 $docker run --rm python:3.11-slim true 2>"$folder/probe.log" \
    || cannot "a container does not start: $(tail -n 1 "$folder/probe.log")"
  timeout 120 $docker run --rm python:3.11-slim apt-get update -q >"$folder/probe.log" 2>&1 \
    || cannot "a container reaches no packages: $(tail -n 1 "$folder/probe.log")"
}

build() {
  # Wheels that lie on this machine are lent to the builds; the CPU build of torch is taken from there, or from its index.
  arguments=(--secret "id=ca,src=/etc/ssl/certs/ca-certificates.crt")
  if [[ -d "${PIP_FIND_LINKS:-}" ]]; then
    subnet="$($docker network inspect bridge --format '{{(index .IPAM.Config 0).Subnet}}')"
    gateway="$("$python" -c 'import ipaddress, sys; print(next(ipaddress.ip_network(sys.argv[1]).hosts()))' "$subnet")"
    index="$("$python" -c 'from pip._internal.models.index import PyPI; print(PyPI.simple_url)')"
    "$python" -m http.server --bind "$gateway" --directory "$PIP_FIND_LINKS" 8765 >/dev/null 2>&1 &
    lender=$!
    trap 'kill $lender' EXIT
    arguments+=(--build-arg "PIP_FIND_LINKS=http://$gateway:8765/" --build-arg "PIP_TRUSTED_HOST=$gateway")
    arguments+=(--build-arg "TORCH_CPU_INDEX=$index")
  fi
  build_image router 0.1.0
  build_image drafter 0.1.0 --build-arg TORCH=none
  build_image drafter 0.1.0-cpu --build-arg TORCH=cpu
  build_image verifier 0.1.0-cpu --build-arg TORCH=cpu
  # Of builds before this one nothing is left but what the next may reuse.
  $docker image prune --force >/dev/null
  $docker builder prune --force --keep-storage 6GB >/dev/null
  $docker image ls 'moot/*'
}

build_image() { # service, tag, and further arguments
  local log="$folder/build-$1-$2.log"
  echo "building moot/$1:$2"
  $docker build --progress plain -f "services/$1/Dockerfile" -t "moot/$1:$2" "${arguments[@]}" "${@:3}" . >"$log" 2>&1 \
    || { tail -n 40 "$log" >&2; return 1; }
}

stop() {
  own_engine || return 0
  remove_containers || true
  local engine
  engine="$(cat "$own_pid")"
  kill "$engine"
  for _ in $(seq 300); do
    own_engine || break
    sleep 0.1
  done
  # Its containerd ends with it, but for an engine that had to be killed.
  if own_engine; then kill -KILL "$engine" "$(cat "$folder/exec/containerd/containerd.pid")"; fi
  rm -f "$own_pid"
}

mkdir -p "$folder"
case "${1:-}" in
  start | build | stop) "$1" ;;
  *)
    echo "usage: $0 start|build|stop" >&2
    exit 2
    ;;
esac
