#!/usr/bin/env bash
# Run jformer.main on a Cloud TPU slice, on hosts with GPUs, a Slurm cluster, or as several processes of this machine. It
# prints its commands after a +; docs/tpu.md explains them, and says what was never run on real hardware.
set -euo pipefail

usage() {
  cat <<'END'
launch.sh COMMAND [OPTIONS] [-- ARGUMENTS OF jformer.main]

A TPU slice, or hosts with GPUs. All of these only print what they would do, unless given --yes:
  create           request the slice (a queued resource) and wait until it is active
  sync             copy the code of a commit to its workers and install it
  run -- ARGS      start the same command on all workers, under a supervisor that outlives this connection
  status, logs     the state of the slice and its supervisors; the end of a log (--worker=K or all, --follow)
  stop             ask the run to save and end
  delete           delete the slice, if there is one
  all -- ARGS      create, sync, run, watch, delete (unless --keep). Ctrl-C ends only the watching: the slice keeps
                   running, and costs money, until `delete`
                   Exit code 75 (also of create, sync and run): the slice did not become active, was taken away or
                   does not answer. `all` has deleted it; rerun the same command to resume on a new one, which
                   docs/skypilot.yaml does by itself
  --name=NAME --type=TYPE --zone=ZONE --project=PROJECT
                   the slice, such as v5litepod-16; or JFORMER_NAME, _TYPE, _ZONE, _PROJECT in the environment
  --spot           cheaper, and may be taken away
  --hosts=A,B,…    in place of a slice: machines that ssh reaches without a password, and that see the same --workdir.
                   Each gets a folder jformer-hosts/NAME in its home. `all` resumes the run on hosts that rebooted
  --coordinator=HOST:PORT  of the first host, as the others reach it (default: its name, port 8476)
  --extras=E,…     of pyproject.toml, to install (default: tpu,gcs, or cuda,gcs on hosts)
  --commit=REV     what to copy (default: HEAD, if there are no uncommitted changes)
  --setup=SHELL    command that each worker runs after installation, for example to fetch data

Other machines:
  local N -- ARGS  N processes here; all restart when one fails. Ctrl-C saves and ends all, a second one kills them
  --devices=D      a process gets D virtual CPU devices
  --logs=DIR       a log for each process (default: WORKDIR/logs); that of process 0 is also shown
  slurm -- ARGS    submit a job, a process on each node (--nodes=N --gpus=G, --sbatch=OPTION as often as needed)

  --per=gpu        slurm, --hosts: a process for each of the --gpus=G of a machine, not one for all of them;
                   local N: each process takes one GPU
  --retries=R      restarts without a new checkpoint in between before giving up (default: 5);
                   exit codes 0 (done), 2 (a mistake) and, after a request to stop, 143 (saved) are final
  JFORMER_COMMAND  local, slurm: the command to run instead of `python -m jformer.main`
END
}

readonly MISTAKE=2 LOST=75 STOPPED=143 # exit codes; LOST: this slice is unusable
exec 3>&1
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
name=${JFORMER_NAME-} type=${JFORMER_TYPE-} zone=${JFORMER_ZONE-} project=${JFORMER_PROJECT-}
poll=${JFORMER_POLL-20} retries=5 worker=0 yes='' spot='' commit='' setup='' follow='' keep=''
devices='' logs='' nodes='' gpus='' sbatch=() args=() workdir=''
hosts='' coordinator='' extras='' per=node machines=() group=()

say() { printf 'launch: %s\n' "$*" >&2; }
fail() { say "$*"; exit "$MISTAKE"; }

# Print words quoted for a shell.
quoted() {
  local word words=()
  for word; do [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]] || word=${word@Q} && words+=("$word"); done
  echo "${words[*]}"
}

# Print a command and, with --yes, run it.
step() {
  echo "+ $(quoted "$@")" >&3
  [[ ! $yes ]] || "$@"
}

# --- a slice, or hosts -----------------------------------------------------------------------------------------------

tpu() { step gcloud compute tpus "$@" --zone="$zone" --project="$project"; }

# Run a command on a worker, or on all at once.
on_workers() {
  if [[ $hosts ]]; then on_hosts "$1" in_folder "$2"; else tpu tpu-vm ssh "$name" --worker="$1" --command="$2"; fi
}

to_workers() { if [[ $hosts ]]; then on_hosts all copy "$1"; else tpu tpu-vm scp "$1" "$name:$2" --worker=all; fi; }

