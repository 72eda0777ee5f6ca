# packages: aiperf
export HOME=$PWD
aiperf profile --model "$MODEL" --url "${OPENAI_BASE_URL%/v1}" --endpoint-type chat --streaming \
    --tokenizer "$PROCESSOR" --request-count 4 --concurrency 2 --synthetic-input-tokens-mean 16 \
    --output-tokens-mean 8 --ui none
grep -q '"error_request_count"' artifacts/*/profile_export_aiperf.json &&
    { echo 'some requests failed'; exit 1; }
echo 'profile of 4 requests'
