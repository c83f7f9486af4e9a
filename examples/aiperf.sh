#!/bin/sh
# AIPerf (pip install aiperf) as one user. Its table of speculative decoding fills without any setting.
set -eu
url=${FORESAY_URL:-http://127.0.0.1:8000}
model=${MODEL:-$(curl -fsS "$url/v1/models" | sed 's/^{"data":\[{"id":"\([^"]*\)".*/\1/')} # the first that is served
exec "${AIPERF:-aiperf}" profile --model "$model" --url "$url" \
    --endpoint-type chat --streaming --concurrency 1 --request-count "${REQUESTS:-8}" \
    --tokenizer "${TOKENIZER:-server/bundled/target}" --use-server-token-count \
    --synthetic-input-tokens-mean 40 --output-tokens-mean 40 --extra-inputs ignore_eos:true --ui none
