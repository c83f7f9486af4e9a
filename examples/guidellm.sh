#!/bin/sh
# GuideLLM (pip install guidellm) as one user: one request at a time. TOKENIZER: the directory of the target.
set -eu
exec "${GUIDELLM:-guidellm}" run \
    --backend "kind=openai_http,target=${FORESAY_URL:-http://127.0.0.1:8000},model=${MODEL:-bundled}" \
    --profile kind=synchronous --constraint "kind=max_requests,count=${REQUESTS:-5}" \
    --data kind=synthetic_text,prompt_tokens=32,output_tokens=32 \
    --tokenizer "kind=hf_auto,model=${TOKENIZER:-server/bundled/target}" \
    --output "kind=json,path=${REPORT:-guidellm.json}" --disable-console-interactive
