#!/usr/bin/env bash
# A TPU VM or a whole pod slice, from your own machine: create it, install the package, start one run on all its hosts.
#
#   scripts/tpu.sh create             ask for the TPU and wait until it is there; SPOT=1 for one that may be preempted
#   scripts/tpu.sh install            this checkout, with the tpu and gcs extras, on every host; repeat after changes
#   scripts/tpu.sh devices            how many devices each host sees; one number for all is what you want
#   scripts/tpu.sh run ARG...         `mutransformer ARG...` on every host, in this terminal
#   scripts/tpu.sh tmux ARG...        the same in tmux, for you to attach to
#   scripts/tpu.sh service ARG...     the same as a systemd service: starts again after a failure and at every boot
#   scripts/tpu.sh status             what each host is at: running, stopped, exit CODE (both of the service), none
#   scripts/tpu.sh log [-f]           the end of the log of one host (WORKER, 0); more options are tail's
#   scripts/tpu.sh stop               ends the run on every host; it saves its state first
#   scripts/tpu.sh delete             gives the TPU back, and all that lies on its disks
#   scripts/tpu.sh spot ARG...        create, install, service; again after every preemption, until the run is done
#
#   export TPU_NAME=mu ZONE=us-central2-b ACCELERATOR_TYPE=v4-8
#   scripts/tpu.sh create && scripts/tpu.sh install && scripts/tpu.sh devices
#   scripts/tpu.sh run fit --config configs/small.yaml --config configs/tpu.yaml
#   scripts/tpu.sh spot fit --config configs/small.yaml --config configs/tpu.yaml \
#       --checkpoint.dirpath=gs://my-bucket/mu --data.cache=gs://my-bucket/caches --resume auto
#
# Variables: TPU_NAME, ZONE; to create also ACCELERATOR_TYPE. Optional: RUNTIME_VERSION (image, else by the type),
# CREATE_FLAGS, SSH_FLAGS (more for gcloud, as --internal-ip), RUN_ENV ("NAME=VALUE ..." for the run; no secrets),
# PIP_OPTIONS, PYTHON (of the hosts, python3), WORKER, POLL_SECONDS (60). DRY_RUN=1 prints what would be run.
set -euo pipefail

# Sources of what is said of gcloud here:
#   cloud.google.com/sdk/gcloud/reference/compute/tpus: queued-resources create, list, delete; tpu-vm ssh, scp
#   cloud.google.com/tpu/docs/runtimes (images), /queued-resources (states), /spot (a preempted TPU is made anew)

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
service=/etc/systemd/system/mutransformer.service

usage() {
    sed -n '2,${/^#/!q;p}' "$0" >&2
    exit 2
}

# A mistake of the user's, or with code=1 a failure.
die() {
    echo "tpu.sh: $*" >&2
    exit "${code:-2}"
}

need() { [ -n "${!1:-}" ] || die "$1 is not set: $2"; }

cloud() {
    if [ -n "${DRY_RUN:-}" ]; then
        printf '%q ' gcloud "$@"
        echo
    else
        gcloud "$@"
    fi
}

# The image for PyTorch, by the type of TPU.
runtime_version() {
    case ${RUNTIME_VERSION:-$ACCELERATOR_TYPE} in
    "${RUNTIME_VERSION:-}") echo "$RUNTIME_VERSION" ;;
    v6e-*) echo v2-alpha-tpuv6e ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v[234]-*) echo tpu-ubuntu2204-base ;;
    *) die "no image is known for ACCELERATOR_TYPE $ACCELERATOR_TYPE: set RUNTIME_VERSION" ;;
    esac
}

# ---- the TPU: a queued resource with one node, both of the same name

request() {
    local version
    need ACCELERATOR_TYPE "the kind and size of TPU, as in ACCELERATOR_TYPE=v4-8"
    version=$(runtime_version) || exit
    # shellcheck disable=SC2086  # several flags in one variable
    cloud compute tpus queued-resources create "$TPU_NAME" --node-id "$TPU_NAME" --zone "$ZONE" \
        --accelerator-type "$ACCELERATOR_TYPE" --runtime-version "$version" ${SPOT:+--spot} ${CREATE_FLAGS:-} --quiet
}

