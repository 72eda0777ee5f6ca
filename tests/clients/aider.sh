# packages: aider-chat
export HOME=$PWD OPENAI_API_BASE=$OPENAI_BASE_URL
timeout 120 aider --model "openai/$MODEL" --no-git --yes-always --no-check-update --analytics-disable \
    --no-show-model-warnings --no-detect-urls --map-tokens 0 --message 'Say hello in one word.' >answer
grep -q 'Tokens:.*received' answer
echo 'message'
