#!/bin/bash
# All GPU checks on one machine: installs into a temporary folder, runs the GPU tests, then compute-sanitizer's four tools
# over tests/gpu/sanitize.py. Logs go to the folder named first; ends with one line for each step.
#
#   tests/gpu/check.sh OUT [pytest arguments]
#   SITE=/tmp/site       where to install; used as it is if a package is there already
#   STEPS="tests memcheck racecheck synccheck initcheck"; "stress" and "fuzz" are more (tests/gpu/stress.py, fuzz.py)
#   PASS_SECONDS=60      after which a sanitizer pass starts no further kernel
#   ONLY=^mma_           a regular expression: which kernels the sanitizer sees
#   FUZZ_COUNT=1000      random problems, of FUZZ_SEED=0
#   STRESS_SECONDS=240   of repetitions, beside a minute or two of compilation
set -uo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
shift
here=$(cd "$(dirname "$0")" && pwd)
site=${SITE:-$(mktemp -d)}
steps=${STEPS:-tests memcheck racecheck synccheck initcheck}
seconds=${PASS_SECONDS:-60}
[ -d "$site/cutjax" ] || "$here/install.sh" "$site" 2>&1 | tee "$out/install.log" || exit 1
cd "$site" || exit 1

# References run in many threads, one core each.
export OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
failed=0
summary=
for step in $steps; do
  start=$SECONDS
  if [ "$step" = tests ]; then
    # Warnings are errors in the CPU tests; here other people's packages and plugins are of any version.
    python3 -m pytest -m gpu tests/gpu -q -W default -p no:cacheprovider --tb=short --maxfail=20 --durations=8 "$@" 2>&1 | tee "$out/tests.log" | tail -n 60
  elif [ "$step" = stress ]; then
    python3 -m tests.gpu.stress --seconds "${STRESS_SECONDS:-240}" --out "$out/stress.json" 2>&1 | tee "$out/stress.log" | tail -n 40
  elif [ "$step" = fuzz ]; then
    python3 -m tests.gpu.fuzz --count "${FUZZ_COUNT:-1000}" --seed "${FUZZ_SEED:-0}" 2>&1 | tee "$out/fuzz.log" | tail -n 60
  else
    PYTHONPATH=$site timeout $((2 * seconds + 60)) compute-sanitizer --tool "$step" --error-exitcode 1 \
      python3 tests/gpu/sanitize.py --seconds "$seconds" --only "${ONLY:-}" >"$out/$step.log" 2>&1
  fi
  status=$?
  [ $status = 0 ] || failed=1
  last=$(grep -E "^(ok|FAILED)(: |$)|^all: |ERROR SUMMARY|RACECHECK SUMMARY| (passed|failed)" "$out/$step.log" | tail -n 2 | tr '\n' ' ')
  summary+="$step: exit status $status after $((SECONDS - start)) s  $last"$'\n'
done
printf '%s' "$summary" | tee "$out/summary.txt"
exit $failed