# Call a function for a host, by number or name, or for all at once: with the host's number and $3.
on_hosts() {
  local i code=0 found='' jobs=()
  trap 'jobs -p | xargs -r kill' EXIT
  for i in "${!machines[@]}"; do
    [[ $1 == @(all|"$i"|"${machines[i]}"|"${machines[i]#*@}") ]] || continue
    found=yes
    if [[ $yes ]]; then "$2" "$i" "$3" & jobs+=($!); else "$2" "$i" "$3"; fi
  done
  [[ $found ]] || fail "--worker=$1 is none of $hosts, or of their numbers from 0"
  for i in "${jobs[@]}"; do wait "$i" || code=$?; done
  return "$code"
}

copy() { step scp -q -o BatchMode=yes -o ServerAliveInterval=15 "$2" "${machines[$1]}:jformer.tar.gz"; }

# Run a command in a folder of the host's own, as hosts may share a home, with the place of its processes in the run.
in_folder() {
  local each=1 folder=jformer-hosts/${machines[$1]#*@}
  [[ $per == node ]] || each=$gpus
  step ssh -o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=15 "${machines[$1]}" "mkdir -p $folder && cd $folder || exit; export\
 JAX_COORDINATOR_ADDRESS=$coordinator JAX_NUM_PROCESSES=$((${#machines[@]} * each)) JAX_PROCESS_ID=$(($1 * each)); $2"
}

# Print the state of the queued resource: ABSENT, UNKNOWN if the query failed, $1 in a dry run. Hosts are there.
state() {
  local told
  if [[ $hosts ]]; then
    echo ACTIVE
  elif told=$(tpu queued-resources describe "$name" '--format=value(state.state)' 2>&1); then
    grep -xE '[A-Z_]+' <<<"${told:-$1}" | tail -n 1 || echo UNKNOWN
  elif [[ $told == *NOT_FOUND* ]]; then
    echo ABSENT
  else
    say "$told"; echo UNKNOWN
  fi
}

create() {
  local runtime now before='' asked='' unknown=0
  [[ ! $hosts ]] || return 0
  case $type in
    v5litepod-*) runtime=v2-alpha-tpuv5-lite ;;
    v5p-*) runtime=v2-alpha-tpuv5 ;;
    v6e-*) runtime=v2-alpha-tpuv6e ;;
    v[234]-*) runtime=tpu-ubuntu2204-base ;;
    *) fail "--type=$type is none of v2-N, v3-N, v4-N, v5litepod-N, v5p-N and v6e-N" ;;
  esac
  while now=$(state "${asked:-ABSENT}"); [[ $now != ACTIVE ]]; do
    if [[ $now == ABSENT && ! $asked ]]; then
      tpu queued-resources create "$name" --node-id="$name" --accelerator-type="$type" --runtime-version="$runtime" \
        ${spot:+--spot} || { say "no slice: gcloud refused, see above"; return 1; }
      asked=ACTIVE; continue
    fi
    [[ $now == "$before" ]] || say "$name: $now"
    case $now in
      FAILED | SUSPENDING | SUSPENDED | ABSENT) say "$name will not become active: delete it and create it again"; return "$LOST" ;;
      UNKNOWN) ((++unknown < 10)) || { say "gcloud does not answer: $name may exist and cost money; see launch.sh status"; keep=yes; return 1; } ;;
      *) unknown=0 ;;
    esac
    before=$now; sleep "$poll"
  done
}

# Try three times: new workers take a while to accept connections. If they answer, the failure would recur on any slice;
# if not even gcloud does, the network of this machine is down, and nothing is known about the slice.
patiently() {
  "$@" || { sleep "$poll"; "$@"; } || { sleep "$poll"; "$@"; } || {
    ! on_workers all true || { say "$name answers, but three tries failed: see above"; return 1; }
    [[ $command == all && $(state ACTIVE) == UNKNOWN ]] || return "$LOST"
    sleep "$poll"; patiently "$@"
  }
}

sync() {
  local code=0 archive=${TMPDIR:-/tmp}/jformer-$commit-$$.tar.gz # of this process: others may launch the same commit
  step git -C "$root" archive --format=tar.gz --prefix="jformer-$commit/" --output="$archive" "$commit" || return 1
  patiently to_workers "$archive" jformer.tar.gz || code=$?
  rm -f "$archive"
  ((!code)) || return "$code"
  # The stock Python is too old: uv installs one. A running run is left alone.
  patiently on_workers all "flock -n jformer.lock true || exit 0; tar -xzf ~/jformer.tar.gz && ln -sfn\
 jformer-$commit jformer && cd jformer && PATH=~/.local/bin:\$PATH && { command -v uv || curl -LsSf\
 https://astral.sh/uv/install.sh | sh; } && uv venv --clear --python=3.12 .venv && uv pip install\
 --python=.venv/bin/python --constraints=constraints.txt --editable='.[$extras]'${setup:+ && cd && eval ${setup@Q}}"
}

