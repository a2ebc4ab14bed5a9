#!/usr/bin/env bash
# Ray for real, on this one machine: a claim of four cells on a cluster of two nodes of one CPU each; the worker that
# supervises one of the cells is killed while it runs; held against the same claim run by the local pool. docs/clusters.md.
#
#   scripts/ray_check.sh            minutes (five on two busy cores)
#   scripts/ray_check.sh --keep     keep the temporary folder
#
# PYTHON names the interpreter (default: .venv/bin/python), STEPS the length of a cell (default: 600 steps).
# Exit code 0: every record is equal and the killed cell went on from its checkpoint; 1: not so; 2: cannot be tried here.
set -euo pipefail

# shellcheck source=scripts/slurm_check.sh
source "$(dirname "${BASH_SOURCE[0]}")/slurm_check.sh" # the claim, the comparison, and the end

check=ray_check
case "${1:-}" in
"") ;;
--keep) keep=yes ;;
*) refuse "unknown option $1; there is --keep" ;;
esac

before_end() { :; }

# Two nodes, apart from any other cluster of this machine; they end with the process that holds them (`ray stop` would
# end those of others too).
start_ray() {
    export RAY_USAGE_STATS_ENABLED=0
    # A token of its own: Ray would make one in the home folder, and from 2.61 on asks for one everywhere.
    "$python" -c 'import secrets; print(secrets.token_hex(32), end="")' >"$work/token"
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$work/token"
    "$python" - "$work" >"$work/cluster.log" 2>&1 <<'PYTHON' &
import signal
import sys
from pathlib import Path

from ray.cluster_utils import Cluster

work = Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
node = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
cluster = Cluster()
try:
    cluster.add_node(**node, include_dashboard=False, temp_dir=str(work / "ray.d"))
    cluster.add_node(**node)
    cluster.wait_for_nodes()
    (work / "address.part").write_text(cluster.address)
    (work / "address.part").rename(work / "address")
    signal.pause()
finally:
    cluster.shutdown()
PYTHON
    children+=($!)
    for _ in $(seq 300); do
        [ ! -e "$work/address" ] || return 0
        sleep 0.2
    done
    echo "Ray does not come up:"
    tail -n 20 "$work/cluster.log"
    return 1
}

prepare ray
start_ray
echo "Ray: $("$python" -c 'import ray; print(ray.__version__)'), 2 nodes of 1 CPU at $(cat "$work/address")"

start_claim ray launcher=ray launcher.address="$(cat "$work/address")"
cell="$(wait_for_cell ray "$run")"
if [ -z "$cell" ]; then
    echo "no cell was met while it ran; the run says:"
    tail -n 20 "$work/ray.log"
    exit 1
fi
pid="$(pid_of "$cell")"
worker="$(awk '/^PPid:/ {print $2}' "/proc/$pid/status")"
case "$(tr '\0' ' ' <"/proc/$worker/cmdline")" in
ray::*) ;;
*)
    echo "process $worker, the parent of cell $pid, is no worker of Ray: $(tr '\0' ' ' <"/proc/$worker/cmdline")"
    exit 1
    ;;
esac
kill -9 "$worker"
echo "killed worker $worker, of $(basename "$cell")"
for _ in $(seq 50); do
    kill -0 "$pid" 2>/dev/null || break
    sleep 0.1
done
code=0
if kill -0 "$pid" 2>/dev/null; then
    echo "cell $pid outlived its worker: FAILED"
    code=1
fi
end_claim ray || code=1
compare ray "$cell" || code=1
exit "$code"
