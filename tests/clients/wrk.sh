# needs: wrk
cat >ask.lua <<'PROGRAM'
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = '{"model": "' .. os.getenv("MODEL") .. '", "prompt": "A river", "max_tokens": 4}'
PROGRAM
wrk -t 1 -c 2 -d 3s -s ask.lua "$OPENAI_BASE_URL/completions" >report
grep -q 'Requests/sec' report && ! grep -q 'Non-2xx' report
echo '3 seconds, no failure'