# The supervisor holds a lock, taken before this returns: a second start changes nothing.
run() {
  patiently on_workers all "cd jformer && { flock -w 2 9 || exit 0;\
 echo \"\$(hostname): starting (boot \$(cat /proc/sys/kernel/random/boot_id))\" >../jformer.state;\
 setsid nohup .venv/bin/python -m jformer.supervise --state=../jformer.state --retries=$retries\
 $(quoted "${group[@]}" -- --distributed "${args[@]}") </dev/null >>../jformer.log 2>&1 & echo \$! >../jformer.pid; } 9>../jformer.lock"
}

# Print the state of each supervisor: one that holds no lock and did not finish, or not in this boot, is gone.
supervisors() {
  on_workers all "{ flock -n jformer.lock sed \"s/: starting.*/: gone/; s/: running.*/: gone/; /boot\
 \$(cat /proc/sys/kernel/random/boot_id))/!s/: stopped.*/: gone/\" jformer.state || cat jformer.state; }\
 2>/dev/null || echo \"\$(hostname): gone\""
}

status() {
  local now && now=$(state ACTIVE)
  echo "$name: $now"
  [[ $now != ACTIVE ]] || supervisors
}

stop() { on_workers all "flock -n jformer.lock true || kill -TERM \$(cat jformer.pid)"; }

logs() { on_workers "$worker" "tail -n 100 ${follow:+-F }jformer.log"; }

delete() {
  local try now
  for try in 1 2 3 4 5; do
    now=$(state ACTIVE)
    [[ $now != ABSENT ]] || { say "$name: there is no such slice"; return; }
    [[ $now == DELETING ]] || ! tpu queued-resources delete "$name" --force --quiet || return 0
    say "$name: not deleted yet (try $try of 5)"
    sleep "$poll"
  done
  say "$name still exists and costs money: run this again, or delete it in the console"; return 1
}

# Wait for the end of the run: 0, MISTAKE, STOPPED or 1 if it gave up; LOST if the slice was taken or does not answer.
watch() {
  local now told='' stopped=0 restarts=0 silent
  for ((silent = 0; silent < 5; silent++)); do
    [[ ! $yes ]] || sleep "$poll"
    now=$(state ACTIVE)
    case $now in
      ACTIVE | UNKNOWN) ;;
      DELETING | ABSENT) say "$name was deleted"; keep=yes; return 1 ;;
      *) say "$name: $now"; return "$LOST" ;;
    esac
    told=$(supervisors 2>&1) || { [[ $now != UNKNOWN ]] || silent=-1; continue; } # is it this machine that is cut off?
    case ${told:-${yes:-: done}} in
      *': mistake'*) return "$MISTAKE" ;;
      *': stopped'*) [[ $now == UNKNOWN ]] || ((++stopped < 2)) || return "$STOPPED" ;; # or is it being taken away?
      *': gave up'*) return 1 ;;
      *': gone'*) # as after a reboot
        ((++restarts <= 5)) || { say "a supervisor was gone again after each of 5 restarts"; return 1; }
        stopped=0; run || return ;;
      *': starting'*) stopped=0 ;;
      *': running'*) stopped=0 restarts=0 ;;
      *': done'*) return ;;
      *) continue ;;
    esac
    silent=-1
  done
  say "not all workers answer: $(grep -v ' (boot ' <<<"$told" | tail -n 1)"; return "$LOST"
}

all() {
  local code=0
  local end="keeps running and costs money; launch.sh all watches it again, launch.sh delete ends it"
  [[ ! $hosts ]] || end="keep running; launch.sh all watches them again, launch.sh stop ends the run"
  trap 'say "$name $end"; exit 130' INT TERM
  { create && sync && run && watch; } || code=$?
  [[ ! $yes ]] || say "the run ended with exit code $code"
  if ((code == LOST)) && [[ $hosts ]]; then
    say "rerun the same command to resume from the newest checkpoint, once all hosts answer"
    return "$LOST"
  elif ((code == LOST)); then
    say "slice lost: rerun the same command to resume on a new one from the newest checkpoint"
    delete || true
    return "$LOST"
  fi
  ((code == 0)) || [[ $(state '') != ACTIVE ]] || worker=all logs || true
  [[ $keep ]] || delete || ((code)) || code=1
  return "$code"
}

# --- other machines --------------------------------------------------------------------------------------------------

