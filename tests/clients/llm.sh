# packages: llm
# Text, --schema and tools, by chat completions and by Responses. It has no way to demand a call: a
# few examples and tries mostly lead the default model to one.
export LLM_USER_PATH=$PWD/llm
mkdir -p "$LLM_USER_PATH"
for kind in chat responses; do
    printf -- '- {model_id: %s, model_name: %s, api_base: "%s", %s: true, supports_schema: true, supports_tools: true}\n' \
        "$kind" "$MODEL" "$OPENAI_BASE_URL" "$kind"
done >"$LLM_USER_PATH/extra-openai-models.yaml"
schema='{"type": "object", "additionalProperties": false, "required": ["name", "long"],
    "properties": {"name": {"type": "string", "maxLength": 20}, "long": {"type": "boolean"}}}'
cat >length.py <<'PROGRAM'
def length_of(river: str) -> str:
    "The length of a river."
    open("called", "w").close()
    return "6650 km"
PROGRAM
for river in Rhine Danube; do
    printf 'User: How long is the %s?\nAssistant:\n<tool_call>\n{"name": "length_of", "arguments": {"river": "%s"}}\n</tool_call>\n' \
        $river $river
done >question
printf 'User: How long is the Nile?\nAssistant:' >>question
uncalled=
for kind in chat responses; do
    llm -m $kind -o max_tokens 8 'Name a river.' | grep -q .
    llm -m $kind -o max_tokens 8 --no-stream -c 'Another.' | grep -q .
    for whole in '' --no-stream; do
        llm -m $kind ${whole:+$whole} -o max_tokens 100 --schema "$schema" 'Describe the Nile.' | python -m json.tool
        rm -f called
        for _ in {1..8}; do
            llm -m $kind ${whole:+$whole} -o max_tokens 100 -o temperature 0.3 --functions length.py \
                --chain-limit 2 "$(cat question)" || :
            [ ! -e called ] || break
        done
        [ -e called ] || uncalled="$uncalled $kind${whole:+ $whole}:"
    done
done
echo 'text, --schema, tools, each streamed or not, chat and Responses'"${uncalled:+;$uncalled the model called nothing}"
