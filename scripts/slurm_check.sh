#!/usr/bin/env bash
# Slurm for real, on this one machine: a claim of four cells as Slurm jobs, one of them requeued while it runs, held
# against the same claim run by the local pool. docs/clusters.md.
#
#   scripts/slurm_check.sh            minutes (five on two busy cores); as root: it starts daemons, and installs what is absent
#   scripts/slurm_check.sh --keep     keep the temporary folder
#
# PYTHON names the interpreter (default: .venv/bin/python), STEPS the length of a cell (default: 600 steps).
# Exit code 0: every record is equal and the requeued cell went on from its checkpoint; 1: not so; 2: cannot be tried here.
#
# scripts/ray_check.sh sources this file for its claim and its comparison.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-$root/.venv/bin/python}"
steps="${STEPS:-600}"
keep=no
work=""
children=() # of this script, in the order in which they were started

refuse() {
    echo "$check: $*" >&2
    exit 2
}

# prepare PACKAGE: a temporary folder with the claim in it, and the records of a local run to compare with.
prepare() {
    [ -x "$python" ] || refuse "no interpreter $python; set PYTHON"
    "$python" -c "import $1" 2>/dev/null || refuse "$python has no $1; install the project with its extras"
    work="$(mktemp -d "${TMPDIR:-/tmp}/$check.XXXXXX")"
    trap 'finish $?' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1
    export CLOZELAB_CACHE="$work/cache" # what the run leaves behind lies in the folder too
    write_claim
    echo "local run: 2 arms x 2 seeds of $steps steps"
    start_claim local launcher=local launcher.slots=2
    end_claim local
}

# Threads are given, so that sums of floats are those of any launcher; checkpoints are many, so that a cell that is
# taken away has one to go on from.
write_claim() {
    mkdir -p "$work/cluster-check"
    cat >"$work/cluster-check/claim.yaml" <<YAML
id: cluster-check
title: Two learning rates
says: A learning rate of nothing learns nothing.
sources: [{paper: none, arxiv: "0000.00000", year: 2026, where: a check of launchers}]
arms:
  still: {overrides: [optimizer.lr=1e-12]}
  moving: {overrides: [optimizer.lr=5e-3]}
control: still
varies: [optimizer.lr]
matched: {steps: 0.0}
predictions:
  - {id: learns, says: The moving arm has the lower loss., metric: heldout_mlm.loss, relation: moving < still,
     basis: arithmetic}
seeds: [0, 1]
scales:
  smoke:
    seeds: 2
    says: a minute
    expected_time: a minute
    overrides:
      - corpus.train_documents=4
      - tokenizer.vocab_size=1000
      - format.max_length=48
      - model=bert_tiny
      - model.hidden=32
      - model.layers=1
      - model.ffn=64
      - model.position.length=48
      - batch_size=8
      - budget=steps
      - budget.steps=$steps
      - trainer.precision=fp32
      - trainer.threads=1
      - trainer.log_every=50
      - trainer.checkpoint_every=50
      - evaluation.heldout_mlm.examples=64
      - evaluation.sentence_pairs.examples=64
      - evaluation.sentence_pairs.probe_examples=64
      - tracker=none
YAML
}

# start_claim NAME OVERRIDE...: run the claim into $work/NAME, its output into $work/NAME.log; its process is $run.
start_claim() {
    local name="$1"
    shift
    (cd "$work" && exec "$python" -m clozelab.cli run cluster-check/claim.yaml --scale smoke --runs-dir "$name" "$@") \
        >"$work/$name.log" 2>&1 &
    run=$!
    children+=("$run")
}

# end_claim NAME: wait for that run; if it failed, show its last lines.
end_claim() {
    local code=0
    wait "$run" || code=$?
    [ "$code" -eq 0 ] || {
        echo "the run ended with code $code:"
        tail -n 20 "$work/$1.log"
    }
    return "$code"
}

