#!/usr/bin/env bash
# Runs one transfer study on several TPU VMs: each trains its share of the grid, then this machine judges.
#
#   ZONE=us-central2-b scripts/transfer_on_tpu_hosts.sh OUT HOST... [-- OPTION...]
#   ZONE=us-central2-b scripts/transfer_on_tpu_hosts.sh runs/transfer vm-0 vm-1 -- --config configs/transfer.yaml
#
# OUT is a folder of this machine. Every HOST is the name of a TPU VM in $ZONE that has the package installed and the
# repository's configs in its home folder. A host that is preempted or fails is no loss: the same command goes on with
# the points that are left, on whichever hosts are given then.
set -euo pipefail

usage() {
    sed -n '2,9p' "$0" >&2
    exit 2
}

[ $# -ge 2 ] || usage
out=$1
shift
hosts=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    hosts+=("$1")
    shift
done
[ ${#hosts[@]} -ge 1 ] || usage
[ "${1:-}" != -- ] || shift
options=$(printf '%q ' "$@")

ssh() { gcloud compute tpus tpu-vm ssh "$1" --zone "${ZONE:?set ZONE to the zone of the TPU VMs}" --command "$2"; }

mkdir -p "$out/points"
n=${#hosts[@]}
jobs=()
for i in "${!hosts[@]}"; do
    (
        host=${hosts[$i]}
        # what is done already goes there first, so that a repeated command trains only what is left
        tar -C "$out" -cz points | gcloud compute tpus tpu-vm ssh "$host" --zone "$ZONE" \
            --command "mkdir -p transfer && tar -C transfer -xz"
        ssh "$host" "mutransformer transfer $options --out transfer --shard $((i + 1))/$n" || echo "$host failed" >&2
        ssh "$host" "tar -C transfer -cz points" | tar -C "$out" -xz
    ) &
    jobs+=($!)
done
for job in "${jobs[@]}"; do wait "$job" || true; done

exec mutransformer transfer "$@" --out "$out"
