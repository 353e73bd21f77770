#!/bin/bash
# Train on 2 to 4 machines, on as many as live; go on after faults, preemption and time limits:
#
#     sbatch slurm-elastic.sh --solver solver.prototxt --gpu all --batch-mode global
#
# The arguments are those of caffepy train. Change the numbers here to yours; FEWEST and MOST are
# those of --nodes.
#SBATCH --nodes=2-4
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=08:00:00
#SBATCH --signal=USR1@60
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append

FEWEST=${FEWEST:-2}
MOST=${MOST:-4}
RESTARTS=${RESTARTS:-10} # after faults: in this job, and of this job with other machines
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # srun no longer takes it from sbatch

tell() {
    echo "$(date '+%F %T') $*" >&2
}

requeue() {
    tell "$*: the job is put into the queue again"
    scontrol requeue "$SLURM_JOB_ID"
    exit 75
}

# The machines of the job that run a command, at most MOST.
find_living() {
    local machine
    living=()
    for machine in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
        if timeout 60 srun --overlap --nodes=1 --ntasks=1 --nodelist="$machine" true; then
            living+=("$machine")
        else
            tell "$machine does not answer"
        fi
    done
    living=("${living[@]:0:MOST}")
}

for ((faults = 0; faults <= RESTARTS; faults++)); do
    find_living
    count=${#living[@]}
    if ((count < FEWEST)); then
        if ((${SLURM_RESTART_COUNT:-0} < RESTARTS)); then
            requeue "$count of $FEWEST machines are left"
        fi
        tell "$count of $FEWEST machines are left, after $SLURM_RESTART_COUNT restarts of the job"
        exit 1
    fi
    machines=$(IFS=,; echo "${living[*]}")
    tell "start on $machines"
    # An error of one process ends the others, which it tells. If a process is killed, they may wait
    # for it: SLURM ends them a minute later.
    srun --overlap --mpi=pmix --nodes="$count" --ntasks="$count" --nodelist="$machines" \
        --kill-on-bad-exit=0 --wait=60 \
        caffepy train "$@" --nodes "$FEWEST:$MOST" --snapshot auto
    code=$?
    case $code in
    0) exit 0 ;;
    75) requeue "stopped by a signal" ;;
    2 | 3 | 5 | 130) # usage, configuration, divergence, interrupted: it would end so again
        tell "ended with $code, which no restart mends"
        exit $code
        ;;
    esac
    tell "ended with $code"
done
tell "$RESTARTS restarts did not help"
exit "$code"
