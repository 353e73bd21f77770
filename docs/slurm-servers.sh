#!/bin/bash
# Train by a parameter server on the machines of a job; go on after preemption and time limits:
#
#     sbatch slurm-servers.sh --solver solver.prototxt --gpu all --consistency ssp:4 --every 25
#
# The arguments are those of caffepy train. Change the numbers here to yours; FEWEST is the number
# of workers to begin with.
#SBATCH --nodes=2-3
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=08:00:00
#SBATCH --signal=B:USR1@60
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append

FEWEST=${FEWEST:-2}
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' ')
export RAY_AUTH_TOKEN
export RAY_USAGE_STATS_ENABLED=0
export RAY_health_check_period_ms=1000 RAY_health_check_failure_threshold=3
export RAY_grpc_client_keepalive_time_ms=1000 RAY_grpc_client_keepalive_timeout_ms=2000
export RAY_free_objects_period_milliseconds=0 RAY_worker_niceness=0
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # srun no longer takes it from sbatch

# This script runs on the first machine of the job. Ray and the run begin here, so that signals to
# the script reach the run alone, and not Ray's processes.
mapfile -t machines < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
cluster=${ADDRESS:-$(hostname -I | cut -d " " -f 1)}:$((20000 + SLURM_JOB_ID % 10000))
cpus=(--num-cpus="$SRUN_CPUS_PER_TASK")
ray start --head --node-ip-address="${cluster%:*}" --port="${cluster#*:}" \
    --include-dashboard=false "${cpus[@]}" || exit 1
rm -f "ray-$SLURM_JOB_ID"-*.log # of the job before it was requeued
# shellcheck disable=SC2016 # these are the other machine's
join='ray start --address=$0 "$@" --block
    ray health-check --address=$0 || scontrol requeue "$SLURM_JOB_ID" # the first machine is dead'
for machine in "${machines[@]:1}"; do
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$machine" \
        bash -c "$join" "$cluster" "${cpus[@]}" > "ray-$SLURM_JOB_ID-$machine.log" 2>&1 &
done
for ((waited = 0; waited < 60; waited += 2)); do # for machines that take long, not for dead ones
    ready=$(cat "ray-$SLURM_JOB_ID"-*.log 2> /dev/null | grep -c "Ray runtime started")
    ((ready >= ${#machines[@]} - 1)) && break
    sleep 2
done

caffepy train "$@" --cluster "$cluster" --nodes "$FEWEST:${#machines[@]}" --snapshot auto &
run=$!
again=
trap 'again=yes; kill -USR1 $run' USR1 # before the time limit
trap 'kill -USR1 $run' TERM # scancel ends the job; at preemption SLURM itself queues it again
while kill -0 $run 2> /dev/null; do # a signal ends a wait, not the run
    wait $run
done
wait $run
code=$?
if [[ $again && $code = 75 ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
