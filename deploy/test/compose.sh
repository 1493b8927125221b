#!/usr/bin/env bash
# Runs compose.yaml in real containers, with podman and podman-compose, as root: builds the images, waits until all is
# healthy, streams an answer through the published port, kills prefill in the middle of a stream, and takes all down.
#
#     deploy/test/compose.sh [--build-only | --no-build]
#
# Exit status 77, with the reason on the last line, where that cannot be done here. Needs podman (4.3 or later), runc,
# the CNI plugins with dnsname, iptables, curl, and podman-compose (from Python's index). Images come from their
# registries; where none can be reached the base is made with debootstrap, Prometheus is Debian's, and Grafana is left
# out. Python's packages are downloaded by this machine's pip, so that its settings count.
#
#   WORK             images, packages and logs; kept, so that the next run is quick (default: /var/tmp/lockstep-compose)
#   PODMAN_COMPOSE   the podman-compose to run (default: podman-compose)
#   STORAGE_DRIVER   vfs where overlay does not work (default: overlay)
{
set -euo pipefail
cd "$(dirname "$0")/../.."

WORK=${WORK:-/var/tmp/lockstep-compose}
PODMAN_COMPOSE=${PODMAN_COMPOSE:-podman-compose}
STORAGE_DRIVER=${STORAGE_DRIVER:-overlay}
TAG=0.1.0
PORT=${PORT:-18000}
PROMETHEUS_PORT=${PROMETHEUS_PORT:-19090}
HEALTHY_S=${HEALTHY_S:-420}
TOKENS=1500
PROMPT='Write a function that adds two numbers.'
PYTHON=${PYTHON:-python3.11}

say() { printf '\n== %s\n' "$*"; }
die() { printf 'compose.sh: %s\n' "$*" >&2; exit 1; }
cannot() { printf 'compose.sh: cannot run here: %s\n' "$*"; exit 77; }

[ "$(id -u)" = 0 ] || cannot "it has to be root"
for tool in podman runc iptables curl "$PODMAN_COMPOSE" "$PYTHON"; do
    command -v "$tool" >/dev/null || cannot "$tool is not installed"
done

# ---- podman with a store of its own, first in PATH for podman-compose as well
mkdir -p "$WORK/bin" "$WORK/wheels" "$WORK/logs"
cat > "$WORK/containers.conf" <<CONF
[containers]
# What a machine inside another one may be allowed at most.
default_ulimits = ["nofile=1024:4096", "nproc=1024:4096"]
CONF
real_podman=$(command -v podman)
cat > "$WORK/bin/podman" <<PODMAN
#!/bin/sh
export CONTAINERS_CONF=$WORK/containers.conf
exec $real_podman --root $WORK/store-$STORAGE_DRIVER --runroot $WORK/run-$STORAGE_DRIVER --storage-driver=$STORAGE_DRIVER \\
    --runtime runc --cgroup-manager=cgroupfs "\$@"
PODMAN
chmod +x "$WORK/bin/podman"
PATH="$WORK/bin:$PATH"
podman info > "$WORK/logs/info" 2>&1 || cannot "podman info fails: $(tail -n 1 "$WORK/logs/info")"

# ---- images
have() { podman image exists "$1" || timeout 60 podman pull --quiet "$1" > /dev/null 2>&1; }
build() { podman build --isolation=chroot --format docker --layers "$@" > "$WORK/logs/build" 2>&1 \
    || { tail -n 20 "$WORK/logs/build" >&2; die "the build failed: $WORK/logs/build"; }; }

base=$(sed -n 's/^ARG BASE=//p' deploy/images/Dockerfile)
prometheus=$(sed -n 's/^ *image: \(.*prometheus.*\)/\1/p' deploy/compose/compose.yaml)
grafana=$(sed -n 's/^ *image: \(.*grafana.*\)/\1/p' deploy/compose/compose.yaml)
services="prefill decode proxy"

say "base image $base"
if ! have "$base"; then
    command -v debootstrap > /dev/null || cannot "no registry can be reached, and debootstrap is not installed"
    rm -rf "$WORK/rootfs"
    debootstrap --variant=minbase bookworm "$WORK/rootfs" > "$WORK/logs/debootstrap" 2>&1 \
        || cannot "debootstrap fails: $(tail -n 1 "$WORK/logs/debootstrap")"
    tar -C "$WORK/rootfs" --exclude='./proc/*' --exclude='./sys/*' -c . | podman import --quiet - "$base" > /dev/null
    rm -rf "$WORK/rootfs"
    echo "made with debootstrap"
fi

say "packages of requirements/cpu.lock.txt"
if [ "${1:-}" != --no-build ] && ! cmp --quiet requirements/cpu.lock.txt "$WORK/wheels/lock"; then
    "$PYTHON" -m pip download --quiet --no-deps -d "$WORK/wheels" -r requirements/cpu.lock.txt 2> "$WORK/logs/pip" \
        || { tail -n 5 "$WORK/logs/pip" >&2; die "pip download failed"; }
    cp requirements/cpu.lock.txt "$WORK/wheels/lock"
fi

for target in node-cpu proxy; do
    if [ "${1:-}" = --no-build ] && podman image exists "localhost/lockstep-$target:$TAG"; then continue; fi
    say "image lockstep-$target"
    build -v "$WORK/wheels:/wheels:ro" --build-arg PIP_ARGS="--no-index --find-links /wheels" \
        -f deploy/images/Dockerfile --target "$target" -t "localhost/lockstep-$target:$TAG" .
done
podman images --format '{{.Repository}}:{{.Tag}} {{.Size}}' | grep lockstep-

say "inside: who it runs as, and what tools are left"
podman run --rm --entrypoint sh "localhost/lockstep-node-cpu:$TAG" -c 'id; touch /opt/lockstep/x 2>&1 | head -n 1
for tool in gcc g++ cc c++ make pip pip3 git curl; do command -v "$tool" && exit 1; done
python -c "import importlib.util, sys; sys.exit(importlib.util.find_spec(\"pip\") is not None)"; echo "no build tool"'

if [ -f deploy/prometheus/prometheus.yaml ]; then
    if ! have "$prometheus"; then
        say "no registry: Debian's Prometheus as $prometheus"
        printf '%s\n' "FROM $base" \
            'RUN apt-get update && apt-get install --yes --no-install-recommends prometheus && mkdir /prometheus' \
            'RUN chown prometheus /prometheus' 'USER prometheus' 'ENTRYPOINT ["/usr/bin/prometheus"]' \
            > "$WORK/prometheus.Dockerfile"
        build -f "$WORK/prometheus.Dockerfile" -t "$prometheus" "$WORK/logs"
    fi
    services="$services prometheus"
fi
if have "$grafana"; then services="$services grafana"; else echo "Grafana is left out: no registry"; fi

if [ "${1:-}" = --build-only ]; then exit 0; fi

# ---- the stack
cat > "$WORK/env" <<ENV
REGISTRY=localhost
TAG=$TAG
HTTP_PORT=$PORT
ADMIN_PORT=$((PORT + 1))
PROMETHEUS_PORT=$PROMETHEUS_PORT
GRPC_TOKEN=for-this-test-only
GRAFANA_ADMIN_PASSWORD=for-this-test-only
ENV
compose() { "$PODMAN_COMPOSE" --env-file "$WORK/env" -f deploy/compose/compose.yaml "$@"; }
down() {
    for service in $services; do podman logs "$(container "$service")" > "$WORK/logs/$service" 2>&1 || true; done
    compose down --volumes -t 5 > "$WORK/logs/down" 2>&1 || true
}
trap down EXIT

container() { podman ps --all --quiet --filter "label=com.docker.compose.service=$1" | head -n 1; }
healthy() {
    local service=$1 deadline=$((SECONDS + HEALTHY_S)) id
    until id=$(container "$service"); [ -n "$id" ] && podman healthcheck run "$id" > "$WORK/logs/health" 2>&1; do
        [ "$SECONDS" -lt "$deadline" ] || die "$service is not healthy after $HEALTHY_S s: $(cat "$WORK/logs/health")"
        sleep 2
    done
    echo "$service is healthy after $((SECONDS - started)) s"
}

say "up: $services"
started=$SECONDS
# shellcheck disable=SC2086
compose up -d --no-build $services > "$WORK/logs/up" 2>&1 || { tail -n 20 "$WORK/logs/up" >&2; die "compose up failed"; }
for service in prefill decode proxy; do healthy "$service"; done
podman ps --format '{{.Names}} {{.Status}} {{.Ports}}'

# ---- requests
url="http://127.0.0.1:$PORT/v1/completions"
stream() {  # TOKENS FILE: the events of one streamed answer, greedy, of exactly so many tokens
    curl --silent --show-error --no-buffer --max-time 300 "$url" -H 'Content-Type: application/json' -o "$2" -d "{
        \"model\": \"pico\", \"prompt\": \"$PROMPT\", \"max_tokens\": $1, \"temperature\": 0, \"ignore_eos\": true,
        \"stream\": true, \"stream_options\": {\"include_usage\": true}}"
}
complete() {  # TOKENS FILE: that a stream has ended as it should, with all its tokens
    grep -q "\"completion_tokens\":$1" "$2" || die "not $1 tokens: $(tail -c 400 "$2")"
    grep -q '"finish_reason":"length"' "$2" || die "no finish reason: $(tail -c 400 "$2")"
    [ "$(grep '^data: ' "$2" | tail -n 1 | tr -d '\r')" = 'data: [DONE]' ] || die "no end: $(tail -c 400 "$2")"
}
text() { "$PYTHON" -c 'import json, sys
for line in open(sys.argv[1]):
    if line.startswith("data: {"):
        for choice in json.loads(line[6:])["choices"]:
            sys.stdout.write(choice["text"])' "$1"; }

say "an answer through the published port"
stream "$TOKENS" "$WORK/whole"
complete "$TOKENS" "$WORK/whole"
echo "$(grep -c '^data: ' "$WORK/whole") events, $TOKENS tokens, finish_reason length, [DONE]"
text "$WORK/whole" | sed -n 1,4p

say "prefill killed in the middle of a stream"
rm -f "$WORK/broken"  # of the run before: its events would count
stream "$TOKENS" "$WORK/broken" &
streaming=$!
deadline=$((SECONDS + 60))
until [ "$(grep -c '^data: ' "$WORK/broken" 2> /dev/null)" -ge 20 ] 2> /dev/null; do
    [ "$SECONDS" -lt "$deadline" ] || die "no 20 events within 60 s"
    sleep 0.05
done
prefill=$(container prefill)
# Its first process, from outside: a crash, where `podman kill` would be somebody's wish and not be restarted.
kill -KILL "$(podman inspect --format '{{.State.Pid}}' "$prefill")"
echo "killed after $(grep -c '^data: ' "$WORK/broken") events"
wait "$streaming" || die "curl failed"
complete "$TOKENS" "$WORK/broken"
cmp <(text "$WORK/whole") <(text "$WORK/broken") || die "the text is another one than without the kill"
echo "the stream went on to its end: its KV cache was on decode; the same $TOKENS tokens as before"

say "a new request while no prefill node is there"
status=$(curl --silent --max-time 60 "$url" -H 'Content-Type: application/json' -o "$WORK/refused" \
    -w '%{http_code}' -d "{\"model\": \"pico\", \"prompt\": \"$PROMPT\", \"max_tokens\": 8}")
echo "$status: $(cat "$WORK/refused")"
[ "$status" = 503 ] || die "503 was expected"

say "prefill is started again (restart: unless-stopped)"
started=$SECONDS
deadline=$((SECONDS + HEALTHY_S))
healthy prefill
until curl --silent --fail --max-time 5 "http://127.0.0.1:$PORT/readyz" > /dev/null; do
    [ "$SECONDS" -lt "$deadline" ] || die "the proxy is not ready again"
    sleep 1
done
stream 64 "$WORK/again"
complete 64 "$WORK/again"
echo "64 tokens; decode and proxy ran on: $(podman ps --format '{{.Names}} {{.Status}}' | tr '\n' ';')"

case " $services " in *" prometheus "*)
    say "what Prometheus scrapes"
    deadline=$((SECONDS + 60))
    until up=$(curl --silent --max-time 5 --get "http://127.0.0.1:$PROMETHEUS_PORT/api/v1/query" \
            --data-urlencode 'query=sum by (job) (up{job=~"prefill|decode|proxy"})') \
            && [ "$(grep -o '"1"' <<< "$up" | wc -l)" -ge 3 ]; do
        [ "$SECONDS" -lt "$deadline" ] || die "not all three are up: $up"
        sleep 2
    done
    echo "$up" ;;
esac

say "the live page"
curl --silent --fail --max-time 5 "http://127.0.0.1:$((PORT + 1))/lockstep/" | grep -o '<title>.*</title>' \
    || die "the live page does not answer"

say "down"
trap - EXIT
down
left=$(podman ps --all --quiet | wc -l)
[ "$left" = 0 ] || die "$left containers are left"
echo "no container is left"
exit 0
}
