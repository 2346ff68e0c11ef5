#!/usr/bin/env bash
# Runs one transfer study on several TPU VMs: each trains its share of the grid, then this machine judges.
#
#   ZONE=us-central2-b scripts/transfer_on_tpu_hosts.sh OUT HOST... -- OPTION...
#   ZONE=us-central2-b scripts/transfer_on_tpu_hosts.sh runs/transfer vm-0 vm-1 -- \
#       --config configs/transfer.yaml --trainer.accelerator=tpu
#
# OUT is a folder of this machine. Every HOST is the name of a TPU VM in $ZONE that has the package installed and the
# repository's configs in its home folder. A host that is preempted or fails is no loss: the same command goes on with
# the points that are left, on whichever hosts are given then. Not for --search, whose stages follow on one another.
set -euo pipefail

usage() {
    sed -n '2,11p' "$0" >&2
    exit 2
}

[ $# -ge 2 ] && [ -n "${ZONE:-}" ] || usage
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

on() { gcloud compute tpus tpu-vm ssh "$1" --zone "$ZONE" --command "$2"; }

# its exit code is 1 where points failed or are missing, 0 where only other shards' are
train_shard() {
    local host=$1 shard=$2 status=0
    # what is done already goes there first, so that a repeated command trains only what is left
    tar -C "$out" -cz points | on "$host" "mkdir -p transfer && tar -C transfer -xz" || return 1
    on "$host" "mutransformer transfer $options --out transfer --shard $shard" </dev/null || status=1
    on "$host" "tar -C transfer -cz points" </dev/null | tar -C "$out" -xz || status=1
    return $status
}

mkdir -p "$out/points"
jobs=()
for i in "${!hosts[@]}"; do
    train_shard "${hosts[$i]}" "$((i + 1))/${#hosts[@]}" &
    jobs+=($!)
done
failed=()
for i in "${!jobs[@]}"; do wait "${jobs[$i]}" || failed+=("${hosts[$i]}"); done
if [ ${#failed[@]} -gt 0 ]; then
    echo "did not finish: ${failed[*]}; what they have done is in $out, and the same command goes on" >&2
    exit 1
fi
exec mutransformer transfer "$@" --out "$out"