# running_cell NAME: the directory of a cell that trains and has kept a checkpoint; nothing if there is none.
running_cell() {
    local directory
    for directory in "$work/$1"/cluster-check/smoke/*/; do
        if [ -e "$directory/checkpoints/last.ckpt" ] && [ ! -e "$directory/record.json" ] &&
            [ ! -e "$directory/failure.json" ] && pid_of "$directory" >/dev/null; then
            echo "${directory%/}"
            return
        fi
    done
}

# pid_of DIRECTORY: the process of a cell; fails if it has ended.
pid_of() {
    local pid
    pid="$("$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["pid"])' "$1/running.json" 2>/dev/null)" &&
        kill -0 "$pid" 2>/dev/null && echo "$pid"
}

# wait_for_cell NAME PID: as running_cell, for as long as the run lasts.
wait_for_cell() {
    local found=""
    while [ -z "$found" ] && kill -0 "$2" 2>/dev/null; do
        sleep 0.2
        found="$(running_cell "$1")"
    done
    echo "$found"
}

# compare NAME DIRECTORY: hold the records of $work/NAME against those of the local run, a line a cell; the cell of
# DIRECTORY was interrupted.
compare() {
    "$python" - "$work/local" "$work/$1" "$2" <<'PYTHON'
import json
import sys
from pathlib import Path

here, there, interrupted = map(Path, sys.argv[1:])


def records(runs: Path) -> dict[tuple[str, int], tuple[Path, dict]]:
    found = [(path.parent, json.loads(path.read_text())) for path in runs.glob("cluster-check/smoke/*/record.json")]
    return {(record["arm"], record["seed"]): (directory, record) for directory, record in found}


def result(record: dict) -> dict:
    kept = {key: record[key] for key in ("cell", "status", "config", "parameters", "metrics", "scores")}
    kept["config"] = {**kept["config"], "runs_dir": None}
    kept["budgets"] = {key: value for key, value in record["budgets"].items() if key != "seconds"}
    return kept


expected, found = records(here), records(there)
failed = expected.keys() != found.keys() or len(expected) != 4
for key in sorted(expected.keys() | found.keys()):
    name = f"{key[0]:>6} seed {key[1]}"
    if key not in expected or key not in found:
        print(f"{name}: no record {'there' if key in expected else 'of the local run'}: FAILED")
        continue
    directory, record = found[key]
    one, two = result(expected[key][1]), result(record)
    wrong = [f"{part} differs" for part in one if one[part] != two[part]]
    resumed = record["provenance"].get("resumed_at_step", 0)
    if directory == interrupted and not resumed > 0:
        wrong.append("was interrupted and started from nothing")
    said = f"loss {record['metrics']['heldout_mlm.loss']['value']:.6f} after {record['budgets']['steps']:g} steps"
    if resumed:
        said += f", went on from step {resumed}"
    print(f"{name}: {said}: {'FAILED: ' + ', '.join(wrong) if wrong else 'OK'}")
    failed |= bool(wrong)
if interrupted not in [directory for directory, _ in found.values()]:
    print(f"{interrupted.name} was interrupted and has no record")
    failed = True
sys.exit(1 if failed else 0)
PYTHON
}

# finish CODE: end what this script started, by number, newest first; runs at its exit, whatever the cause.
finish() {
    local code="$1" index pid
    trap - EXIT
    before_end
    for ((index = ${#children[@]} - 1; index >= 0; index--)); do
        pid="${children[index]}"
        kill "$pid" 2>/dev/null || continue
        for _ in $(seq 100); do
            kill -0 "$pid" 2>/dev/null || break
            sleep 0.1
        done
        kill -9 "$pid" 2>/dev/null || true
        wait "$pid" 2>/dev/null || true
    done
    if [ "$code" -eq 0 ] && [ "$keep" = no ]; then
        rm -rf "$work"
    else
        echo "left: $work"
    fi
    [ "$code" -eq 0 ] && echo "$check: OK" || echo "$check: FAILED"
    exit "$code"
}

# Sourced: the rest is Slurm's.
[ "${BASH_SOURCE[0]}" = "$0" ] || return 0

check=slurm_check
case "${1:-}" in
"") ;;
--keep) keep=yes ;;
*) refuse "unknown option $1; there is --keep" ;;
esac

before_end() {
    # Only ever on the cluster of this script: there all jobs are its own.
    [ "${SLURM_CONF:-}" = "$work/slurm.conf" ] || return 0
    timeout 20 scancel --user="$(id -un)" 2>/dev/null || true
    for _ in $(seq 150); do
        [ -n "$(timeout 20 squeue --noheader 2>/dev/null || true)" ] || break
        sleep 0.1
    done
}