here() {
  exec python -m jformer.supervise --processes="$1" ${devices:+"--devices=$devices"} --logs="${logs:-$workdir/logs}" \
    --retries="$retries" "${group[@]}" -- "${args[@]}"
}

slurm() {
  local each='' && [[ $per == node ]] || each=,JFORMER_PROCESSES=$gpus
  [[ $yes ]] || cat "$root/docs/slurm.sbatch"
  step sbatch --job-name="${name:-jformer}" --nodes="$nodes" --gpus-per-node="$gpus" \
    --export="ALL,JFORMER_RETRIES=$retries$each" "${sbatch[@]}" "$root/docs/slurm.sbatch" "${args[@]}"
}

# --- the command line ------------------------------------------------------------------------------------------------

need() { for key; do [[ ${!key} ]] || fail "--$key is missing; see launch.sh --help"; done; }

shopt -s extglob
command=${1---help} count=''
[[ $command != local || ${2-} == [1-9]*([0-9]) ]] || fail "local N: how many processes? See launch.sh --help"
[[ $command != local ]] || { command=here count=$2 && shift; }
for ((; $# > 1; )); do
  shift
  key=${1%%=*} key=${key#--}
  case $1 in
    --) args=("${@:2}"); break ;;
    --@(name|type|zone|project|commit|setup|worker|logs|hosts|coordinator|extras)=?*) printf -v "$key" %s "${1#*=}" ;;
    --@(retries|devices|nodes|gpus)=[1-9]*([0-9]) | --retries=0) printf -v "$key" %s "${1#*=}" ;;
    --per=@(node|gpu)) per=${1#*=} ;;
    --sbatch=?*) sbatch+=("${1#*=}") ;;
    --@(yes|spot|follow|keep)) printf -v "$key" yes ;;
    *) fail "unexpected $1: arguments of jformer.main come after --; see launch.sh --help" ;;
  esac
done
for argument in "${args[@]}"; do [[ $argument != --workdir=* ]] || workdir=${argument#*=}; done

[[ ! $follow || $command == logs ]] || fail "--follow is for logs"
[[ ! $devices$logs || $command == here ]] || fail "--devices and --logs are for local"
[[ ! $nodes${sbatch[*]-} || $command == slurm ]] || fail "--nodes and --sbatch are for slurm"
if [[ $hosts ]]; then
  [[ $command != @(create|delete) ]] || fail "--hosts are machines of yours: $command is for a slice"
  IFS=, read -ra machines <<<"$hosts"
  name=$hosts type=hosts zone=- project=- keep=yes coordinator=${coordinator:-${machines[0]#*@}:8476}
  extras=${extras:-cuda,gcs}
fi
extras=${extras:-tpu,gcs}
if [[ $per == gpu ]]; then
  [[ $hosts || $command == @(here|slurm) ]] || fail "--per=gpu is for local, slurm and --hosts: a slice has no GPUs"
  [[ $command == here ]] || { need gpus && group=("--processes=$gpus"); }
  group+=(--per-gpu)
fi
case $command in
  create | run | all) need name type zone project ;;
  sync | status | logs | stop | delete) need name zone project ;;
  slurm) need nodes gpus ;;
  here) [[ $workdir != *://* || $logs ]] || fail "--logs is missing: a folder of this machine, unlike $workdir" ;;
  --help | -h) usage; exit ;;
  *) fail "there is no $command; see launch.sh --help" ;;
esac
[[ $hosts || $command != @(all|run) || $type == *-[1-9]*([0-9]) ]] || fail "--type=$type has no size, as v5litepod-8 has"
if [[ $command == @(all|run|here|slurm) && ! $workdir ]]; then
  fail "--workdir=DIR is missing: give it after --, with the arguments of jformer.main"
elif [[ $hosts ]]; then
  [[ $command != @(all|run) || $workdir == @(/*|*://*) ]] || fail "--workdir=$workdir must be a path from / that all hosts see"
elif [[ $command == all && $workdir != gs://* || $command == run && $workdir != *://* && ${type##*-} -gt 8 ]]; then
  fail "--workdir=$workdir must be on gs://: each worker has its own disk, which is deleted with the slice"
fi
if [[ $command == @(all|sync) ]]; then
  [[ $commit || ! $(git -C "$root" status --porcelain --untracked-files=no) ]] ||
    fail "uncommitted changes would not be copied: commit them, or give --commit=HEAD"
  commit=$(git -C "$root" rev-parse --short=12 --verify --quiet "${commit:-HEAD}^{commit}") || fail "no such --commit"
fi
"$command" "${count:-}"
