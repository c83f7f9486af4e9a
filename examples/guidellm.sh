#!/bin/sh
# GuideLLM (pip install guidellm) as one user: one request at a time. TOKENIZER: the directory of the target.
set -eu
url=${FORESAY_URL:-http://127.0.0.1:8000}
model=${MODEL:-$(curl -fsS "$url/v1/models" | sed 's/^{"data":\[{"id":"\([^"]*\)".*/\1/')} # the first that is served
exec "${GUIDELLM:-guidellm}" run \
    --backend "kind=openai_http,target=$url,model=$model" \
    --profile kind=synchronous --constraint "kind=max_requests,count=${REQUESTS:-5}" \
    --data kind=synthetic_text,prompt_tokens=32,output_tokens=32 \
    --tokenizer "kind=hf_auto,model=${TOKENIZER:-server/bundled/target}" \
    --output "kind=json,path=${REPORT:-guidellm.json}" --disable-console-interactive