# Empty where there is none. A list, as to describe one that is not there is an error like any other.
tpu_state() {
    local state
    state=$(cloud compute tpus queued-resources list --zone "$ZONE" --filter "name~/$TPU_NAME\$" \
        --format "value(state.state)") || return
    # the request may be active a while longer than its node
    if [ "$state" = ACTIVE ]; then
        case $(cloud compute tpus tpu-vm describe "$TPU_NAME" --zone "$ZONE" --format "value(state)") in
        PREEMPTED | TERMINATED) state=SUSPENDED ;;
        esac
    fi
    echo "$state"
}

delete() { cloud compute tpus queued-resources delete "$TPU_NAME" --zone "$ZONE" --force --quiet; }

create() {
    local state=
    [ -n "${DRY_RUN:-}" ] || state=$(tpu_state)
    [ -n "$state" ] || request
    while [ -z "${DRY_RUN:-}" ]; do
        state=$(tpu_state) || state="unknown, gcloud failed"
        echo "$TPU_NAME: ${state:-no such request}"
        case $state in
        ACTIVE) break ;;
        FAILED | SUSPENDED | '') code=1 die "this request will get no TPU: scripts/tpu.sh delete, then create again" ;;
        esac
        sleep "${POLL_SECONDS:-60}"
    done
}

# ---- its hosts

# on WORKER COMMAND: by ssh. Its exit code is that of the command, of a host that failed if there are several.
on() {
    # shellcheck disable=SC2086
    cloud compute tpus tpu-vm ssh "$TPU_NAME" --zone "$ZONE" --worker "$1" ${SSH_FLAGS:-} --quiet --command "$2"
}

# All that lies on a host is in ~/mutransformer.
on_host_install=$(
    cat <<'HOST'
set -eu
mkdir -p mutransformer && cd mutransformer
rm -rf mutransformer configs && tar -xzf ../mutransformer.tar.gz
"$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' || {
    echo "$("$python" --version): libtpu needs 3.10 to 3.12, name one of this host by PYTHON" >&2; exit 1; }
"$python" -m venv .venv 2>/dev/null || {  # on Ubuntu in a package of its own; at first boot apt may be busy
    sudo apt-get -qo DPkg::Lock::Timeout=600 update && sudo apt-get -qyo DPkg::Lock::Timeout=600 install python3-venv
    "$python" -m venv --clear .venv; }
.venv/bin/python -m pip install -q $pip_options -e ".[tpu,gcs]"
HOST
)

install() {
    local folder
    folder=$(mktemp -d)
    # shellcheck disable=SC2064  # as it is now
    trap "rm -rf '$folder'" EXIT
    tar -C "$root" --exclude=__pycache__ -czf "$folder/mutransformer.tar.gz" \
        pyproject.toml README.md LICENSE mutransformer configs
    # shellcheck disable=SC2086
    cloud compute tpus tpu-vm scp "$folder/mutransformer.tar.gz" "$TPU_NAME:" --zone "$ZONE" --worker all \
        ${SSH_FLAGS:-} --quiet
    on all "$(printf 'python=%q pip_options=%q\n' "${PYTHON:-python3}" "${PIP_OPTIONS:-}")
$on_host_install"
}

environment() { printf '%q ' PJRT_DEVICE=TPU PYTHONUNBUFFERED=1 ${RUN_ENV:+$RUN_ENV}; }

devices() {
    on all "cd mutransformer && env $(environment) .venv/bin/python -c \
'from mutransformer.xla import runtime; print(runtime.start(), \"devices\")'"
}

