#!/bin/sh
# The server by hand: a stream of events, a list of log-probabilities, a JSON answer that matches a schema.
set -eu
url=${FORESAY_URL:-http://127.0.0.1:8000}
model=${MODEL:-$(curl -fsS "$url/v1/models" | sed 's/^{"data":\[{"id":"\([^"]*\)".*/\1/')} # the first that is served

curl --fail-with-body -sSN "$url/v1/completions" -H 'Content-Type: application/json' \
    -d '{"model": "'"$model"'", "prompt": "Once upon a time", "max_tokens": 16, "seed": 1, "stream": true}'

curl --fail-with-body -sS "$url/v1/completions" -H 'Content-Type: application/json' \
    -d '{"model": "'"$model"'", "prompt": "Once upon a", "max_tokens": 1, "logprobs": 3, "temperature": 0}'
echo

curl --fail-with-body -sS "$url/v1/chat/completions" -H 'Content-Type: application/json' -d '{
  "model": "'"$model"'", "seed": 1, "max_completion_tokens": 100,
  "messages": [{"role": "user", "content": "Name an animal and its age."}],
  "response_format": {"type": "json_schema", "json_schema": {"name": "animal", "schema": {
    "type": "object", "additionalProperties": false, "required": ["animal", "age"],
    "properties": {"animal": {"enum": ["fox", "owl"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}}}}}}'
echo
