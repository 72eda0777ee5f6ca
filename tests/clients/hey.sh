# needs: hey
hey -n 10 -c 2 -m POST -T application/json \
    -d "{\"model\": \"$MODEL\", \"prompt\": \"A river\", \"max_tokens\": 4}" \
    "$OPENAI_BASE_URL/completions" >report
grep -q '\[200\].*10 responses' report
echo '10 requests'
