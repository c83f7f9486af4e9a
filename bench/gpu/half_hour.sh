#!/usr/bin/env bash
# The first half hour on a GPU: python -m bench.gpu, again and again until everything was asked, in calls that end by
# themselves. Call it with the same STATE until it says "done"; it goes on where it was cut off, in another process too.
#
#     bench/gpu/half_hour.sh [--rehearse] STATE [SECONDS]     SECONDS: of this call (default: 560)
#
# OUT      where results appear while it runs (default: STATE); copies go to STATE, from which a later call goes on
# WHEELS   a folder of wheels that the machine lacks, installed beside the rest
# PYTHON   the interpreter (default: python3)
set -u
cd "$(dirname "$0")/../.."
flags=()
if [ "${1:-}" = --rehearse ]; then flags=(--device cpu --tiny); shift; fi
state=$(realpath -m "${1:?"usage: half_hour.sh [--rehearse] STATE [SECONDS]"}") seconds=${2:-560} out=${OUT:-$1}
python=${PYTHON:-python3} end=$((SECONDS + seconds))
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
mkdir -p "$state" "$out"
if [ -n "${WHEELS:-}" ]; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$state/site" "$WHEELS"/*.whl || exit 2
    PYTHONPATH=$PYTHONPATH:$state/site
fi
if [ "$out" != "$state" ]; then
    cp "$state"/gpu.* "$out" 2>/dev/null
    (while sleep 2; do cp -u "$out"/gpu.* "$state" 2>/dev/null; done) &
    trap 'kill $!; cp -u "$out"/gpu.* "$state"' EXIT
fi
"$python" -m bench.gpu.model | tee "$out/gpu.expected.txt"
code=3
# 3: parts are left. Above 128: a part hung or fell, and the others are still to be asked.
while { [ $code -eq 3 ] || [ $code -gt 128 ]; } && [ $((left = end - SECONDS)) -gt 30 ]; do
    timeout -k 5 $((left - 5)) "$python" -m bench.gpu --resume "$out/gpu.json" --limit $((left - 20)) --no-save "${flags[@]}" \
        2>&1 | tee -a "$out/gpu.log"
    code=${PIPESTATUS[0]}
done
if [ $code -eq 3 ] || [ $code -gt 123 ]; then echo "not done: call it again"; exit 3; fi
echo "done"
exit $code