# run.sh of every host: what run, tmux and service start. While it runs it holds a lock, as a TPU is one process's.
write_run() {
    local script
    [ $# -ge 1 ] || die "no command: say what mutransformer shall do, as in: run fit --config configs/small.yaml"
    script="cd ~/mutransformer
exec 9>run.lock
flock -n 9 || { echo 'a run is under way on this host: scripts/tpu.sh stop' >&2; exit 2; }
exec env $(environment) .venv/bin/mutransformer $(printf '%q ' "$@")"
    # the log too is the user's, whoever opens it first
    printf "umask 077; cd mutransformer && echo %q >run.sh && : >>run.log" "$script"
}

run() {
    local write
    write=$(write_run "$@")
    on all "$write && bash run.sh"
}

in_tmux() {
    local write
    write=$(write_run "$@")
    # tee goes on after Ctrl-C, until the run has saved
    on all "$write && tmux new-session -d -s mutransformer 'bash run.sh 2>&1 | tee -ai run.log'"
}

# Restarts no run that ended by its own mistake (2) or was stopped (130, 143: with its state saved).
on_host_service=$(
    cat <<'HOST'
cat >mutransformer.service <<UNIT
[Unit]
Description=mutransformer
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=3600
StartLimitBurst=5

[Service]
User=$(id -un)
WorkingDirectory=$PWD
ExecStart=/bin/bash $PWD/run.sh
StandardOutput=append:$PWD/run.log
StandardError=inherit
KillMode=mixed
TimeoutStopSec=600
SuccessExitStatus=130 143
RestartPreventExitStatus=2
Restart=on-failure
RestartSec=30

[Install]
WantedBy=multi-user.target
UNIT
sudo install -m 644 mutransformer.service "$service" && sudo systemctl daemon-reload &&
    sudo systemctl -q enable mutransformer && sudo systemctl restart mutransformer
HOST
)

as_service() {
    local write
    write=$(write_run "$@")
    on all "$write && service=$service && $on_host_service"
}

on_host_status=$(
    cat <<'HOST'
show() { systemctl show mutransformer -p "$1" --value; }
if ! cd mutransformer 2>/dev/null || [ ! -e run.sh ]; then
    echo none
elif ! flock -n run.lock true; then
    echo running
else
    case $(show ActiveState) in
    active | activating | deactivating | reloading) echo running ;;
    *)
        if [ "$(show ExecMainExitTimestampMonotonic)" = 0 ]; then
            echo none
        else
            case $(show ExecMainStatus) in 130 | 143) echo stopped ;; *) echo "exit $(show ExecMainStatus)" ;; esac
        fi
        ;;
    esac
fi
HOST
)

status() { on all "$on_host_status"; }

log() {
    [ $# -ge 1 ] || set -- -n 50
    on "${WORKER:-0}" "tail $(printf '%q ' "$@") mutransformer/run.log"
}

stop() {
    on all "cd mutransformer || exit 1
sudo systemctl -q disable mutransformer 2>/dev/null; sudo systemctl stop mutransformer 2>/dev/null
tmux send-keys -t mutransformer C-c 2>/dev/null
flock -w 600 run.lock true || { echo 'still running after ten minutes' >&2; exit 1; }"
}

# ---- a run that outlives its TPUs

# What the hosts are at, together: a failure of one counts for all, and so does one that has not begun.
run_state() {
    local states state
    states=$(status | sort -u) || return
    for state in 'exit [^0].*' none stopped running 'exit 0'; do
        if grep -xm 1 "$state" <<<"$states"; then return; fi
    done
    return 1
}

spot() {
    local tpu before=none made=
    case " $* " in
    *" --resume "* | *" --resume="*) ;;
    *) die "without --resume auto each preemption would start the run anew: add it" ;;
    esac
    export SPOT=1
    if [ -n "${DRY_RUN:-}" ]; then
        request && install && as_service "$@" && delete
        return
    fi
    while true; do
        tpu=$(tpu_state) || tpu="unknown, gcloud failed"
        [ "$tpu" != ACTIVE ] || tpu="ACTIVE, $(run_state || echo "hosts do not answer")"
        [ "$tpu" = "$before" ] || echo "$(date '+%F %T') $TPU_NAME: ${tpu:-to be created}"
        before=$tpu
        case $tpu in
        '')
            # a first request that is refused is a mistake, a later one may go through in a while
            if request; then made=1; else [ -n "$made" ] || code=1 die "there is no TPU to wait for"; fi
            ;;
        SUSPENDED | FAILED) delete || true ;;
        "ACTIVE, none")
            # in shells of their own, where the first failure ends each
            { "$0" install && "$0" service "$@"; } || echo "not all hosts are set up; once more in a while" >&2
            ;;
        "ACTIVE, exit 0")
            delete
            return
            ;;
        "ACTIVE, exit"*)
            WORKER=all log -n 20 || true
            delete
            code=1 die "the run failed, with ${tpu#ACTIVE, }; the end of its logs is above, and the TPU is given back"
            ;;
        esac
        sleep "${POLL_SECONDS:-60}"
    done
}

[ $# -ge 1 ] || usage
command=$1
shift
case $command in
create | install | devices | run | status | log | stop | delete | spot) ;;
tmux) command=in_tmux ;;
service) command=as_service ;;
*) usage ;;
esac
need TPU_NAME "the name of the TPU, yours to choose"
need ZONE "the zone of the TPU, as in ZONE=us-central2-b"
[ -n "${DRY_RUN:-}" ] || command -v gcloud >/dev/null || die "gcloud not found: install the Google Cloud CLI"
"$command" "$@"
