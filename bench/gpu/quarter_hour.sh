#!/usr/bin/env bash
# A quarter of an hour on a GPU, in three calls, each of which ends by itself (see bench/README.md):
#
#     bench/gpu/quarter_hour.sh A|B|C [--rehearse] [--plan] [--only STEP ...]
#
# OUT      where lines.jsonl appears while it runs, and a log of what was said (default: gpu-results)
# WHEELS   a folder of wheels that the machine lacks, installed beside the rest (default: .whl, if it is there)
# PYTHON   the interpreter (default: python3)
#
# Exit code: that of python -m bench.gpu (0 done, 1 something failed, 2 usage, 3 something missing, 4 something left out).
set -u -o pipefail
cd "$(dirname "$0")/../.." || exit 2
python=${PYTHON:-python3} wheels=${WHEELS:-.whl} call=${1:-}
export OUT=${OUT:-gpu-results} PYTHONUNBUFFERED=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export PYTORCH_NVML_BASED_CUDA_CHECK=1 # whether there is a GPU is asked without touching it
case " $* " in *" --plan "*) exec "$python" -m bench.gpu "$@" ;; esac
mkdir -p "$OUT"
if compgen -G "$wheels/*.whl" >/dev/null; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "$wheels"/*.whl ||
        echo "the wheels of $wheels could not be installed" >&2
    PYTHONPATH=$PYTHONPATH:$site
fi
"$python" -m bench.gpu "$@" --spent "$SECONDS" 2>&1 | tee -a "$OUT/${call:-none}.log"
