# packages: llm
export LLM_USER_PATH=$PWD/llm
mkdir -p "$LLM_USER_PATH"
printf -- '- model_id: served\n  model_name: %s\n  api_base: %s\n' "$MODEL" "$OPENAI_BASE_URL" \
    >"$LLM_USER_PATH/extra-openai-models.yaml"
llm -m served -o max_tokens 8 'Name a river.' | grep -q .
llm -m served -o max_tokens 8 --no-stream -c 'Another.' | grep -q .
echo 'stream, text'