[ "$(id -u)" -eq 0 ] || refuse "needs root: it starts munged, slurmctld and slurmd, and installs them where they are absent"
if ! command -v slurmctld >/dev/null || ! command -v slurmd >/dev/null || ! command -v munged >/dev/null; then
    command -v apt-get >/dev/null || refuse "no Slurm here and no apt-get; install slurmctld, slurmd, sbatch and munge"
    echo "installing slurm-wlm and munge"
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends slurm-wlm munge; } \
        >"${TMPDIR:-/tmp}/slurm_check.apt.log" 2>&1 ||
        refuse "apt-get failed: ${TMPDIR:-/tmp}/slurm_check.apt.log"
fi

# A cluster of one node, apart from any other on this machine: ports, socket, key and state of its own.
# KillWait is short so that a requeue does not take the default 30 seconds.
start_slurm() {
    local host ports memory cpus
    host="$(hostname -s)"
    cpus="$(nproc --all)"
    memory="$(awk '/^MemTotal/ {print int($2 / 2048)}' /proc/meminfo)"
    read -r -a ports < <("$python" -c '
import socket
held = [socket.socket() for _ in range(2)]
for one in held:
    one.bind(("127.0.0.1", 0))
print(*(one.getsockname()[1] for one in held))')
    mkdir -p "$work/munge" "$work/slurmctld" "$work/slurmd"
    chmod 755 "$work" "$work/munge"
    dd if=/dev/urandom of="$work/munge/key" bs=128 count=1 status=none
    chmod 600 "$work/munge/key"
    chown -R munge "$work/munge"
    # munged is started by its own user, and setpriv (unlike runuser) becomes it: the number is the daemon's.
    setpriv --reuid=munge --regid="$(id -g munge)" --clear-groups munged --foreground \
        --socket="$work/munge/socket" --key-file="$work/munge/key" --pid-file="$work/munge/pid" \
        --log-file="$work/munge/log" --seed-file="$work/munge/seed" >"$work/munged.log" 2>&1 &
    children+=($!)
    for _ in $(seq 50); do
        [ ! -S "$work/munge/socket" ] || break
        sleep 0.1
    done
    cat >"$work/slurm.conf" <<CONF
ClusterName=check
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=${ports[0]}
SlurmdPort=${ports[1]}
AuthType=auth/munge
AuthInfo=socket=$work/munge/socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmUser=root
SlurmdParameters=config_overrides
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd.pid
StateSaveLocation=$work/slurmctld
SlurmdSpoolDir=$work/slurmd
MpiDefault=none
JobRequeue=1
KillWait=10
NodeName=$host NodeAddr=127.0.0.1 CPUs=$cpus RealMemory=$memory State=UNKNOWN
PartitionName=main Nodes=$host Default=YES MaxTime=INFINITE State=UP
CONF
    export SLURM_CONF="$work/slurm.conf"
    slurmctld -D -f "$SLURM_CONF" >"$work/slurmctld.log" 2>&1 &
    children+=($!)
    slurmd -D -f "$SLURM_CONF" >"$work/slurmd.log" 2>&1 &
    children+=($!)
    for _ in $(seq 150); do
        [ "$(sinfo --noheader --format=%T 2>/dev/null)" != idle ] || return 0
        sleep 0.2
    done
    echo "Slurm does not come up; the last lines of its daemons:"
    tail -n 5 "$work/munged.log" "$work/slurmctld.log" "$work/slurmd.log"
    return 1
}

prepare submitit
start_slurm
echo "Slurm: $(sinfo --version | cut -d' ' -f2), node $(sinfo --noheader --format='%N %T %c CPUs')"

start_claim slurm launcher=submitit launcher.cluster=slurm launcher.partition=main
cell="$(wait_for_cell slurm "$run")"
if [ -z "$cell" ]; then
    echo "no cell was met while it ran; the run says:"
    tail -n 20 "$work/slurm.log"
    exit 1
fi
# Its process knows which job of Slurm it belongs to.
job="$(tr '\0' '\n' <"/proc/$(pid_of "$cell")/environ" | sed -n 's/^SLURM_JOB_ID=//p')"
scontrol requeue "$job"
echo "requeued job $job, of $(basename "$cell")"
# Slurm lets a requeued job rest for about two minutes; it may start at once here.
while kill -0 "$run" 2>/dev/null; do
    if [ "$(squeue --noheader --jobs="$job" --format=%T 2>/dev/null)" = PENDING ]; then
        scontrol update jobid="$job" starttime=now && break
    fi
    sleep 0.5
done
code=0
end_claim slurm || code=1
compare slurm "$cell" || code=1
exit "$code"
