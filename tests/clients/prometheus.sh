# needs: promtool
curl --silent --fail "${OPENAI_BASE_URL%/v1}/metrics" | promtool check metrics
echo 'promtool finds nothing to complain of'
