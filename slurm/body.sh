# shellcheck shell=bash disable=SC2154 # what is set above it
# What every job of the launcher does, below what is its own (`run`, `tasks_per_node`, `srun_options`, `command`, `watch`,
# `max_requeues`): one task on each node, in it the agent that starts the node's ranks; or one task a rank, and `watch`
# around srun looks after them. Ends with the run's exit code. A run that was stopped with a checkpoint (75) is queued
# again, in the same folder, up to `max_requeues` times.

# The first node of the job is where all meet, by the name that Slurm has for it. The port is the job's own.
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST") || exit
export LAUNCHER_RENDEZVOUS="${nodes%%$'\n'*}:$((20000 + SLURM_JOB_ID % 20000))"

step=
asked=
interrupted=
# shellcheck disable=SC2317,SC2329 # the traps call it
pass_on() {
  asked=$1
  interrupted=yes
  if [ -n "$step" ]; then kill -s "$1" "$step" 2>/dev/null; fi
}
trap 'pass_on USR1' USR1 # comes before the time limit (--signal)
trap 'pass_on TERM' TERM

echo "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)) on ${nodes//$'\n'/ }"
echo "each update is a line of $run/logs/rank_0.log"
unset SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE # which srun would take from how the job was queued
"${watch[@]}" srun --export=ALL --ntasks="$((SLURM_JOB_NUM_NODES * tasks_per_node))" \
  --ntasks-per-node="$tasks_per_node" "${srun_options[@]}" "${command[@]}" &
step=$!
while :; do
  interrupted=
  wait "$step"
  code=$?
  [ -n "$interrupted" ] || break # else it was the trap that ended the wait
done

if [ "$code" -eq 75 ] || { [ -n "$asked" ] && [ "$code" -gt 128 ]; }; then
  if [ "${SLURM_RESTART_COUNT:-0}" -ge "$max_requeues" ]; then
    echo "job $SLURM_JOB_ID was stopped, and has been queued again $max_requeues times: it isn't once more"
  elif [[ $(scontrol --oneliner show job "$SLURM_JOB_ID") != *" JobState=RUNNING "* ]]; then
    echo "job $SLURM_JOB_ID was cancelled"
  elif grep -qs '"reason": "targets.device_hours=' "$run/status.json"; then
    echo "job $SLURM_JOB_ID has used its device-hours up: it isn't queued again"
  elif scontrol requeue "$SLURM_JOB_ID"; then
    echo "job $SLURM_JOB_ID was stopped, and is queued again"
    sleep 600 # until Slurm ends this start
  fi
fi
exit "$code"
